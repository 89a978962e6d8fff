"""The expert layers' operations on CPUs, on torch's own micro-kernels."""
