"""The kernels on CPUs: one C++ library, its backend of grouped products, and where its memory is."""
