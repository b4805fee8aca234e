# The life of a control block: made or taken over, closed, orphaned, buried; and what a fork does to all.
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libc.string cimport memset

from zcpool._atomics cimport and32, load32, load32_acquire, load32_seq, load64_seq, loadptr, mutex_lock, \
    mutex_unlock, or32, store32, store32_release, store64, store64_seq, swap32, swapptr
from zcpool._backend cimport Backend
from zcpool._block cimport CLOSED, FOREIGN, FROZEN, NEEDS_SYNC, ORPHAN, PYTHON_BACKEND, RETIRED, STATE_SHIFT, VISIBLE, \
    ThreadCache, WAITERS, Block, Region, word_owned, word_state
from zcpool._cache cimport cache_narrow
from zcpool._core cimport KINDS, Core, core_put, core_release, core_take_shared, core_wait_for
from zcpool._freelist cimport INDEX_MASK
from zcpool._miss cimport fences_poll
from zcpool._process cimport CHUNK, POOL_BITS, POOLS, descriptor, next_serial, process, process_start, slots_wake, \
    thread_id
from zcpool._reclaim cimport arenas_trim, core_drain, core_unlock, lists_trim, region_free, regions_free
from zcpool._request cimport kind_ensure
from zcpool._sizes cimport CACHED_CLASSES, CLASSES
from zcpool._visit cimport cache_abandon, cache_name, cache_open, caches_flush, caches_lock, caches_unlock

cdef extern from "<stdlib.h>" nogil:
    int posix_memalign(void** memory, size_t alignment, size_t nbytes) noexcept


cdef inline Core* core_take_over() noexcept nogil:
    """Return a control block nobody uses, cleared but for what must survive; NULL when 4096 pools live."""
    cdef void* memory = NULL
    cdef Core* core = NULL
    cdef uint32_t i
    mutex_lock(&process.pools_lock)
    for i in range(process.n_pools):
        core = <Core*>process.pools[i]
        if not load32_acquire(&core.taken):
            core.taken = 1
            mutex_lock(&core.lock)      # a thread of the last pool that ends late may still look for what to give back
            core_clear(core)
            mutex_unlock(&core.lock)
            mutex_unlock(&process.pools_lock)
            return core
    core = NULL
    if process.n_pools < POOLS and posix_memalign(&memory, 64, sizeof(Core)) == 0:
        core = <Core*>memory
        memset(core, 0, sizeof(Core))
        core.head.id = process.n_pools
        number_renew(core)
        core.taken = 1
        process.pools[process.n_pools] = core
        store32_release(&process.n_pools, process.n_pools + 1)     # pairs with door_core: the entry is there
    mutex_unlock(&process.pools_lock)
    return core

cdef inline void core_clear(Core* core) noexcept nogil:
    """Forget the last pool: lists are empty, regions gone. Thread caches stay with their threads."""
    cdef ThreadCache* c = core.caches
    cdef int kind, cls
    books_clear(core)
    core.faults.text[0] = 0
    for kind in range(KINDS):
        if core.lists[kind] != NULL:
            for cls in range(CLASSES):      # heads are empty, and keep their tags
                core.lists[kind][cls].stamp = core.lists[kind][cls].made = core.lists[kind][cls].floor = 0
                core.lists[kind][cls].trimmed = 0
    caches_lock(core)
    while c != NULL:
        cache_books_clear(c)
        c = c.next
    caches_unlock(core)

cdef inline void books_clear(Core* core) noexcept nogil:
    memset(&core.counters, 0, sizeof(core.counters))
    memset(core.lent, 0, sizeof(core.lent))
    core.lent_all = 0
    memset(core.held, 0, sizeof(core.held))
    core.arena_total = core.carved_bytes = core.recent_peak = core.patience = 0

cdef inline void cache_books_clear(ThreadCache* c) noexcept nogil:
    cdef int cls
    for cls in range(CACHED_CLASSES):
        store64(&c.slots[cls].taken, 0)
    memset(c.acquires, 0, sizeof(c.acquires))
    memset(c.lent, 0, sizeof(c.lent))
    c.lent_all = 0

cdef inline void number_renew(Core* core) noexcept nogil:
    """Give a control block the number of another pool."""
    store64_seq(&core.head.number, (<uint64_t>next_serial() << POOL_BITS) | core.head.id)

cdef inline Core* core_new(Backend backend, uint64_t granule, uint32_t flags) except NULL:
    """Return a control block for a new pool, open, holding a reference of the backend."""
    cdef Core* core
    with nogil:
        core = core_take_over()
        if core != NULL and core.lists[0] == NULL and not kind_ensure(core, 0):
            core.taken = 0
            core = NULL
    if core == NULL:
        raise MemoryError(f"no control block for another pool: {POOLS} can live at a time")
    number_renew(core)
    core.take_shared = core_take_shared
    core.drain = core_drain
    core.head.release = core_release
    core.head.go_home = core_put
    core.head.wait_for = core_wait_for
    core.head.pins = 0
    core.granule = granule
    backend.fill_ops(&core.ops)
    Py_INCREF(backend)
    core.head.backend = <void*>backend
    if backend.cpu_visible:
        flags |= VISIBLE
    if backend.needs_sync:
        flags |= NEEDS_SYNC
    if backend.python:
        flags |= PYTHON_BACKEND
    with nogil:
        core_open(core, flags)
    return core

