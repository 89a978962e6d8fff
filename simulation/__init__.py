"""Routing and all-to-all on pretended ranks, and the replay of recorded routes."""
