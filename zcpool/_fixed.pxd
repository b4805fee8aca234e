# FixedPool: all blocks made at once, none ever given back.
from libc.stdint cimport uint32_t, uint64_t

from zcpool._pool cimport Pool


cdef class FixedPool:
    cdef object __weakref__
    cdef Pool _pool
    cdef readonly uint64_t nbytes
    cdef readonly uint64_t count
    cdef uint32_t _forks        # one more than the forks the process had behind it when the blocks were made
    cdef dict _fills            # by forks: the lock under which they are made
