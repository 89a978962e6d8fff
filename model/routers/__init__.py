"""Routers, one per module, and the table that names them."""
