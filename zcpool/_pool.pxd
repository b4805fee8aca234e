# Pool: the bucketed allocator. A public class holds one opaque pointer: its size is ABI for those who cimport.
from libc.stdint cimport uint32_t, uint64_t

from zcpool._core cimport Core


cdef class Pool:
    cdef object __weakref__
    cdef Core* _core
    cdef object _state          # name, backend, on_pressure: what slow paths need


cdef object Pool_take(Pool self, uint64_t nbytes, timeout, kind)
cdef int Pool_found(Pool self, uint64_t nbytes, uint64_t count) except -1
cdef uint32_t Pool_forks() noexcept
