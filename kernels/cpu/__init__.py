"""Holds kernels/cpu."""
