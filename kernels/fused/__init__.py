"""Holds kernels/fused."""
