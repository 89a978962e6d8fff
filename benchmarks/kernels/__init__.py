"""Compares the expert layer with dense layers and other implementations."""