cdef inline void core_open(Core* core, uint32_t flags) noexcept nogil:
    """Open a pool, and for it the caches that stayed with their threads."""
    cdef ThreadCache* c
    mutex_lock(&core.lock)
    store32(&core.head.flags, flags)
    caches_lock(core)
    c = core.caches
    while c != NULL:
        cache_name(core, c)
        c = c.next
    caches_unlock(core)
    core_unlock(core)

cdef inline void core_close(Core* core) noexcept nogil:
    """Stop acquires and give back all that is free. What is in use comes home later, through core_drain."""
    cdef Region* chain = NULL
    cdef uint64_t mask
    and32(&core.head.flags, ~<uint32_t>FROZEN)
    or32(&core.head.flags, CLOSED)
    fences_poll(core)
    mutex_lock(&core.lock)
    caches_flush(core)          # who put a block into a cache before the flag was seen, put it before this
    lists_trim(core, NULL, &chain)
    arenas_trim(core, False, &chain)
    mask = load64_seq(&core.wait_mask)
    core_unlock(core)
    regions_free(core, chain, True)
    slots_wake(mask)


# ---- chores: what only a thread with the GIL can do --------------------------------------------------------

cdef inline int chores(void* unused) noexcept:
    """Free the regions of Python backends that came home without the GIL, and bury pools that have ended."""
    cdef uint32_t i
    cdef Core* core
    swap32(&process.python_work, 0)
    swap32(&process.orphans, 0)
    for i in range(load32_acquire(&process.n_pools)):
        core = <Core*>process.pools[i]
        with nogil:
            deferred_free(core)
            if load32_seq(&core.head.flags) & ORPHAN:
                fences_poll(core)
                if load64_seq(&core.fences.pending):
                    store32(&process.orphans, 1)        # nobody else will look at them
        core_bury(core)
    return 0

cdef inline void deferred_free(Core* core) noexcept nogil:
    cdef Region* r
    cdef Region* next
    if loadptr(<uintptr_t*>&core.deferred) == 0:
        return
    r = <Region*>swapptr(<uintptr_t*>&core.deferred, 0)
    while r != NULL:
        next = r.next
        region_free(core, r)
        r = next

cdef inline void core_orphan(Core* core) noexcept:
    """The Pool object is gone (with the GIL)."""
    with nogil:
        core_close(core)
        number_renew(core)      # the pool's number dies with it
        or32(&core.head.flags, ORPHAN)
    chores(NULL)

cdef inline void core_bury(Core* core) noexcept:
    """Let go of the backend of a pool that has ended, once its last region has."""
    cdef object backend
    # Guests first: one that leaves after a look at the books may leave a region behind, and no new one comes.
    if not load32_seq(&core.head.flags) & ORPHAN or load32_seq(&core.guests):
        return
    if load64_seq(&core.reserved) or load64_seq(&core.fences.pending):
        return
    if load32_seq(&core.inflight) or load32_seq(&core.dirty):
        return
    if not and32(&core.head.flags, ~<uint32_t>ORPHAN) & ORPHAN:
        return                  # somebody else is at it
    backend = <object>core.head.backend
    core.head.backend = NULL
    Py_DECREF(backend)
    store32_release(&core.taken, 0)     # pairs with core_take_over


# ---- fork ----------------------------------------------------------------------------------------------------

cdef inline void all_forked() noexcept nogil:
    """In the child: disown whatever the parent had, by stores alone.

    Descriptors are walked by the table, not by the pools' lists, which another thread may have been changing.
    """
    cdef uint32_t i, j
    cdef Block* b
    for i in range(load32(&process.n_chunks)):
        for j in range(<uint32_t>CHUNK):
            b = <Block*>descriptor(i * CHUNK + j)
            if word_owned(b.word) or word_state(b.word) == RETIRED:
                b.word |= <uint64_t>FOREIGN << STATE_SHIFT
    for i in range(load32(&process.n_pools)):
        core_forked(<Core*>process.pools[i])

cdef inline void core_forked(Core* core) noexcept nogil:
    cdef ThreadCache* c = core.caches
    cdef int kind, cls
    core.lock = core.dirty = core.inflight = core.guests = 0
    core.wait_mask = core.reserved = core.handles = 0
    and32(&core.head.flags, ~<uint32_t>WAITERS)
    core.head.pins = 0
    core.regions = core.deferred = NULL
    core.fences.incoming = core.fences.pending = 0
    core.fences.first = core.fences.last = NULL
    core.faults.lock = 0
    for kind in range(KINDS):
        if core.lists[kind] != NULL:
            for cls in range(CLASSES):
                core.lists[kind][cls].head &= ~<uint64_t>INDEX_MASK
                core.lists[kind][cls].made = core.lists[kind][cls].floor = 0
    while c != NULL:
        c.busy = 0
        c.pool = process.nobody
        c.open = NULL
        cache_open(core, c)
        if c.owner != thread_id():
            c.owner = NULL      # its thread does not exist here
        for cls in range(CACHED_CLASSES):
            c.slots[cls].hot = c.slots[cls].head = NULL     # cache_narrow shuts them
            c.slots[cls].count = 0
        memset(c.big, 0, sizeof(c.big))
        cache_narrow(c)
        cache_books_clear(c)
        c = c.next
    books_clear(core)

cdef inline void life_begin() noexcept nogil:
    """Set the process-wide hooks, once."""
    process.chores = chores
    process_start(cache_abandon, all_forked)
