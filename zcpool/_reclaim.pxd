# Giving memory back: trimming lists, joining blocks, freeing regions, closing.
#
# core.lock guards regions, arenas, `made` and `floor` of the lists, the list of caches, and the fence queue.
# Under it nothing calls a backend, runs Python, or waits for anything but owners to leave their caches. It is never
# waited for with the GIL held; release paths only try it.
from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free

from zcpool._arena cimport arena_join, region_end
from zcpool._atomics cimport add32, add64, bump64, casptr, futex_wait, futex_wake_all, load32, load32_seq, load64, \
    loadptr, mutex_trylock, mutex_unlock, or32, sub32, sub64, swap32
from zcpool._block cimport CLOSED, ORPHAN, PYTHON_BACKEND, WAITERS, Block, Region, block_unref
from zcpool._core cimport KINDS, Core, home_of, list_of, peak_note, take_shared, unlend
from zcpool._fence cimport POLLNVAL, FenceNode, close, queue_append
from zcpool._freelist cimport INDEX_MASK, FreeList, block_at, next_of, pop_all, push_chain
from zcpool._process cimport backend_enter, backend_leave, call_python, gil_leave, gil_return, process, slots_wake
from zcpool._sizes cimport CLASSES, GRANULE

# ---- regions -------------------------------------------------------------------------------------------

cdef inline void region_link(Core* core, Region* r) noexcept nogil:
    r.prev = NULL
    r.next = core.regions
    if core.regions != NULL:
        core.regions.prev = r
    core.regions = r

cdef inline void region_unlink(Core* core, Region* r, Region** chain) noexcept nogil:
    """Take a region none of whose blocks anybody holds out of the pool, onto a chain of regions to free."""
    if r.prev != NULL:
        r.prev.next = r.next
    else:
        core.regions = r.next
    if r.next != NULL:
        r.next.prev = r.prev
    bump64(&core.carved_bytes, <uint64_t>0 - r.carved_bytes)
    reserved_note(core, r, False)
    region_end(r)
    r.next = chain[0]
    chain[0] = r
    add32(&core.inflight, 1)    # its bytes still count against the limit: a miss waits for them to go

cdef inline void reserved_note(Core* core, Region* r, bint added) noexcept nogil:
    """Keep the sums of regions in the pool, and their peaks. Under core.lock."""
    cdef int i
    cdef uint64_t total = 0
    if not added:
        core.held[r.bucket] -= r.nbytes
        if r.bins != NULL:
            bump64(&core.arena_total, <uint64_t>0 - r.nbytes)
        return
    core.held[r.bucket] += r.nbytes
    if r.bins != NULL:
        bump64(&core.arena_total, r.nbytes)
    for i in range(4):
        total += core.held[i]
    peak_note(&core.counters.peak_reserved[r.bucket], core.held[r.bucket])
    peak_note(&core.counters.peak_reserved_total, total)

cdef inline uint64_t regions_free(Core* core, Region* chain, bint may_run_python) noexcept nogil:
    """Call the backend for every region of a chain; return the bytes. No lock is held."""
    cdef Region* r
    cdef uint64_t total = 0
    while chain != NULL:
        r = chain
        chain = r.next
        total += r.nbytes
        if load32(&core.head.flags) & PYTHON_BACKEND and not may_run_python:
            region_defer(core, r)
        else:
            region_free(core, r)
        flight_end(core, True)
    if load32_seq(&core.head.flags) & ORPHAN:
        call_python()       # that may have been the last: the control block can be buried
    return total

cdef inline void region_free(Core* core, Region* r) noexcept nogil:
    cdef uint64_t nbytes = r.asked
    cdef uint32_t forks = process.generation
    region_return(core, r)
    if forks != process.generation:
        add32(&core.inflight, 1)    # the backend forked, and this is the child: its books know nothing of this
        return
    sub64(&core.reserved, nbytes)
    sub64(&core.handles, 1)

cdef inline void region_return(Core* core, Region* r) noexcept nogil:
    """Call the backend, with no lock held."""
    add64(&core.counters.backend_frees[r.bucket], 1)
    backend_enter()
    core.ops.free(core.head.backend, r)
    backend_leave()
    free(r)

cdef inline void region_defer(Core* core, Region* r) noexcept nogil:
    """Leave a region to the next Python entry point: a release must not wait for the GIL."""
    cdef uintptr_t seen = loadptr(<uintptr_t*>&core.deferred)
    while True:
        r.next = <Region*>seen
        if casptr(<uintptr_t*>&core.deferred, &seen, <uintptr_t>r):
            break
    call_python()

cdef inline void flight_end(Core* core, bint landed) noexcept nogil:
    """A reservation, a free or a look at fences is over; `landed`: it may have changed what others can have."""
    if landed:
        add32(&core.landed, 1)
    sub32(&core.inflight, 1)
    add32(&core.flight_turn, 1)
    futex_wake_all(&core.flight_turn)

cdef inline void flight_wait(Core* core) noexcept nogil:
    """Wait for the end of a flight, 50 ms at most."""
    cdef uint32_t turn = load32_seq(&core.flight_turn)
    if load32_seq(&core.inflight):
        futex_wait(&core.flight_turn, turn, 50_000_000)


# ---- lists ---------------------------------------------------------------------------------------------

