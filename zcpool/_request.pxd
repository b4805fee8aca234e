# What is asked of a pool: its class, its kind, where its block comes from, and why it failed.
from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libc.string cimport memset

from zcpool._atomics cimport mutex_lock, storeptr_release
from zcpool._backend cimport Fault
from zcpool._core cimport EXCLUSIVE, Core, request_class
from zcpool._freelist cimport FreeList
from zcpool._reclaim cimport core_unlock
from zcpool._sizes cimport CLASSES, bucket_of, class_bytes, class_of, round_up

cdef extern from "<stdlib.h>" nogil:
    int posix_memalign(void** memory, size_t alignment, size_t nbytes) noexcept

cdef enum Reason:
    NONE = 0
    IS_CLOSED               # the pool
    TOO_LARGE               # for the limit, the backend or the machine: waiting cannot help
    LIMIT_BYTES
    LIMIT_HANDLES
    IS_FROZEN
    ALL_IN_USE              # FixedPool
    BACKEND_FAILED
    NO_DESCRIPTORS          # no host memory for the pool's own books

cdef struct Request:
    uint64_t nbytes             # as asked
    uint64_t capacity           # of the class
    uint64_t alignment          # bytes, at least the pool's granule
    int cls
    int kind
    int bucket
    bint carve                  # from arenas
    int state                   # what the block becomes: IN_USE or HELD
    bint founding               # a FixedPool makes its own blocks
    Reason reason               # why it failed
    uint32_t landed             # flights of its own that ended in vain: they are no news to itself
    Fault fault                 # what the backend said, when it was the backend


cdef inline void request_init(Core* core, Request* rq, uint64_t nbytes, uint64_t alignment,
                              bint exclusive, int state) noexcept nogil:
    """Classify 1 <= nbytes <= largest_request(); alignment: a power of two, at most 2 MiB."""
    cdef int order = 0
    memset(rq, 0, sizeof(Request))
    rq.nbytes = nbytes
    rq.state = state
    rq.alignment = core.granule
    if alignment > core.granule:
        rq.alignment = alignment
        rq.cls = class_of(round_up(nbytes, alignment))
    else:
        rq.cls = request_class(core, nbytes)
    rq.capacity = class_bytes(rq.cls)
    rq.bucket = bucket_of(rq.cls)
    rq.carve = not exclusive and rq.capacity <= core.arena_limit and rq.alignment <= core.region_alignment
    if rq.alignment > (core.granule if rq.carve else core.region_alignment):
        while (core.granule << order) < rq.alignment:
            order += 1
    rq.kind = order
    if exclusive and rq.capacity <= core.arena_limit:
        rq.kind += EXCLUSIVE


cdef inline bint worth_waiting(Request* rq) noexcept nogil:
    """Say whether a failed request can succeed once somebody gives memory back."""
    return rq.reason != IS_CLOSED and rq.reason != TOO_LARGE and not (
        rq.reason == BACKEND_FAILED and not rq.fault.no_memory)

cdef inline bint kind_ensure(Core* core, int kind) noexcept nogil:
    """Make the free lists of a kind when it is first used; they stay with the control block."""
    cdef void* lists = NULL
    mutex_lock(&core.lock)
    if core.lists[kind] == NULL and posix_memalign(&lists, sizeof(FreeList), CLASSES * sizeof(FreeList)) == 0:
        memset(lists, 0, CLASSES * sizeof(FreeList))
        storeptr_release(<uintptr_t*>&core.lists[kind], <uintptr_t>lists)
    core_unlock(core)
    return core.lists[kind] != NULL
