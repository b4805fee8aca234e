# A pool's control block, and the way of a request that hits.
#
#   acquire(n) -> class(n) -> thread cache -> free list -> (miss: _miss.pxd) arena -> backend
#   release    -> exported, pinned, bound or fenced? retired | thread cache -> free list
#
# Control blocks are type-stable: when a pool has ended and its last block has come home, the next new pool
# takes the control block over, with a new serial. None is ever freed.
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t

from zcpool._atomics cimport add64, bump64, cas64, likely, load32, load32_seq, load64, load64_seq, loadptr, store32, \
    store64, sub64, unlikely
from zcpool._block cimport CLOSED, DEBUG, FOREIGN, GEN_SHIFT, HELD, IN_USE, SLOW_ACQUIRE, SLOW_RELEASE, STATE_SHIFT, \
    WAITERS, ZERO, Block, ThreadCache, CoreHead, Region, block_renew, block_retire, word_make, word_refs, word_state
from zcpool._backend cimport BackendOps
from zcpool._debug cimport FaultLog, block_wipe
from zcpool._fence cimport FenceNode, FenceQueue, queue_push
from zcpool._cache cimport big_at, big_put, big_take, cache_count, cache_crowded, cache_enter, \
    cache_get, cache_give, cache_leave, cache_narrow, cache_put, cache_refill, cache_spill, cache_take, half, word_renew
from zcpool._freelist cimport FreeList, pop, push_chain
from zcpool._process cimport PLANT_DOUBLE_PUSH, last_cache, set_last_cache, slots_wake, thread_cache
from zcpool._sizes cimport CACHED_BYTES, CACHED_CLASSES, CLASSES, GRANULE, bucket_of, class_of, round_up

cdef enum:
    # A kind is a set of free lists: the log2 of an alignment above the pool's own, relative to the granule
    # (0: the pool's alignment suffices), plus EXCLUSIVE for regions of their own below the arena limit.
    EXCLUSIVE = 16
    KINDS = 32
    LENT_BOUND = 4 << 20    # bytes; like the bound of a thread cache


cdef struct Counters:
    # Atomic, by bucket; away from what the hot path writes.
    uint64_t acquires[4]            # those not counted by a thread cache
    uint64_t misses[4]
    uint64_t failures[4]
    uint64_t backend_allocations[4]
    uint64_t backend_frees[4]
    uint64_t peak_in_use[4]
    uint64_t peak_in_use_total
    uint64_t peak_reserved[4]
    uint64_t peak_reserved_total


cdef struct Core:
    CoreHead head
    # Off the fast way, and so out of line.
    Block* (*take_shared)(Core* core, ThreadCache* c, uint64_t nbytes, int state) noexcept nogil
    void (*drain)(Core* core) noexcept nogil    # _reclaim.pxd: give back what came home to a closed pool
    # Read-mostly after creation.
    uint64_t granule                # bytes; every capacity and every offset is a multiple of it
    FreeList* lists[32]             # by kind, CLASSES each; kind 0 always there, others made on demand, never freed
    BackendOps ops
    uint64_t max_bytes              # 0: no limit
    uint64_t max_handles
    uint64_t arena_bytes            # largest arena, bytes
    uint64_t arena_limit            # blocks of at most this many bytes come from arenas
    uint64_t region_alignment       # bytes
    uint64_t largest_region         # bytes
    uint32_t taken                  # guarded by process.pools_lock
    uint32_t guests                 # atomic: C callers off the fast way, who came with the pool's number
    # Bytes outside shared lists: with users, in thread caches, or retired; atomic, by bucket and in all.
    uint64_t lent[4]
    uint64_t lent_all
    # Slow path.
    uint32_t lock                   # the mutex; guards regions, arenas, `made`, `floor`, caches' list, fence array
    uint32_t dirty                  # atomic: somebody pushed to a closed pool and could not drain it
    uint32_t inflight               # atomic: reservations, frees and looks at fences under way
    uint32_t flight_turn            # atomic, a futex: moves whenever one of them ends
    uint32_t landed                 # atomic: moves when one of them ends and changes what others can have
    uint32_t epoch                  # atomic: counts misses; a clock for "recent"
    uint64_t reserved               # atomic: bytes of regions, reservations in flight included
    uint64_t handles                # atomic: regions, reservations in flight included
    uint64_t wait_mask              # atomic: the waiters' slots
    uint32_t patience               # misses: how long a list over the cap is kept; guarded by lock
    uint64_t recent_peak            # a decaying peak of lent bytes; guarded by lock
    Region* regions                 # guarded by lock
    uint64_t held[4]                # bytes of regions in the pool, by bucket; guarded by lock
    uint64_t arena_total            # atomic to read, guarded by lock to change
    uint64_t carved_bytes           # bytes of all blocks that are not spans; atomic to read, guarded by lock to change
    ThreadCache* caches             # guarded by lock to change, read by visitors under lock
    FenceQueue fences
    Counters counters
    Region* deferred                # atomic stack of regions whose Python backend must free them
    FaultLog faults


