# cython: language_level=3
"""A Cython module that knows zcpool by cimport: its types, and the C door by the header."""

from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memset

from zcpool._buffer cimport Buffer
from zcpool._pool cimport Pool

cdef extern from "zcpool.h" nogil:
    ctypedef struct zc_block:
        void* data
        uint64_t capacity
        uint64_t nbytes
    ctypedef struct zc_cache:
        pass
    ctypedef struct zc_api:
        const zc_block* (*acquire)(uint64_t pool, size_t nbytes) noexcept nogil
        int (*release)(uint64_t token) noexcept nogil
        zc_cache* (*cache)(uint64_t pool) noexcept nogil
        const char* (*error)() noexcept nogil
    const zc_api* zc_import() except? NULL with gil
    uint64_t zc_token(const zc_block* b) noexcept
    const zc_block* zc_acquire_fast(const zc_api* api, zc_cache* c, uint64_t pool, size_t nbytes) noexcept
    int zc_release_fast(const zc_api* api, zc_cache* c, const zc_block* b) noexcept

cdef const zc_api* api = zc_import()
if api == NULL:
    raise ImportError("there is no C door")


def address(Buffer buf not None):
    """Return what only the type's C side knows without asking Python."""
    return <uint64_t><size_t>buf._block.data


def fill(Pool pool not None, size_t nbytes, int value):
    """Acquire, fill and release without the GIL; return the capacity."""
    cdef uint64_t number = pool.c_handle
    cdef const zc_block* b
    cdef uint64_t capacity = 0
    with nogil:
        b = api.acquire(number, nbytes)
        if b != NULL:
            memset(b.data, value, nbytes)
            capacity = b.capacity
            api.release(zc_token(b))
    if b == NULL:
        raise MemoryError(api.error().decode())
    return capacity


def loop(Pool pool not None, size_t nbytes, int64_t rounds):
    """The inlined way; return how many rounds were served."""
    cdef uint64_t number = pool.c_handle
    cdef zc_cache* cache
    cdef const zc_block* b
    cdef int64_t served = 0
    with nogil:
        cache = api.cache(number)
        while served < rounds:
            b = zc_acquire_fast(api, cache, number, nbytes)
            if b == NULL or zc_release_fast(api, cache, b) != 0:
                break
            served += 1
    return served
