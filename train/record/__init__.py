"""Records what a run does: its folder, heartbeats, process logs and routes."""