cdef inline void block_give_back(Core* core, Block* b, Region** chain) noexcept nogil:
    """End a free block the caller holds: joined in its arena, or its region put on the chain. Under core.lock."""
    cdef Region* r = b.region
    home_of(b).made -= 1
    if r.bins == NULL:
        region_unlink(core, r, chain)
    else:
        bump64(&core.carved_bytes, <uint64_t>0 - b.capacity)
        arena_join(r, b)

cdef inline uint64_t list_trim(Core* core, FreeList* blocks, uint64_t most, Region** chain) noexcept nogil:
    """Give back up to `most` blocks of a list, those used longest ago first; return their bytes. Under core.lock."""
    cdef Block* first = pop_all(&blocks.head)
    cdef Block* b = first
    cdef Block* last = NULL
    cdef Block* next
    cdef uint64_t count = 0
    cdef uint64_t given = 0
    while b != NULL:
        count += 1
        b = next_of(b)
    b = first
    while b != NULL and count > most:
        last = b
        b = next_of(b)
        count -= 1
    while b != NULL:
        next = next_of(b)
        given += b.capacity
        block_give_back(core, b, chain)
        b = next
    if last != NULL:
        push_chain(&blocks.head, first, last)
    return given

cdef inline uint64_t lists_trim(Core* core, FreeList* but, Region** chain) noexcept nogil:
    """Give back every block of every shared list but one, promised ones too; return their bytes. Under core.lock."""
    cdef FreeList* blocks
    cdef uint64_t given = 0
    cdef int kind, cls
    for kind in range(KINDS):
        if core.lists[kind] == NULL:
            continue
        for cls in range(CLASSES):
            blocks = &core.lists[kind][cls]
            if blocks != but:
                blocks.floor = 0
                if load64(&blocks.head) & INDEX_MASK:
                    given += list_trim(core, blocks, <uint64_t>-1, chain)
    return given

cdef inline FreeList* list_oldest(Core* core, uint32_t age, bint promised) noexcept nogil:
    """Return the list used longest ago, at least `age` misses, with free blocks beyond what reserve() promised
    (`promised`: with any). Under core.lock.
    """
    cdef FreeList* best = NULL
    cdef FreeList* blocks
    cdef uint32_t now = load32(&core.epoch)
    cdef int kind, cls
    for kind in range(KINDS):
        if core.lists[kind] == NULL:
            continue
        for cls in range(CLASSES):
            blocks = &core.lists[kind][cls]
            if (load64(&blocks.head) & INDEX_MASK and (promised or blocks.made > blocks.floor)
                    and now - load32(&blocks.stamp) >= age):
                best = blocks
                age = now - load32(&blocks.stamp)
    return best

cdef inline uint64_t list_bytes(FreeList* blocks) noexcept nogil:
    """Return the capacity of the blocks of a list that is not empty, or may just have become so."""
    cdef Block* b = block_at(load64(&blocks.head))
    return b.capacity if b != NULL else GRANULE

cdef inline void arenas_trim(Core* core, bint keep_one, Region** chain) noexcept nogil:
    """Take out the arenas that are wholly free, but perhaps one. Under core.lock."""
    cdef Region* r = core.regions
    cdef Region* next
    while r != NULL:
        next = r.next
        if r.bins != NULL and r.carved_bytes == 0:
            if keep_one:
                keep_one = False
            else:
                region_unlink(core, r, chain)
        r = next


# ---- closing -------------------------------------------------------------------------------------------

cdef inline void core_drain(Core* core) noexcept nogil:
    """Give back what came home to a closed pool. Whoever holds the lock does it for those who cannot."""
    cdef Region* chain
    cdef void* left
    or32(&core.dirty, 1)
    while load32_seq(&core.dirty) and mutex_trylock(&core.lock):
        swap32(&core.dirty, 0)
        chain = NULL
        # A thread that ends late may find another pool here, which is not to be emptied: flags open under the lock.
        if load32_seq(&core.head.flags) & CLOSED:
            lists_trim(core, NULL, &chain)
            arenas_trim(core, False, &chain)
        mutex_unlock(&core.lock)
        if chain != NULL or load32_seq(&core.head.flags) & ORPHAN:
            left = gil_leave()      # the last view of a closed pool may end with the GIL: a free may take long
            regions_free(core, chain, False)
            gil_return(left)

cdef inline void core_unlock(Core* core) noexcept nogil:
    mutex_unlock(&core.lock)
    if load32_seq(&core.head.flags) & CLOSED and load32_seq(&core.dirty):
        core_drain(core)


# ---- fences --------------------------------------------------------------------------------------------

cdef inline void fences_return(Core* core, FenceNode** batch, short* seen, int n) noexcept nogil:
    """Put those that have not signalled to the back of the queue. Under core.lock."""
    cdef int i
    for i in range(n):
        if seen[i] == 0:
            queue_append(&core.fences, batch[i])

cdef inline bint fences_end(Core* core, FenceNode** batch, short* seen, int n) noexcept nogil:
    """Drop the references of those that have signalled; say whether any had. No lock is held: blocks go home."""
    cdef bint any_ = False
    cdef int i
    for i in range(n):
        if seen[i] == 0:
            continue
        any_ = True
        sub64(&core.fences.pending, 1)
        # An fd that was closed behind our back says nothing: nobody knows when the device is done, and the block
        # stays retired.
        if not seen[i] & POLLNVAL:
            close(batch[i].fd)
            block_unref(batch[i].block)
        free(batch[i])
    return any_
