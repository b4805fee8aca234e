# FixedPool: all blocks made at once, none ever given back.
from libc.stdint cimport uint64_t

from zcpool._pool cimport Pool


cdef class FixedPool:
    cdef object __weakref__
    cdef Pool _pool
    cdef readonly uint64_t nbytes
    cdef readonly uint64_t count
