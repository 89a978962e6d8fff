"""Backends on the grouped products of other libraries: torch's `grouped_mm` and MegaBlocks."""
