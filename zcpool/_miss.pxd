# What acquire does when nothing of the class is cached: the slow path, with the GIL released and no lock held.
#
#   poll fences -> list -> arena -> other threads' caches -> next class -> give back what is stale -> backend
#
# Each step is tried before the next costs more.
from libc.stdint cimport uint32_t, uint64_t, uintptr_t

from zcpool._atomics cimport add32, add64, load32, load32_seq, load64, load64_seq, loadptr_acquire, mutex_lock, \
    store32, unlikely
from zcpool._block cimport CLOSED, DEBUG, FIXED, FROZEN, Block, Region, ThreadCache
from zcpool._carve cimport carve
from zcpool._core cimport Core, hand_out, home_of, lent_total, take_shared
from zcpool._debug cimport block_arm
from zcpool._fence cimport FENCE_BATCH, FenceNode, nodes_look, queue_take
from zcpool._freelist cimport FreeList
from zcpool._grow cimport arena_size, make_room, region_get, region_insert
from zcpool._process cimport in_backend, thread_cache
from zcpool._reclaim cimport arenas_trim, core_unlock, fences_end, fences_return, flight_end, flight_wait, list_bytes, \
    list_oldest, list_trim, lists_trim, regions_free
from zcpool._request cimport ALL_IN_USE, BACKEND_FAILED, IS_CLOSED, IS_FROZEN, LIMIT_BYTES, LIMIT_HANDLES, \
    NO_DESCRIPTORS, NONE, TOO_LARGE, Request, kind_ensure
from zcpool._sizes cimport CACHED_CLASSES, CLASSES
from zcpool._visit cimport big_reclaim, big_show, cache_ensure, caches_flush, steal

cdef enum:
    MAX_WAITS = 64              # for flights that end and change nothing


# ---- one try -------------------------------------------------------------------------------------------

cdef inline Block* miss_try(Core* core, Request* rq) noexcept nogil:
    """Find a block by every means but pressure; NULL with the reason. The block is not handed out yet.

    A limit is final only if it was reached with nothing in flight: somebody's reservation may come to nothing,
    memory may just be going back, a fence may just have signalled. Then wait for the outcome and look again.
    """
    cdef Block* b
    cdef uint32_t landed, turn
    cdef int waits = 0
    while True:
        fences_poll(core)
        landed = load32_seq(&core.landed)
        rq.landed = 0
        if load32_seq(&core.head.flags) & CLOSED:
            rq.reason = IS_CLOSED
            return NULL
        b = find(core, rq)
        if b == NULL and not refused(core, rq):
            b = grow(core, rq)
        if b != NULL or (rq.reason != LIMIT_BYTES and rq.reason != LIMIT_HANDLES):
            return b
        if landed + rq.landed == load32_seq(&core.landed):
            if load32_seq(&core.inflight) == 0 or waits == MAX_WAITS or in_backend():
                return NULL
            turn = load32_seq(&core.flight_turn)
            flight_wait(core)
            waits += turn != load32_seq(&core.flight_turn)

cdef inline Block* find(Core* core, Request* rq) noexcept nogil:
    """Look for a block among what the pool holds."""
    cdef Block* b
    big_show(core)
    b = take_shared(core, rq.kind, rq.cls)
    if b == NULL:
        mutex_lock(&core.lock)
        if rq.carve and not load32(&core.head.flags) & FIXED:
            b = carve(core, rq)
        if b == NULL:
            b = take_anywhere(core, rq.kind, rq.cls)
        if b == NULL and rq.cls + 1 < CLASSES:
            b = take_anywhere(core, rq.kind, rq.cls + 1)
        core_unlock(core)
    return b

cdef inline Block* take_anywhere(Core* core, int kind, int cls) noexcept nogil:
    """Take a free block of a class, also from other threads' caches. Under core.lock."""
    if kind == 0 and cls < CACHED_CLASSES:
        return steal(core, cls)
    if kind == 0:
        big_reclaim(core)
    return take_shared(core, kind, cls)

cdef inline bint refused(Core* core, Request* rq) noexcept nogil:
    """Say whether the backend may not be asked."""
    cdef uint32_t flags = load32_seq(&core.head.flags)
    if flags & FIXED and not rq.founding:
        rq.reason = ALL_IN_USE
    elif flags & FROZEN:
        rq.reason = IS_FROZEN
    elif rq.capacity > core.largest_region or (core.max_bytes and rq.capacity > core.max_bytes):
        rq.reason = TOO_LARGE
    else:
        return False
    return True

cdef inline Block* grow(Core* core, Request* rq) noexcept nogil:
    """Ask the backend for a region and take the first block of it."""
    cdef uint64_t nbytes = arena_size(core, rq.capacity) if rq.carve else rq.capacity
    cdef Region* r
    cdef Block* b
    if make_room(core, rq, nbytes) and rq.carve:
        b = find(core, rq)      # what lay cached in stale classes has been joined
        if b != NULL:
            return b
    r = region_get(core, rq, nbytes, rq.capacity)
    return region_insert(core, rq, r) if r != NULL else NULL


# ---- fences, pressure, trim ------------------------------------------------------------------------------