cdef inline FreeList* list_of(Core* core, int kind, int cls) noexcept nogil:
    return &core.lists[kind][cls]

cdef inline FreeList* home_of(Block* b) noexcept nogil:
    return list_of(<Core*>b.core, b.kind, b.cls)

cdef inline int request_class(Core* core, uint64_t nbytes) noexcept nogil:
    """Return the class of 1 <= nbytes <= largest_request()."""
    if core.granule != GRANULE:
        nbytes = round_up(nbytes, core.granule)
    return class_of(nbytes)

cdef inline void peak_note(uint64_t* peak, uint64_t value) noexcept nogil:
    cdef uint64_t seen = load64(peak)
    while value > seen:
        if cas64(peak, &seen, value):
            return

# Lent bytes: a locked instruction for each block would be a third of what a hit costs. So a thread counts what it lends
# and what comes home to it in its own cache, and tells the pool when that is more than LENT_BOUND and one block either
# way. All counters are modulo 2**64: a thread that only releases goes below zero.

cdef inline ThreadCache* thread_cache_of(Core* core) noexcept nogil:
    """Return the caller's cache, or NULL if it has none."""
    cdef ThreadCache* c = last_cache()
    if unlikely(c.core != &core.head):
        c = <ThreadCache*>thread_cache(core.head.id)
        if c != NULL:
            set_last_cache(c)
    return c

cdef inline void lend(Core* core, int bucket, uint64_t nbytes) noexcept nogil:
    """Count bytes that leave the shared lists, and the peak.

    The peak is exact for one thread, and misses at most LENT_BOUND and a block for each other thread and bucket. Bytes
    that wait in thread caches count as lent, so it is high by at most the caches' bound.
    """
    lend_by(core, thread_cache_of(core), bucket, nbytes)

cdef inline void lend_by(Core* core, ThreadCache* c, int bucket, uint64_t nbytes) noexcept nogil:
    """The same for a caller that knows the thread's cache, or that it has none."""
    cdef uint64_t mine = 0
    cdef uint64_t all_ = 0
    if unlikely(c == NULL):
        lent_tell(core, bucket, nbytes)
    else:
        mine = load64(&c.lent[bucket]) + nbytes
        all_ = load64(&c.lent_all) + nbytes
        if unlikely(<int64_t>mine > <int64_t>(LENT_BOUND + nbytes)):
            lent_tell(core, bucket, mine)
            all_ -= mine
            mine = 0
        store64(&c.lent[bucket], mine)
        store64(&c.lent_all, all_)
    mine += load64(&core.lent[bucket])
    all_ += load64(&core.lent_all)
    if unlikely(<int64_t>mine > <int64_t>load64(&core.counters.peak_in_use[bucket])):
        peak_note(&core.counters.peak_in_use[bucket], mine)
    if unlikely(<int64_t>all_ > <int64_t>load64(&core.counters.peak_in_use_total)):
        peak_note(&core.counters.peak_in_use_total, all_)

cdef inline void unlend(Core* core, int bucket, uint64_t nbytes) noexcept nogil:
    cdef ThreadCache* c = thread_cache_of(core)
    cdef uint64_t mine
    if unlikely(c == NULL):
        lent_tell(core, bucket, <uint64_t>0 - nbytes)
        return
    mine = load64(&c.lent[bucket]) - nbytes
    if unlikely(<int64_t>mine < -<int64_t>(LENT_BOUND + nbytes)):
        lent_tell(core, bucket, mine)
        store64(&c.lent_all, load64(&c.lent_all) - nbytes - mine)
        mine = 0
    else:
        store64(&c.lent_all, load64(&c.lent_all) - nbytes)
    store64(&c.lent[bucket], mine)

cdef inline void lent_tell(Core* core, int bucket, uint64_t nbytes) noexcept nogil:
    add64(&core.lent[bucket], nbytes)
    add64(&core.lent_all, nbytes)

cdef inline uint64_t lent_total(Core* core) noexcept nogil:
    """Return all lent bytes. Under core.lock."""
    cdef uint64_t total = load64(&core.lent_all)
    cdef ThreadCache* c = core.caches
    while c != NULL:
        total += load64(&c.lent_all)
        c = c.next
    return total if <int64_t>total > 0 else 0       # read while others count


# ---- acquire -------------------------------------------------------------------------------------------

