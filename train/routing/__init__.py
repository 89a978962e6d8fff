"""Recording what the routers of a run decided."""