cdef inline void fences_poll(Core* core) noexcept nogil:
    """Look at a bounded batch of fd fences; blocks whose last one has signalled go home."""
    cdef FenceNode* batch[64]
    cdef short seen[64]
    cdef int n
    if load64_seq(&core.fences.pending) == 0:
        return
    add32(&core.inflight, 1)    # whoever finds nothing meanwhile waits for what this look brings home
    mutex_lock(&core.lock)
    n = queue_take(&core.fences, batch)
    core_unlock(core)
    nodes_look(batch, n, seen)
    mutex_lock(&core.lock)
    fences_return(core, batch, seen, n)
    core_unlock(core)
    flight_end(core, fences_end(core, batch, seen, n))

cdef inline void fences_poll_all(Core* core) noexcept nogil:
    """Look at every fence once: before a request fails, not on the way of one that succeeds."""
    cdef uint64_t batches = load64_seq(&core.fences.pending) // FENCE_BATCH
    while batches:
        fences_poll(core)
        batches -= 1

cdef inline uint64_t core_trim(Core* core, uint64_t keep_bytes) noexcept nogil:
    """Give cached memory back to the backend until at most `keep_bytes` are cached; return bytes given back."""
    cdef Region* chain = NULL
    cdef FreeList* blocks
    cdef uint64_t cached
    if load32_seq(&core.head.flags) & (FROZEN | FIXED):
        return 0
    mutex_lock(&core.lock)
    caches_flush(core)
    if keep_bytes == 0:
        lists_trim(core, NULL, &chain)
    while keep_bytes:
        cached = core.carved_bytes - min(core.carved_bytes, lent_total(core))
        blocks = list_oldest(core, 0, True) if cached > keep_bytes else NULL
        if blocks == NULL:
            break
        list_trim(core, blocks, (cached - keep_bytes + list_bytes(blocks) - 1) // list_bytes(blocks), &chain)
    arenas_trim(core, False, &chain)
    core_unlock(core)
    return regions_free(core, chain, True)


# ---- the whole way ---------------------------------------------------------------------------------------

cdef inline ThreadCache* cache_of(Core* core) noexcept nogil:
    """Return the calling thread's cache, made if need be. Not with the GIL."""
    if unlikely(thread_cache(core.head.id) == NULL):
        mutex_lock(&core.lock)
        cache_ensure(core)
        core_unlock(core)
    return <ThreadCache*>thread_cache(core.head.id)

cdef inline Block* core_miss(Core* core, Request* rq) noexcept nogil:
    """Serve a request by every means the pool has of its own, or return NULL with rq.reason.

    Runs with the GIL released and no lock held. The second try comes after all that is cached was given back.
    """
    cdef Block* b = NULL
    rq.reason = NONE
    cache_of(core)
    if loadptr_acquire(<uintptr_t*>&core.lists[rq.kind]) == 0 and not kind_ensure(core, rq.kind):
        rq.reason = NO_DESCRIPTORS
        return NULL
    if not load32_seq(&core.head.flags) & CLOSED:
        big_show(core)
        b = take_shared(core, rq.kind, rq.cls)
    if b == NULL:
        add32(&core.epoch, 1)
        b = miss_try(core, rq)
        if b == NULL and may_help(core, rq):
            fences_poll_all(core)
            core_trim(core, cached_without(core, rq.capacity))      # first what was used longest ago
            b = miss_try(core, rq)
        if b == NULL and may_help(core, rq) and (rq.reason != BACKEND_FAILED or rq.fault.no_memory):
            core_trim(core, 0)
            b = miss_try(core, rq)
        if b == NULL:
            return NULL
        add64(&core.counters.misses[b.bucket], 1)
    return serve(core, rq, b)

cdef inline bint may_help(Core* core, Request* rq) noexcept nogil:
    """Say whether giving memory back, or just another try, can change the outcome."""
    return (rq.reason == ALL_IN_USE and load64(&core.fences.pending) > FENCE_BATCH
            or rq.reason == IS_FROZEN and load64(&core.fences.pending) > FENCE_BATCH
            or rq.reason == LIMIT_BYTES or rq.reason == LIMIT_HANDLES or rq.reason == NO_DESCRIPTORS
            or (rq.reason == BACKEND_FAILED and not rq.fault.final))

cdef inline uint64_t cached_without(Core* core, uint64_t nbytes) noexcept nogil:
    """Return how much may stay cached if `nbytes` are to be given back; at least one byte, for "not all"."""
    cdef uint64_t outside, carved
    mutex_lock(&core.lock)
    outside = lent_total(core) + nbytes
    carved = core.carved_bytes
    core_unlock(core)
    return carved - outside if carved > outside else 1

cdef inline Block* serve(Core* core, Request* rq, Block* b) noexcept nogil:
    add64(&core.counters.acquires[b.bucket], 1)
    store32(&home_of(b).stamp, load32(&core.epoch))
    hand_out(b, rq.nbytes, rq.state)
    if load32(&core.head.flags) & DEBUG:
        block_arm(b, load32(&core.head.flags), &core.faults)
    return b
