# Thread caches from outside: who has one, who looks into all of them, and what they know of their pool.
#
# Visitors hold core.lock, and each keeps the owners out of all caches of the pool at once. How, and at whose cost, is
# written in zcpool.h.
from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libc.string cimport memset

from zcpool._atomics cimport load32, load32_seq, load64, loadptr, loadptr_acquire, or32, spin, store32, \
    store32_release, store64, store64_release, storeptr, storeptr_release
from zcpool._block cimport CLOSED, SLOW_ACQUIRE, SLOW_RELEASE, WAITERS, ZERO, Block, ThreadCache
from zcpool._cache cimport BIG_SLOTS, FENCED, KEPT_OUT, NEAR_PLACES, cache_begin, \
    cache_enter, cache_get, cache_leave, cache_slot
from zcpool._core cimport Core, cache_flush, cache_flush_all, home_of, list_of, request_class, take_shared, \
    thread_cache_of, unlend
from zcpool._freelist cimport FreeList, push_chain
from zcpool._process cimport PLANT_LOST_STEAL, fence_all_threads, process, slots_wake, thread_adopt, thread_cache, \
    thread_id
from zcpool._sizes cimport CACHED_BYTES, CACHED_CLASSES

cdef extern from "<stdlib.h>" nogil:
    int posix_memalign(void** memory, size_t alignment, size_t nbytes) noexcept


# ---- keeping owners out ----------------------------------------------------------------------------------------

cdef inline void caches_lock(Core* core) noexcept nogil:
    """Keep every owner out of its cache. Under core.lock.

    Owners meanwhile use the shared lists, so what is free stands still or lies there.
    """
    cdef ThreadCache* c = core.caches
    cdef bint fence = False
    cdef int spins = 0
    while c != NULL:
        or32(&c.closed, KEPT_OUT)       # sequentially consistent, for owners with a fence of their own
        store64(&c.pool, process.nobody)
        storeptr(<uintptr_t*>&c.open, 0)
        fence |= cache_is_others(c) and not load32(&c.closed) & FENCED
        c = c.next
    if fence:
        fence_all_threads()
    c = core.caches
    while c != NULL:
        while load32_seq(&c.busy):
            spin(&spins)
        c = c.next

cdef inline bint cache_is_others(ThreadCache* c) noexcept nogil:
    """Say whether another thread than the caller may be about to enter."""
    cdef uintptr_t owner = loadptr_acquire(<uintptr_t*>&c.owner)
    return owner != 0 and owner != <uintptr_t>thread_id()

cdef inline void caches_unlock(Core* core) noexcept nogil:
    """Let owners in again, as far as the pool's state allows it."""
    cdef ThreadCache* c = core.caches
    while c != NULL:
        cache_open(core, c)
        c = c.next

cdef inline void cache_open(Core* core, ThreadCache* c) noexcept nogil:
    """Let the owner in, as the pool's state is. Under core.lock, and again after each change of it."""
    cdef uint32_t flags = load32_seq(&core.head.flags)
    cdef bint fenced = load32(&process.fenced) != 0
    store32_release(&c.closed, FENCED if fenced else 0)
    if not fenced and not flags & SLOW_ACQUIRE:
        store64_release(&c.pool, core.head.number)
    if not fenced and not flags & (SLOW_RELEASE | ZERO):
        storeptr_release(<uintptr_t*>&c.open, <uintptr_t>core)

cdef inline void caches_tell(Core* core) noexcept nogil:
    """Make the caches know the flags that have just changed. Under core.lock."""
    caches_lock(core)
    caches_unlock(core)


# ---- what is in them ---------------------------------------------------------------------------------------------

cdef inline void cache_empty(Core* core, ThreadCache* c) noexcept nogil:
    """Move all of a cache to the shared lists."""
    big_flush(core, c)
    cache_flush_all(core, c)

cdef inline void big_flush(Core* core, ThreadCache* c) noexcept nogil:
    """Move the larger blocks of a cache to the shared lists. They have been used since the last miss."""
    cdef FreeList* shared
    cdef int i
    for i in range(BIG_SLOTS):
        if c.big[i] != NULL:
            shared = home_of(c.big[i])
            store32(&shared.stamp, load32(&core.epoch))
            push_chain(&shared.head, c.big[i], c.big[i])
            c.big[i] = NULL

