"""The expert layers' operations in C++ for CPUs with AVX-512."""
