# Cutting blocks from arenas. All under core.lock.
from libc.stdint cimport uint16_t, uint64_t

from zcpool._arena cimport arena_carve
from zcpool._atomics cimport bump64, load32
from zcpool._block cimport CACHED, SLOW_RELEASE, Block, Region, ThreadCache, block_set
from zcpool._cache cimport block_kept, block_slot, cache_put, half
from zcpool._core cimport Core, home_of, lend, list_of
from zcpool._freelist cimport push_chain
from zcpool._process cimport thread_cache
from zcpool._request cimport Request
from zcpool._sizes cimport bucket_of

cdef inline Block* block_make(Core* core, Block* piece, int kind, int cls) noexcept nogil:
    """Make a free block, held by the caller, of a fresh piece. Under core.lock."""
    piece.cls = <uint16_t>cls
    piece.kind = <unsigned char>kind
    piece.bucket = <unsigned char>bucket_of(cls)
    piece.slot = block_slot(piece)
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
    if not block_kept(b) or c == NULL or load32(&core.head.flags) & SLOW_RELEASE:
        return b
    batch = c.slots[rq.cls].batch
    if batch * 2 <= half(c.slots[rq.cls].most):
        c.slots[rq.cls].batch = <uint16_t>(batch * 2)
    while batch > 1:
        batch -= 1
        more = carve_one(core, rq)
        if more == NULL:
            break
        if not cache_put(c, more):
            push_chain(&home_of(more).head, more, more)
            break
        lend(core, more.bucket, more.capacity)
    return b
