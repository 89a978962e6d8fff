"""Backends on other libraries' grouped products: torch's `grouped_mm` and MegaBlocks."""