cdef inline Block* hand_out(Block* b, uint64_t nbytes, int state) noexcept nogil:
    """Give a block that nobody holds its owner: IN_USE for a Buffer, HELD for a C caller."""
    store64(&b.word, word_make(load64(&b.word), state))
    store64(&b.requested, nbytes)
    return b

cdef inline Block* take_shared(Core* core, int kind, int cls) noexcept nogil:
    """Take a free block from a shared list, or return NULL."""
    return take_by(core, thread_cache_of(core), list_of(core, kind, cls))

cdef inline Block* take_by(Core* core, ThreadCache* c, FreeList* shared) noexcept nogil:
    """The same for a caller that knows the thread's cache, or that it has none."""
    cdef Block* b = pop(&shared.head)
    if likely(b != NULL):
        store32(&shared.stamp, load32(&core.epoch))
        lend_by(core, c, b.bucket, b.capacity)
    return b

cdef inline Block* core_take(Core* core, uint64_t nbytes, int state) noexcept nogil:
    """Serve 1 <= nbytes <= largest_request() from what is cached; NULL is a miss (or a pool that wants the slow way).

    Waits for nothing, makes no system call, allocates nothing; with or without the GIL.
    """
    cdef ThreadCache* c = thread_cache_of(core)
    cdef Block* b
    if unlikely(c == NULL):
        return NULL             # the first acquire of a thread: the miss makes its cache
    b = take_kept(c, load64(&core.head.number), nbytes, state)
    return b if likely(b != NULL) else core.take_shared(core, c, nbytes, state)

cdef inline Block* take_kept(ThreadCache* c, uint64_t pool, uint64_t nbytes, int state) noexcept nogil:
    """Serve what lies in the caller's cache itself, if it is that of the pool with this number."""
    cdef Block* b = NULL
    if likely(nbytes <= CACHED_BYTES):
        b = cache_take(c, pool, nbytes, state)
    if unlikely(b == NULL) and load32(&c.keeps_big):
        b = take_big(c, pool, nbytes, state)
    return b

cdef inline Block* take_big(ThreadCache* c, uint64_t pool, uint64_t nbytes, int state) noexcept nogil:
    """Serve more than 1 MiB from what the pool's only thread keeps."""
    cdef Core* core = <Core*>c.core
    cdef Block* b = NULL
    cdef int cls
    if likely(cache_enter(c)):
        if likely(load64(&c.pool) == pool):
            cls = request_class(core, nbytes)
            if cls >= CACHED_CLASSES:
                b = big_take(c, cls)
        cache_leave(c)
    if unlikely(b == NULL):
        return NULL
    lend_by(core, c, b.bucket, b.capacity)
    bump64(&c.acquires[b.bucket], 1)
    return hand_out(b, nbytes, state)

cdef inline Block* core_take_shared(Core* core, ThreadCache* c, uint64_t nbytes, int state) noexcept nogil:
    """Serve what the thread's cache cannot from the shared lists, and refill the cache."""
    cdef int cls = request_class(core, nbytes)
    cdef Block* b = NULL
    if unlikely(load32(&core.head.flags) & SLOW_ACQUIRE):
        return NULL
    if cls >= CACHED_CLASSES:
        b = take_by(core, c, list_of(core, 0, cls))
        if likely(b != NULL):
            bump64(&c.acquires[b.bucket], 1)
    elif cache_enter(c):
        b = take_refilled(core, c, cls)
        cache_leave(c)
    return hand_out(b, nbytes, state) if likely(b != NULL) else NULL

cdef inline Block* take_refilled(Core* core, ThreadCache* c, int cls) noexcept nogil:
    """Take a free block from the caller's cache, which it is inside of, refilled if need be."""
    cdef FreeList* shared = list_of(core, 0, cls)
    cdef Block* b
    if cache_count(c, cls) == 0:
        cache_refill(c, cls, shared)
        if cache_count(c, cls):
            store32(&shared.stamp, load32(&core.epoch))
            lend_by(core, c, c.slots[cls].head.bucket, c.slots[cls].head.capacity * <uint64_t>cache_count(c, cls))
    b = cache_get(c, cls)
    if b != NULL:
        bump64(&c.slots[cls].taken, 1)
    return b


# ---- release -------------------------------------------------------------------------------------------

cdef inline void put_shared(Core* core, Block* b) noexcept nogil:
    """Push a block that nobody holds to its list, then look whether somebody is to be told.

    The push and the load are sequentially consistent, and so are a waiter's and a closer's "set the flag,
    then look at the list": one of the two sees the other.
    """
    cdef uint32_t flags
    unlend(core, b.bucket, b.capacity)
    push_chain(&home_of(b).head, b, b)
    if PLANT_DOUBLE_PUSH and not (load64(&b.word) >> GEN_SHIFT) & 63:
        push_chain(&home_of(b).head, b, b)
    flags = load32_seq(&core.head.flags)
    if unlikely(flags & (CLOSED | WAITERS)):
        if flags & WAITERS:
            slots_wake(load64_seq(&core.wait_mask))
        if flags & CLOSED:
            core.drain(core)

