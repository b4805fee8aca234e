# What acquire does when nothing of the class is cached: the slow path, with the GIL released and no lock held.
#
#   poll fences -> list -> arena -> other threads' caches -> next class -> give back what is stale -> backend
#
# Each step is tried before the next costs more. Limits are kept by reserving bytes and a handle with a
# compare-and-swap before the backend is called, unlocked; the region is put in under core.lock afterwards.
from libc.stdint cimport uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from zcpool._arena cimport arena_carve, region_begin
from zcpool._atomics cimport add32, add64, cas64, futex_wait, load32, load32_seq, load64, load64_seq, mutex_lock, \
    spinlock, storeptr_release, sub64, trylock, tryunlock
from zcpool._backend cimport Fault
from zcpool._block cimport CACHED, CLOSED, DEBUG, FIXED, FROZEN, SLOW_RELEASE, VISIBLE, Block, Region, block_set
from zcpool._core cimport ALIGNMENTS, EXCLUSIVE, Core, hand_out, home_of, lend, lent_total, list_of, peak_note, \
    request_class, take_shared
from zcpool._debug cimport block_arm
from zcpool._fence cimport FenceNode, nodes_look, queue_take
from zcpool._freelist cimport CACHE_CLASS_BYTES, CACHE_SLOTS, FreeList, ThreadCache, cache_put, push_chain
from zcpool._process cimport thread_adopt, thread_cache, thread_id
from zcpool._reclaim cimport RECENT, arenas_trim, caches_flush, core_drain, core_unlock, fences_end, fences_return, \
    flight_end, list_bytes, list_oldest, list_trim, lists_trim, region_free, region_link, region_unlink, \
    regions_free, reserved_note, steal
from zcpool._sizes cimport CLASSES, SMALL, SMALL_CLASSES, bucket_of, class_bytes, class_of, round_up

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

cdef enum:
    FIRST_ARENA = 256 << 10     # bytes; arenas double from here to the configured size
    RETAIN = 64 << 20           # bytes cached before stale lists are given back on a miss


cdef struct Request:
    uint64_t nbytes             # as asked
    uint64_t capacity           # of the class
    uint64_t alignment          # bytes, at least the pool's granule
    int cls
    int kind
    int bucket
    bint carve                  # from arenas
    Reason reason               # why it failed
    Fault fault                 # what the backend said, when it was the backend


cdef inline void request_init(Core* core, Request* rq, uint64_t nbytes, uint64_t alignment, bint exclusive) noexcept nogil:
    """Classify 1 <= nbytes <= max_bytes(); alignment: a power of two, at most 2 MiB."""
    cdef int order = 0
    memset(rq, 0, sizeof(Request))
    rq.nbytes = nbytes
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


cdef inline bint kind_ensure(Core* core, int kind) noexcept nogil:
    """Make the free lists of a kind when it is first used; they stay with the control block."""
    cdef void* lists = NULL
    mutex_lock(&core.lock)
    if core.lists[kind] == NULL and posix_memalign(&lists, sizeof(FreeList), CLASSES * sizeof(FreeList)) == 0:
        memset(lists, 0, CLASSES * sizeof(FreeList))
        storeptr_release(<uintptr_t*>&core.lists[kind], <uintptr_t>lists)
    core_unlock(core)
    return core.lists[kind] != NULL


# ---- one try -------------------------------------------------------------------------------------------

cdef inline Block* miss_try(Core* core, Request* rq) noexcept nogil:
    """Find a block by every means but pressure; NULL with the reason. The block is not handed out yet."""
    cdef Block* b
    cdef uint32_t turn
    while True:
        turn = load32_seq(&core.inflight_turn)
        fences_poll(core)
        if load32_seq(&core.head.flags) & CLOSED:
            rq.reason = IS_CLOSED
            return NULL
        b = find(core, rq)
        if b == NULL and not refused(core, rq):
            b = grow(core, rq)
        if b != NULL:
            return b
        if rq.reason != LIMIT_BYTES and rq.reason != LIMIT_HANDLES:
            return NULL
        # Somebody's reservation may come to nothing, or his memory may just be going back: his bytes stand
        # against the limit, but nobody has them. Wait for the outcome and look again.
        if load32_seq(&core.inflight) == 0 and turn == load32_seq(&core.inflight_turn):
            return NULL
        if load32_seq(&core.inflight):
            futex_wait(&core.inflight_turn, turn, 50_000_000)

cdef inline Block* find(Core* core, Request* rq) noexcept nogil:
    """Look for a block among what the pool holds."""
    cdef Block* b = take_shared(core, rq.kind, rq.cls)
    if b == NULL:
        mutex_lock(&core.lock)
        cache_ensure(core)
        if rq.carve and not load32(&core.head.flags) & FIXED:
            b = carve(core, rq)
        if b == NULL and rq.kind == 0 and rq.cls < SMALL_CLASSES:
            b = steal(core, rq.cls)
        elif b == NULL:
            b = take_shared(core, rq.kind, rq.cls)
        if b == NULL and rq.cls + 1 < CLASSES:
            b = take_shared(core, rq.kind, rq.cls + 1)
        core_unlock(core)
    return b

