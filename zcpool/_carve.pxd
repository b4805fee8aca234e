# Cutting blocks from arenas, and the caches of threads that a few more go into. All under core.lock.
from libc.stdint cimport uint16_t, uint64_t
from libc.string cimport memset

from zcpool._arena cimport arena_carve
from zcpool._atomics cimport bump64, load32, spinlock, tryunlock
from zcpool._block cimport CACHED, SLOW_RELEASE, Block, Region, ThreadCache, block_set
from zcpool._core cimport Core, home_of, lend, list_of, unlend
from zcpool._freelist cimport CACHE_BYTES, CACHE_CLASS_BYTES, CACHE_SLOTS, cache_put, push_chain
from zcpool._process cimport thread_adopt, thread_cache, thread_id
from zcpool._request cimport Request
from zcpool._sizes cimport SMALL_CLASSES, bucket_of, class_bytes

cdef extern from "<stdlib.h>" nogil:
    int posix_memalign(void** memory, size_t alignment, size_t nbytes) noexcept


cdef inline Block* block_make(Core* core, Block* piece, int kind, int cls) noexcept nogil:
    """Make a free block, held by the caller, of a fresh piece. Under core.lock."""
    piece.cls = <uint16_t>cls
    piece.kind = <unsigned char>kind
    piece.bucket = <unsigned char>bucket_of(cls)
    block_set(piece, CACHED)
    list_of(core, kind, cls).made += 1
    bump64(&core.carved_bytes, piece.capacity)
    return piece

cdef inline Region* fullest_arena(Core* core, uint64_t nbytes, uint64_t above) noexcept nogil:
    """Return the arena with the least free bytes that has `nbytes`, and more free than `above`. Under core.lock."""
    cdef Region* r = core.regions
    cdef Region* best = NULL
    while r != NULL:
        if r.bins != NULL and r.nbytes - r.carved_bytes >= nbytes and r.nbytes - r.carved_bytes > above:
            if best == NULL or r.nbytes - r.carved_bytes < best.nbytes - best.carved_bytes:
                best = r
        r = r.next
    return best

cdef inline Block* carve_one(Core* core, Request* rq) noexcept nogil:
    """Cut a block from the fullest arena that has room, so that others become empty. Under core.lock."""
    cdef Region* r = fullest_arena(core, rq.capacity, 0)
    cdef Block* piece
    while r != NULL:
        piece = arena_carve(r, rq.capacity, rq.alignment)
        if piece != NULL:
            return block_make(core, piece, rq.kind, rq.cls)
        r = fullest_arena(core, rq.capacity, r.nbytes - r.carved_bytes)     # no span fits: the next fullest
    return NULL

cdef inline Block* carve(Core* core, Request* rq) noexcept nogil:
    """Cut a block, and a few more into the caller's cache while at it. Under core.lock."""
    cdef Block* b = carve_one(core, rq)
    cdef Block* more
    cdef ThreadCache* c
    cdef int batch
    if b == NULL:
        return NULL
    lend(core, b.bucket, b.capacity)
    c = <ThreadCache*>thread_cache(core.head.id)
    if rq.kind or rq.cls >= SMALL_CLASSES or c == NULL or load32(&core.head.gate.flags) & SLOW_RELEASE:
        return b
    spinlock(&c.lock)
    batch = c.slots[rq.cls].batch
    if batch * 2 <= (c.slots[rq.cls].limit + 1) // 2:
        c.slots[rq.cls].batch = <uint16_t>(batch * 2)
    while batch > 1:
        batch -= 1
        more = carve_one(core, rq)
        if more == NULL:
            break
        lend(core, 0, more.capacity)
        if not cache_put(c, more):
            push_chain(&home_of(more).head, more, more)
            unlend(core, 0, more.capacity)
            break
    tryunlock(&c.lock)
    return b

cdef inline void cache_ensure(Core* core) noexcept nogil:
    """Give the calling thread a cache, that of an ended thread if there is one. Under core.lock.

    Without memory for it the thread does without.
    """
    cdef ThreadCache* c = core.caches
    cdef void* memory = NULL
    cdef uint64_t limit
    cdef int cls
    if thread_cache(core.head.id) != NULL:
        return
    while c != NULL and not owner_take(c):
        c = c.next
    if c == NULL:
        if posix_memalign(&memory, 64, sizeof(ThreadCache)) != 0:
            return
        c = <ThreadCache*>memset(memory, 0, sizeof(ThreadCache))
        c.core = &core.head
        c.gate = &core.head.gate
        c.granule = core.granule
        c.bytes_limit = CACHE_BYTES
        for cls in range(SMALL_CLASSES):
            limit = CACHE_CLASS_BYTES // class_bytes(cls)
            c.slots[cls].limit = <uint16_t>(limit if limit < CACHE_SLOTS else CACHE_SLOTS)
            c.slots[cls].batch = 1
        c.next = core.caches
        core.caches = c
    if thread_adopt(core.head.id, c) != 0:
        spinlock(&c.lock)
        c.owner = NULL
        tryunlock(&c.lock)
        return
    spinlock(&c.lock)
    c.owner = thread_id()
    tryunlock(&c.lock)

cdef inline bint owner_take(ThreadCache* c) noexcept nogil:
    """Claim the cache of an ended thread."""
    cdef bint free_
    spinlock(&c.lock)
    free_ = c.owner == NULL
    if free_:
        c.owner = <void*>1      # until thread_adopt has said who
    tryunlock(&c.lock)
    return free_
