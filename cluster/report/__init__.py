"""Shows jobs by their run folders: live, as one line, as curves, as logs."""