cdef inline void core_put(CoreHead* head, Block* b) noexcept nogil:
    """Take back a block without owner or references. Cannot fail, wait or allocate."""
    cdef Core* core = <Core*>head
    cdef ThreadCache* c
    if unlikely(word_state(load64(&b.word)) & FOREIGN):
        return
    if unlikely(load32(&core.head.flags) & (DEBUG | ZERO)):
        block_wipe(b, load32(&core.head.flags), &core.faults)
    block_renew(b)
    c = thread_cache_of(core)
    if c != NULL and b.kind == 0 and (b.cls < CACHED_CLASSES or load32(&c.keeps_big)) and cache_enter(c):
        if not load32(&core.head.flags) & SLOW_RELEASE:
            b = put_cached(core, c, b)
        cache_leave(c)
    if b != NULL:
        put_shared(core, b)

cdef inline Block* put_cached(Core* core, ThreadCache* c, Block* b) noexcept nogil:
    """Keep a block in the caller's cache, which it is inside of; return one that must go to the shared list."""
    if b.cls >= CACHED_CLASSES:
        if not load32(&c.keeps_big):
            return b
        unlend(core, b.bucket, b.capacity)
        b = big_put(c, b)
        if b != NULL:
            lend_by(core, c, b.bucket, b.capacity)      # put_shared takes it back
        return b
    if cache_put(c, b):
        return NULL
    if cache_crowded(c):
        cache_flush_all(core, c)
    else:
        unlend(core, b.bucket, cache_spill(c, b.cls, half(c.slots[b.cls].limit), home_of(b)))
    return NULL if cache_put(c, b) else b

cdef inline void cache_flush_all(Core* core, ThreadCache* c) noexcept nogil:
    """Move all blocks of a cache but the larger ones to the shared lists. By who is inside of it."""
    cdef int cls
    for cls in range(CACHED_CLASSES):
        cache_flush(core, c, cls)
    cache_narrow(c)
    c.denied = 0

cdef inline void cache_flush(Core* core, ThreadCache* c, int cls) noexcept nogil:
    """Move a class of a cache to the shared list, and refill it gently from now on."""
    if cache_count(c, cls):
        unlend(core, bucket_of(cls), cache_spill(c, cls, cache_count(c, cls), list_of(core, 0, cls)))
    c.slots[cls].batch = 1

cdef inline void core_wait_for(CoreHead* head, void* fence_node) noexcept nogil:
    """Let a block wait for an fd. Who waits for memory meanwhile is told, to wait for this fd, too."""
    queue_push(&(<Core*>head).fences, <FenceNode*>fence_node)
    if unlikely(load32_seq(&head.flags) & WAITERS):
        slots_wake(load64_seq(&(<Core*>head).wait_mask))

cdef inline void core_release(CoreHead* head, Block* b) noexcept nogil:
    """End the ownership of a block: home at once, or retired while references live."""
    cdef uint64_t word = load64(&b.word)
    cdef uint64_t rest = word & ((<uint64_t>1 << GEN_SHIFT) - 1)
    cdef ThreadCache* c = thread_cache_of(<Core*>head)
    if likely(rest == <uint64_t>IN_USE << STATE_SHIFT) and likely(c != NULL):
        if likely(cache_give(c, b, word_renew(word, IN_USE))):
            return
    core_release_any(head, b)

cdef inline void core_release_any(CoreHead* head, Block* b) noexcept nogil:
    """The same for a block that does not go into the caller's cache at once."""
    cdef uint64_t word = load64(&b.word)
    if unlikely(word_state(word) & FOREIGN) or (unlikely(word_refs(word)) and block_retire(b)):
        return
    if b.cls < CACHED_CLASSES or not give_big(<Core*>head, b):
        head.go_home(head, b)

cdef inline bint give_big(Core* core, Block* b) noexcept nogil:
    """Keep a block of more than 1 MiB if the caller is the pool's only thread, and has a place that is empty."""
    cdef ThreadCache* c = thread_cache_of(core)
    cdef bint kept = False
    if c != NULL and load32(&c.keeps_big) and b.kind == 0 and cache_enter(c):
        # Looked at again: another thread may just have come. What is counted is counted before others see the block.
        kept = load32(&c.keeps_big) and big_at(c, b.cls)[0] == NULL and loadptr(<uintptr_t*>&c.open) != 0
        if kept:
            block_renew(b)
            unlend(core, b.bucket, b.capacity)
            big_put(c, b)
        cache_leave(c)
    return kept
