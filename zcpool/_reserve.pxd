# Preparing a pool: blocks made ahead, so that the loop that follows makes no backend call.
from libc.stdint cimport uint32_t, uint64_t, uintptr_t

from zcpool._atomics cimport load32, load32_seq, loadptr_acquire, mutex_lock
from zcpool._block cimport CLOSED, FIXED, VISIBLE, Block, Region
from zcpool._core cimport Core, list_of
from zcpool._freelist cimport FreeList, next_of, pop_all, push_chain, set_next
from zcpool._carve cimport carve_one
from zcpool._grow cimport arena_size, region_get, region_put
from zcpool._miss cimport refused
from zcpool._reclaim cimport arenas_trim, core_unlock, flight_end, lists_trim, regions_free
from zcpool._visit cimport caches_flush
from zcpool._request cimport ALL_IN_USE, BACKEND_FAILED, IS_CLOSED, LIMIT_BYTES, LIMIT_HANDLES, NO_DESCRIPTORS, \
    Request, kind_ensure

cdef enum:
    TOUCH_STEP = 4096       # bytes: the smallest page


cdef struct Prepared:
    Block* first
    Block* last
    uint64_t count


cdef inline bint core_reserve(Core* core, Request* rq, uint64_t count, bint touch) noexcept nogil:
    """Make `count` blocks of a class available; False with rq.reason, and what could be made stays cached."""
    cdef Prepared new
    cdef uint64_t have
    cdef bint helped = False
    new.first = new.last = NULL
    new.count = 0
    if load32(&core.head.flags) & CLOSED:
        rq.reason = IS_CLOSED
        return False
    if load32(&core.head.flags) & FIXED and not rq.founding:
        rq.reason = ALL_IN_USE
        return False
    if loadptr_acquire(<uintptr_t*>&core.lists[rq.kind]) == 0 and not kind_ensure(core, rq.kind):
        rq.reason = NO_DESCRIPTORS
        return False
    have = count_free(core, rq, count)
    while have + new.count < count:
        if not prepare(core, rq, count - have - new.count, &new):
            if helped or not worth_trimming(rq):
                break
            helped = True
            trim_others(core, rq)
    if touch:
        prepared_touch(core, &new)
    if new.first != NULL:
        push_chain(&list_of(core, rq.kind, rq.cls).head, new.first, new.last)
    if load32_seq(&core.head.flags) & CLOSED:
        core.drain(core)        # closed meanwhile: nobody else would give these back
        rq.reason = IS_CLOSED
        return False
    return have + new.count >= count

cdef inline uint64_t count_free(Core* core, Request* rq, uint64_t count) noexcept nogil:
    """Count the free blocks of the class, brought together in the shared list, and note the promise."""
    cdef FreeList* blocks = list_of(core, rq.kind, rq.cls)
    cdef Block* first
    cdef Block* b
    cdef Block* last = NULL
    cdef uint64_t have = 0
    mutex_lock(&core.lock)
    caches_flush(core)
    if blocks.floor < count:
        blocks.floor = <uint32_t>count
    first = b = pop_all(&blocks.head)
    while b != NULL:
        have += 1
        last = b
        b = next_of(b)
    if first != NULL:
        push_chain(&blocks.head, first, last)
    core_unlock(core)
    return have

cdef inline void prepared_add(Prepared* new, Block* b) noexcept nogil:
    set_next(b, new.first)
    new.first = b
    if new.last == NULL:
        new.last = b
    new.count += 1

cdef inline bint prepare(Core* core, Request* rq, uint64_t wanted, Prepared* new) noexcept nogil:
    """Make some of the wanted blocks: from arenas that have room, else from one new region."""
    cdef uint64_t had = new.count
    cdef uint64_t nbytes = rq.capacity
    cdef Region* r
    cdef Block* b
    if rq.carve:
        mutex_lock(&core.lock)
        carve_some(core, rq, wanted, new)
        core_unlock(core)
        if new.count != had:
            return True
        nbytes = max(arena_size(core, rq.capacity), min(core.arena_bytes // rq.capacity, wanted) * rq.capacity)
    if refused(core, rq):
        return False
    r = region_get(core, rq, nbytes, rq.capacity)
    if r == NULL:
        return False
    mutex_lock(&core.lock)
    if region_put(core, rq, r, &b):
        if rq.carve:
            carve_some(core, rq, wanted, new)
        else:
            prepared_add(new, b)
        core_unlock(core)
    else:
        core_unlock(core)
        r.next = NULL
        regions_free(core, r, True)     # ends the flight too
        rq.reason = NO_DESCRIPTORS
        return False
    flight_end(core, True)
    rq.reason = NO_DESCRIPTORS
    return new.count != had

cdef inline void carve_some(Core* core, Request* rq, uint64_t wanted, Prepared* new) noexcept nogil:
    """Cut up to `wanted` blocks from the arenas. Under core.lock."""
    cdef Block* b
    while wanted:
        b = carve_one(core, rq)
        if b == NULL:
            return
        prepared_add(new, b)
        wanted -= 1

cdef inline bint worth_trimming(Request* rq) noexcept nogil:
    return (rq.reason == LIMIT_BYTES or rq.reason == LIMIT_HANDLES
            or (rq.reason == BACKEND_FAILED and not rq.fault.final))

cdef inline void trim_others(Core* core, Request* rq) noexcept nogil:
    """Give back what is cached in other classes."""
    cdef Region* chain = NULL
    mutex_lock(&core.lock)
    caches_flush(core)
    lists_trim(core, list_of(core, rq.kind, rq.cls), &chain)
    arenas_trim(core, False, &chain)
    core_unlock(core)
    regions_free(core, chain, True)

cdef inline void prepared_touch(Core* core, Prepared* new) noexcept nogil:
    """Fault the pages in by writing to each: the memory is fresh, its contents are nobody's."""
    cdef Block* b = new.first
    cdef uint64_t at
    if not load32(&core.head.flags) & VISIBLE:
        return
    while b != NULL:
        at = 0
        while at < b.capacity:
            (<volatile char*>b.data)[at] = 0
            at += TOUCH_STEP
        b = next_of(b)