cdef inline void big_show(Core* core) noexcept nogil:
    """Let a miss see the larger blocks that the calling thread keeps."""
    cdef ThreadCache* c = thread_cache_of(core)
    if c != NULL and load32(&c.keeps_big) and cache_enter(c):
        big_flush(core, c)
        cache_leave(c)

cdef inline void big_reclaim(Core* core) noexcept nogil:
    """Let a thread without a cache see the larger blocks that the only one with a cache keeps. Under core.lock."""
    cdef ThreadCache* c = core.caches
    while c != NULL:
        if load32(&c.keeps_big) and cache_is_others(c):
            big_share(core)
        c = c.next

cdef inline void big_share(Core* core) noexcept nogil:
    """Keep larger blocks in a cache only while its thread is the pool's only one. Under core.lock."""
    cdef ThreadCache* c = core.caches
    cdef int owners = 0
    caches_lock(core)
    while c != NULL:
        owners += loadptr(<uintptr_t*>&c.owner) != 0
        c = c.next
    c = core.caches
    while c != NULL:
        big_flush(core, c)
        store32(&c.keeps_big, owners == 1)     # looked at from outside, too
        c = c.next
    caches_unlock(core)

cdef inline void caches_flush(Core* core) noexcept nogil:
    """Move all that is cached by threads to the shared lists. Under core.lock."""
    cdef ThreadCache* c = core.caches
    caches_lock(core)
    while c != NULL:
        cache_empty(core, c)
        c = c.next
    caches_unlock(core)

cdef inline Block* steal(Core* core, int cls) noexcept nogil:
    """Take a free block of a small class wherever it is. Under core.lock.

    All caches are held at once, so a block that moves between caches and the list cannot escape: NULL means
    that, at one instant, every block of the class was in use. Without that, a pool prepared for n threads
    with n blocks could call its backend all the same.
    """
    cdef ThreadCache* c = core.caches
    cdef Block* b = NULL
    caches_lock(core)
    while c != NULL:
        if b == NULL:
            b = cache_get(c, cls)
            if PLANT_LOST_STEAL and b != NULL:
                b = NULL
        cache_flush(core, c, cls)
        c = c.next
    if b == NULL:
        b = take_shared(core, 0, cls)
    caches_unlock(core)
    return b


# ---- whose they are ----------------------------------------------------------------------------------------------

cdef inline void cache_ensure(Core* core) noexcept nogil:
    """Give the calling thread a cache, that of an ended thread if there is one. Under core.lock.

    Without memory for it the thread does without.
    """
    cdef ThreadCache* c = core.caches
    cdef void* memory = NULL
    if thread_cache(core.head.id) != NULL:
        return
    while c != NULL and loadptr_acquire(<uintptr_t*>&c.owner) != 0:
        c = c.next
    if c == NULL:
        if posix_memalign(&memory, 64, sizeof(ThreadCache)) != 0:
            return
        c = <ThreadCache*>memset(memory, 0, sizeof(ThreadCache))
        c.core = &core.head
        cache_begin(c)
        cache_name(core, c)
        cache_open(core, c)
        c.next = core.caches
        core.caches = c
    if thread_adopt(core.head.id, c) == 0:
        storeptr(<uintptr_t*>&c.owner, <uintptr_t>thread_id())
        big_share(core)

cdef inline void cache_name(Core* core, ThreadCache* c) noexcept nogil:
    """Tell a cache the sizes of the pool it serves: the control block may have had another one."""
    cdef uint64_t i
    for i in range(<uint64_t>NEAR_PLACES):
        c.places[i] = cache_slot(min(request_class(core, (i + 1) << 6), <int>CACHED_CLASSES))
    for i in range(<uint64_t>CACHED_BYTES >> 10):
        c.places[NEAR_PLACES + i] = cache_slot(min(request_class(core, (i + 1) << 10), <int>CACHED_CLASSES))

cdef inline void cache_abandon(void* cache) noexcept nogil:
    """A thread ends: its blocks go to the shared lists, its cache to the next thread that comes."""
    cdef ThreadCache* c = <ThreadCache*>cache
    cdef Core* core = <Core*>c.core
    cdef uint32_t flags
    cdef int spins = 0
    while not cache_enter(c):
        spin(&spins)
    cache_empty(core, c)
    cache_leave(c)
    storeptr_release(<uintptr_t*>&c.owner, 0)
    flags = load32_seq(&core.head.flags)
    if flags & WAITERS:
        slots_wake(load64(&core.wait_mask))
    if flags & CLOSED:
        core.drain(core)
