"""zcpool against mimalloc, jemalloc, tcmalloc and glibc, in C, side by side in one process."""