cdef inline bint refused(Core* core, Request* rq) noexcept nogil:
    """Say whether the backend may not be asked."""
    cdef uint32_t flags = load32_seq(&core.head.flags)
    if flags & FIXED:
        rq.reason = ALL_IN_USE
    elif flags & FROZEN:
        rq.reason = IS_FROZEN
    elif rq.capacity > core.largest_region or (core.max_bytes and rq.capacity > core.max_bytes):
        rq.reason = TOO_LARGE
    else:
        return False
    return True


# ---- arenas --------------------------------------------------------------------------------------------

cdef inline Block* block_make(Core* core, Block* piece, int kind, int cls) noexcept nogil:
    """Make a free block, held by the caller, of a fresh piece. Under core.lock."""
    piece.cls = <uint16_t>cls
    piece.kind = <unsigned char>kind
    piece.bucket = <unsigned char>bucket_of(cls)
    block_set(piece, CACHED)
    list_of(core, kind, cls).made += 1
    core.carved_bytes += piece.capacity
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
    if rq.kind or rq.cls >= SMALL_CLASSES or c == NULL or load32(&core.head.flags) & SLOW_RELEASE:
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
            sub64(&core.lent[0], more.capacity)
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
        c.core = core
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


# ---- the backend ---------------------------------------------------------------------------------------

cdef inline Block* grow(Core* core, Request* rq) noexcept nogil:
    """Ask the backend for a region and take the first block of it."""
    cdef uint64_t nbytes = arena_size(core, rq.capacity) if rq.carve else rq.capacity
    cdef Region* r
    cdef Block* b
    if make_room(core, nbytes) and rq.carve:
        b = find(core, rq)      # what lay cached in stale classes has been joined
        if b != NULL:
            return b
    r = region_get(core, rq, nbytes, rq.capacity)
    return region_insert(core, rq, r) if r != NULL else NULL

cdef inline uint64_t arena_size(Core* core, uint64_t least) noexcept nogil:
    """Return the size of the next arena: as much as all arenas have, between the first size and the largest."""
    cdef uint64_t nbytes = load64(&core.arena_total)
    if nbytes < FIRST_ARENA:
        nbytes = FIRST_ARENA
    if nbytes > core.arena_bytes:
        nbytes = core.arena_bytes
    if nbytes > core.largest_region:
        nbytes = core.largest_region
    return least if nbytes < least else round_up(nbytes, core.granule)

