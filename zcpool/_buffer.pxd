# Buffer: the Python object that owns one block.
from libc.stdint cimport uint32_t, uint64_t

from zcpool._block cimport Block


cdef class Buffer:
    cdef object __weakref__
    cdef object _pool           # keeps the pool, and through it the backend
    cdef Block* _block          # NULL for an empty buffer
    cdef uint64_t _nbytes
    cdef uint64_t _owner        # the block's word when this buffer took it: its generation
    cdef uint32_t _open         # atomic: 1 until released
    cdef uint32_t _pins         # atomic


cdef class Pin:
    cdef object __weakref__
    cdef Buffer _buffer
    cdef uint32_t _held         # atomic


cdef class Mapping:
    cdef Buffer _buffer
    cdef object _view
    cdef str _mode


cdef Buffer Buffer_new()

cdef inline void Buffer_begin(Buffer self, object pool, Block* block, uint64_t nbytes) noexcept:
    """Give a fresh Buffer its block (which is IN_USE already)."""
    self._pool = pool
    self._nbytes = nbytes
    self._open = 1
    if block != NULL:
        self._owner = block.word
        self._block = block
