"""The expert layers' operations as Triton kernels."""
