# Growing: a region is counted against the limits by compare-and-swap, then the backend is called with no lock
# held, then the region is put in under core.lock. Between the first and the last the caller is "in flight".
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from zcpool._arena cimport region_begin
from zcpool._atomics cimport add32, add64, cas64, load32, load64, load64_seq, mutex_lock, sub64
from zcpool._block cimport Block, Region
from zcpool._carve cimport block_make, carve
from zcpool._core cimport Core, lend, lent_total, list_of
from zcpool._freelist cimport FreeList
from zcpool._process cimport backend_enter, backend_leave, process
from zcpool._reclaim cimport arenas_trim, core_unlock, flight_end, list_oldest, list_trim, region_free, \
    region_link, region_return, region_unlink, regions_free, reserved_note
from zcpool._request cimport BACKEND_FAILED, LIMIT_BYTES, LIMIT_HANDLES, NO_DESCRIPTORS, Request
from zcpool._sizes cimport SMALL, largest_request, round_up

cdef enum:
    FIRST_ARENA = 256 << 10     # bytes; arenas double from here to the configured size
    RETAIN = 64 << 20           # bytes that may be cached, or a quarter of the recent peak, before lists go that
    RECENT_OVER = 16            # nothing was taken from for so many misses, more where that proved too few;
    RECENT = 64                 # and misses before one goes at a new peak of reserved bytes
    PATIENCE = 4096             # misses; the most


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

cdef inline bint make_room(Core* core, Request* rq, uint64_t nbytes) noexcept nogil:
    """Give back lists nothing has been taken from for long, before the pool grows.

    A loop whose sizes recur shall call no backend, however many and large they are: a list that is missed soon after
    it was given back makes the pool more patient with all.
    """
    cdef Region* chain = NULL
    cdef FreeList* blocks
    cdef uint64_t cached, lent
    cdef uint64_t given = 0
    cdef uint64_t goal = 0
    cdef uint32_t age
    mutex_lock(&core.lock)
    learn(core, list_of(core, rq.kind, rq.cls))
    age = max(<uint32_t>RECENT, core.patience)
    lent = lent_total(core)
    core.recent_peak = max(lent, core.recent_peak - core.recent_peak // 64)
    cached = core.carved_bytes - lent if core.carved_bytes > lent else 0
    if load64(&core.reserved) + nbytes > load64(&core.counters.peak_reserved_total):
        goal = nbytes
    if cached + nbytes > max(<uint64_t>RETAIN, core.recent_peak // 4):
        age = core.patience
        goal = max(goal, cached + nbytes - max(<uint64_t>RETAIN, core.recent_peak // 4))
    while given < goal:
        blocks = list_oldest(core, age, False)
        if blocks == NULL:
            break
        blocks.trimmed = load32(&core.epoch)
        given += list_trim(core, blocks, blocks.made - blocks.floor, &chain)
    if given:
        arenas_trim(core, True, &chain)
    core_unlock(core)
    regions_free(core, chain, True)
    return given > 0

cdef inline void learn(Core* core, FreeList* missed) noexcept nogil:
    """Double the patience when a list is missed that was given back not long ago. Under core.lock."""
    if core.patience < RECENT_OVER:
        core.patience = RECENT_OVER
    if missed.trimmed and load32(&core.epoch) - missed.trimmed < PATIENCE:
        missed.trimmed = 0
        if core.patience < PATIENCE:
            core.patience *= 2

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
            rq.landed += 1
            flight_end(core, True)
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
    """Count a region against the limits before it exists. On success the caller is in flight."""
    if not within(core, rq, nbytes):
        return False
    add32(&core.inflight, 1)    # before the sums move: whoever sees them too high also sees the flight
    if within(core, rq, nbytes) and count_up(&core.handles, 1, core.max_handles):
        if count_up(&core.reserved, nbytes, core.max_bytes):
            return True
        sub64(&core.handles, 1)
        rq.reason = LIMIT_BYTES
    flight_end(core, False)
    return False

cdef inline bint within(Core* core, Request* rq, uint64_t nbytes) noexcept nogil:
    if core.max_handles and load64_seq(&core.handles) >= core.max_handles:
        rq.reason = LIMIT_HANDLES
        return False
    if core.max_bytes and load64_seq(&core.reserved) + nbytes > core.max_bytes:
        rq.reason = LIMIT_BYTES
        return False
    rq.reason = LIMIT_HANDLES   # what it is when somebody is faster
    return True

cdef inline bint count_up(uint64_t* sum_, uint64_t more, uint64_t limit) noexcept nogil:
    """Add to a sum unless that exceeds its limit (0: none)."""
    cdef uint64_t seen = load64_seq(sum_)
    while not limit or seen + more <= limit:
        if cas64(sum_, &seen, seen + more):
            return True
    return False

cdef inline Region* region_call(Core* core, Request* rq, uint64_t nbytes) noexcept nogil:
    """Call the backend, with no lock held."""
    cdef Region* r = <Region*>calloc(1, sizeof(Region))
    cdef uint32_t forks = process.generation
    cdef int failed
    if r == NULL:
        rq.reason = NO_DESCRIPTORS
        return NULL
    r.core = &core.head
    r.asked = nbytes
    r.bucket = SMALL if rq.carve else rq.bucket
    r.fd = -1
    backend_enter()
    failed = core.ops.allocate(core.head.backend, r, nbytes, max(core.region_alignment, rq.alignment), &rq.fault)
    backend_leave()
    if failed:
        rq.reason = BACKEND_FAILED
        free(r)
        r = NULL
    if forks != process.generation:
        # The backend forked, and this is the child: its books are empty, and know nothing of this flight.
        add32(&core.inflight, 1)
        add64(&core.handles, 1)
        add64(&core.reserved, nbytes)
    if r == NULL:
        return NULL
    r.nbytes = min(max(r.nbytes, nbytes), largest_request())
    add64(&core.counters.backend_allocations[r.bucket], 1)
    if count_up(&core.reserved, r.nbytes - nbytes, core.max_bytes):
        r.asked = r.nbytes
        return r
    rq.reason = LIMIT_BYTES     # the backend gave more than was asked, and more than may be
    region_return(core, r)
    return NULL

cdef inline bint region_put(Core* core, Request* rq, Region* r, Block** own) noexcept nogil:
    """Put a fresh region into the pool; one that is not carved is a block, held by the caller. Under core.lock."""
    if not region_begin(r, rq.carve, rq.capacity):
        return False
    region_link(core, r)
    reserved_note(core, r, True)
    if not rq.carve:
        r.carved_bytes = rq.capacity
        own[0] = block_make(core, r.first, rq.kind, rq.cls)
    return True

cdef inline Block* region_insert(Core* core, Request* rq, Region* r) noexcept nogil:
    """Put a fresh region into the pool and take a block of it."""
    cdef Block* b = NULL
    cdef Region* chain = NULL
    mutex_lock(&core.lock)
    if region_put(core, rq, r, &b):
        if rq.carve:
            b = carve(core, rq)
        else:
            lend(core, b.bucket, b.capacity)
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
    flight_end(core, True)
    return b
