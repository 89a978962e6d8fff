"""Records of a run: its folder, heartbeats, process logs and routes."""
