# What ZCPOOL_DEBUG=1 and zero_on_release add to a release and an acquire, for memory the CPU sees.
#
#   in use:  [ the user's requested bytes | 0xCA 0xCA ... ]     checked when it comes home: a write past the end
#   free:    [ 0xDD 0xDD ...              | 0xDD ...      ]     checked when it leaves: a write after release
#
# A fault is printed at once, since the process may die of it, and kept for the next Python entry point.
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdio cimport fprintf, snprintf, stderr
from libc.string cimport memset

from zcpool._atomics cimport load64, trylock, tryunlock
from zcpool._block cimport DEBUG, VISIBLE, ZERO, Block
from zcpool._freelist cimport cold

cdef enum:
    FREE_BYTE = 0xDD
    CANARY_BYTE = 0xCA


cdef struct FaultLog:
    uint32_t lock           # trylock; guards text
    char text[256]          # the first fault nobody has read


cdef inline uint64_t first_other(const uint8_t* p, uint64_t start, uint64_t stop, uint8_t byte) noexcept nogil:
    """Return the first offset in [start, stop) that does not hold `byte`, or stop."""
    while start < stop and p[start] == byte:
        start += 1
    return start

cdef inline void fault(FaultLog* log, Block* b, const char* what, uint64_t at) noexcept nogil:
    cdef char text[256]
    snprintf(text, sizeof(text), "block of %llu bytes at %p (capacity %llu) %s, at byte %llu",
             <unsigned long long>load64(&b.requested), b.data, <unsigned long long>b.capacity, what,
             <unsigned long long>at)
    fprintf(stderr, "zcpool: memory fault: %s\n", text)
    if trylock(&log.lock):
        if log.text[0] == 0:
            snprintf(log.text, sizeof(log.text), "%s", text)
        tryunlock(&log.lock)

cdef inline void block_wipe(Block* b, uint32_t flags, FaultLog* log) noexcept nogil:
    """Check and overwrite a block on its way home."""
    cdef uint64_t requested = load64(&b.requested)
    cdef uint64_t at
    if not flags & VISIBLE:
        return
    if flags & DEBUG:
        at = first_other(<uint8_t*>b.data, requested, b.capacity, CANARY_BYTE)
        if at < b.capacity:
            fault(log, b, "was written past its end", at)
        cold(b).wiped = 1
    memset(b.data, 0 if flags & ZERO else FREE_BYTE, b.capacity)

cdef inline void block_arm(Block* b, uint32_t flags, FaultLog* log) noexcept nogil:
    """Check a block on its way out in debug mode, and put the canary behind the requested bytes."""
    cdef uint64_t requested = load64(&b.requested)
    cdef uint64_t at
    if not flags & VISIBLE:
        return
    if cold(b).wiped:
        at = first_other(<uint8_t*>b.data, 0, b.capacity, 0 if flags & ZERO else FREE_BYTE)
        if at < b.capacity:
            fault(log, b, "was written after its release", at)
        cold(b).wiped = 0
    memset(<uint8_t*>b.data + requested, CANARY_BYTE, b.capacity - requested)