cdef inline bint make_room(Core* core, uint64_t nbytes) noexcept nogil:
    """Give back lists nothing has been taken from for long, before the pool grows to a new peak."""
    cdef Region* chain = NULL
    cdef FreeList* l
    cdef uint64_t cached, lent
    cdef uint64_t given = 0
    mutex_lock(&core.lock)
    lent = lent_total(core)
    core.recent_peak = max(lent, core.recent_peak - core.recent_peak // 64)
    cached = core.carved_bytes - lent if core.carved_bytes > lent else 0
    if (load64(&core.reserved) + nbytes > load64(&core.counters.peak_reserved_total)
            or cached > max(<uint64_t>RETAIN, core.recent_peak // 4)):
        while given < nbytes:
            l = list_oldest(core, RECENT, False)
            if l == NULL:
                break
            given += list_trim(core, l, l.made - l.floor, &chain)
        arenas_trim(core, True, &chain)
    core_unlock(core)
    regions_free(core, chain, True)
    return given > 0

cdef inline Region* region_get(Core* core, Request* rq, uint64_t nbytes, uint64_t least) noexcept nogil:
    """Reserve bytes and get a region of `nbytes`, or of less, down to `least`; in flight until inserted."""
    cdef Region* r
    cdef uint64_t left
    while True:
        if bytes_reserve(core, rq, nbytes):
            r = region_call(core, rq, nbytes)
            if r != NULL:
                return r
            sub64(&core.reserved, nbytes)
            sub64(&core.handles, 1)
            flight_end(core)
            if nbytes == least or rq.reason != BACKEND_FAILED or not rq.fault.no_memory:
                return NULL
            nbytes = max(least, nbytes // 2 // core.granule * core.granule)
        elif nbytes == least:
            return NULL
        else:
            # The last arena shrinks to fit the limit.
            left = load64(&core.reserved)
            left = (core.max_bytes - left) // core.granule * core.granule if core.max_bytes > left else 0
            nbytes = left if least < left < nbytes else least

cdef inline bint bytes_reserve(Core* core, Request* rq, uint64_t nbytes) noexcept nogil:
    """Count a region against the limits before it exists."""
    cdef uint64_t seen = load64_seq(&core.handles)
    while True:
        if core.max_handles and seen >= core.max_handles:
            rq.reason = LIMIT_HANDLES
            return False
        if cas64(&core.handles, &seen, seen + 1):
            break
    seen = load64_seq(&core.reserved)
    while True:
        if core.max_bytes and (seen + nbytes > core.max_bytes):
            sub64(&core.handles, 1)
            rq.reason = LIMIT_BYTES
            return False
        if cas64(&core.reserved, &seen, seen + nbytes):
            break
    add32(&core.inflight, 1)
    return True

cdef inline Region* region_call(Core* core, Request* rq, uint64_t nbytes) noexcept nogil:
    """Call the backend, with no lock held."""
    cdef Region* r = <Region*>calloc(1, sizeof(Region))
    if r == NULL:
        rq.reason = NO_DESCRIPTORS
        return NULL
    r.core = &core.head
    r.asked = nbytes
    r.bucket = SMALL if rq.carve else rq.bucket
    r.fd = -1
    if core.ops.allocate(core.head.backend, r, nbytes, max(core.region_alignment, rq.alignment), &rq.fault) != 0:
        rq.reason = BACKEND_FAILED
        free(r)
        return NULL
    if r.nbytes < nbytes:
        r.nbytes = nbytes
    add64(&core.counters.backend_allocations[r.bucket], 1)
    return r

cdef inline Block* region_insert(Core* core, Request* rq, Region* r) noexcept nogil:
    """Put a fresh region into the pool and take a block of it."""
    cdef Block* b = NULL
    cdef Region* chain = NULL
    mutex_lock(&core.lock)
    if region_begin(r, rq.carve, rq.capacity):
        region_link(core, r)
        if rq.carve:
            b = carve(core, rq)
        else:
            r.carved_bytes = rq.capacity
            b = block_make(core, r.first, rq.kind, rq.cls)
            lend(core, b.bucket, b.capacity)
        reserved_note(core, r, True)
    if b == NULL:
        rq.reason = NO_DESCRIPTORS
        if r.first != NULL:
            region_unlink(core, r, &chain)
            core_unlock(core)
            regions_free(core, chain, True)
        else:
            core_unlock(core)
            region_free(core, r)
    else:
        core_unlock(core)
    flight_end(core)
    return b


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
    fences_end(core, batch, seen, n)
    flight_end(core)

cdef inline uint64_t core_trim(Core* core, uint64_t keep_bytes) noexcept nogil:
    """Give cached memory back to the backend until at most `keep_bytes` are cached; return bytes given back."""
    cdef Region* chain = NULL
    cdef FreeList* l
    cdef uint64_t cached
    if load32_seq(&core.head.flags) & FROZEN:
        return 0
    mutex_lock(&core.lock)
    caches_flush(core)
    if keep_bytes == 0:
        lists_trim(core, NULL, &chain)
    while keep_bytes:
        cached = core.carved_bytes - min(core.carved_bytes, lent_total(core))
        l = list_oldest(core, 0, True) if cached > keep_bytes else NULL
        if l == NULL:
            break
        list_trim(core, l, (cached - keep_bytes + list_bytes(l) - 1) // list_bytes(l), &chain)
    arenas_trim(core, False, &chain)
    core_unlock(core)
    return regions_free(core, chain, True)


# ---- the whole way ---------------------------------------------------------------------------------------

cdef inline Block* core_miss(Core* core, Request* rq) noexcept nogil:
    """Serve a request by every means the pool has of its own, or return NULL with rq.reason.

    Runs with the GIL released and no lock held. The second try comes after all that is cached was given back.
    """
    cdef Block* b = NULL
    rq.reason = NONE
    if core.lists[rq.kind] == NULL and not kind_ensure(core, rq.kind):
        rq.reason = NO_DESCRIPTORS
        return NULL
    if not load32_seq(&core.head.flags) & CLOSED:
        b = take_shared(core, rq.kind, rq.cls)
    if b == NULL:
        add32(&core.epoch, 1)
        b = miss_try(core, rq)
        if b == NULL and rq.reason != IS_CLOSED and rq.reason != TOO_LARGE:
            core_trim(core, 0)
            b = miss_try(core, rq)
        if b == NULL:
            return NULL
        add64(&core.counters.misses[b.bucket], 1)
    return serve(core, rq, b)

cdef inline Block* serve(Core* core, Request* rq, Block* b) noexcept nogil:
    add64(&core.counters.acquires[b.bucket], 1)
    hand_out(b, rq.nbytes)
    if load32(&core.head.flags) & DEBUG:
        block_arm(b, load32(&core.head.flags), &core.faults)
    return b
