# Size -> class -> bucket. Pure and inline; nothing here touches memory.
#
# Classes are geometric, eight to a doubling, from 512 bytes up; below, they are multiples of 64. Rounding
# to a class so costs at most 12.5 %, or 64 bytes. A backend or a pool with a coarser granule rounds to it
# first; the class of a multiple of a power of two is again a multiple of it wherever classes are closer
# together than the granule, so both rules hold at once.
from libc.stdint cimport uint64_t

cdef extern from * nogil:
    int clz "__builtin_clzll"(unsigned long long x) noexcept

cdef enum:
    CLASSES = 312           # up to 2**47 bytes
    SMALL_CLASSES = 95      # classes 0..94 are below 1 MiB; class 95 is 1 MiB itself
    CACHED_CLASSES = 96     # those that thread caches keep:
    CACHED_BYTES = 1 << 20  # up to so many bytes
    MEDIUM_CLASSES = 111    # below 4 MiB
    LARGE_CLASSES = 127     # below 16 MiB
    BUCKETS = 4
    SMALL = 0
    MEDIUM = 1
    LARGE = 2
    HUGE = 3

cdef enum:
    GRANULE = 64            # bytes: a cache line of x86-64 and of every Arm core with an NPU beside it

cdef enum: MAX_SHIFT = 46
cdef inline uint64_t largest_request() noexcept nogil:
    """Largest request in bytes, 64 TiB: more than one process can map on the targets."""
    return <uint64_t>1 << MAX_SHIFT

cdef inline int class_of(uint64_t nbytes) noexcept nogil:
    """Return the smallest class that holds `nbytes`, 1 <= nbytes <= largest_request()."""
    cdef uint64_t last = nbytes - 1
    cdef int top
    if last < 512:
        return <int>(last >> 6)
    top = 63 - clz(last)
    return 8 * (top - 8) + <int>((last >> (top - 3)) & 7)

cdef inline uint64_t class_bytes(int cls) noexcept nogil:
    """Return the capacity in bytes of a class."""
    if cls < 8:
        return <uint64_t>(cls + 1) << 6
    return <uint64_t>(9 + (cls & 7)) << (5 + (cls >> 3))

cdef inline int class_within(uint64_t nbytes) noexcept nogil:
    """Return the largest class that fits inside `nbytes`, nbytes >= 64."""
    cdef int cls = class_of(nbytes)
    return cls if class_bytes(cls) == nbytes else cls - 1

cdef inline int bucket_of(int cls) noexcept nogil:
    if cls < SMALL_CLASSES:
        return SMALL
    if cls < MEDIUM_CLASSES:
        return MEDIUM
    return LARGE if cls < LARGE_CLASSES else HUGE

cdef inline uint64_t round_up(uint64_t nbytes, uint64_t granule) noexcept nogil:
    """Round up to a multiple of a power of two. The caller has checked that it cannot overflow."""
    return (nbytes + granule - 1) & ~(granule - 1)
