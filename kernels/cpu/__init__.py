"""CPU kernels: one C++ library, its grouped-product backend, and shared workspaces."""
