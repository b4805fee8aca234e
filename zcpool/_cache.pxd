# Thread caches: free blocks that a thread keeps for itself, of one pool.
#
# What a hit does is in zcpool.h, since C callers inline it. There is written, too, how owner and visitors keep out of
# each other's way without a locked instruction of the owner's. Visitors (limits, trim, reserve, close, waiters) hold
# core.lock, so there is one at a time, and an owner who holds core.lock needs to say nothing. While a visitor is
# inside, the owner goes to the shared lists instead of waiting. Inside nothing runs Python or waits, but for memory for
# descriptors on the miss path. Order of locks: core.lock before caches, never the other way.
#
# A slot is shut, or holds a hot block and up to `limit` others. Limits begin at zero and double with use, as long as
# the blocks of all full slots together would be at most CACHE_BYTES: so a hit need not add up bytes. A cache that has
# denied a number of such wishes takes back the room that no block is in; if that does not help, all blocks leave it,
# and those that are used come back.
#
# Blocks of more than 1 MiB are kept by the only thread of a pool, a few at a time, which saves two locked instructions
# for each; with a second thread, and at every miss, they go to the shared lists, where all that is cached is seen.
from libc.stdint cimport int64_t, uint16_t, uint32_t, uint64_t

from zcpool._atomics cimport load32_acquire, load32_seq, swap32, unlikely
from zcpool._block cimport Block, CacheSlot, ThreadCache
from zcpool._freelist cimport FreeList, ahead_note, next_of, pop_chain, push_chain, set_next
from zcpool._process cimport process
from zcpool._sizes cimport CACHED_CLASSES, class_bytes

cdef extern from "zcpool.h" nogil:
    enum:
        NEAR_PLACES "ZC_NEAR_PLACES"
        KEPT_OUT "ZC_KEPT_OUT"
        FENCED "ZC_FENCED"
        SLOTS_AT "offsetof(struct zc_cache, slots)"
    Block* SHUT "ZC_SHUT"
    void cache_busy "zc_cache_enter"(ThreadCache* c) noexcept
    void cache_leave "zc_cache_leave"(ThreadCache* c) noexcept
    Block* cache_take "zc_cache_take"(ThreadCache* c, uint64_t pool, size_t nbytes, unsigned state) noexcept
    uint64_t word_renew "zc_renew"(uint64_t word, unsigned state) noexcept
    bint cache_give "zc_cache_give"(ThreadCache* c, Block* b, uint64_t renewed) noexcept

cdef enum:
    CACHE_SLOTS = 31                # blocks of a class at most; batches of half of it
    CACHE_CLASS_BYTES = 2 << 20     # bytes of a class at most
    CACHE_BYTES = 4 << 20           # bytes of a cache at most
    BIG_SLOTS = 8                   # larger blocks that the only thread of a pool keeps, by class
    DENIALS = 64                    # wishes for room denied before empty room is taken back; twice that, all blocks


cdef inline bint cache_enter(ThreadCache* c) noexcept nogil:
    """Enter off the fast way, whatever the pool's state is; False when a visitor keeps the owner out."""
    cdef uint32_t closed
    cache_busy(c)
    closed = load32_acquire(&c.closed)
    if closed & FENCED:
        swap32(&c.busy, 1)      # not a fence: ThreadSanitizer knows none
        closed = load32_seq(&c.closed)
    if unlikely(closed & KEPT_OUT):
        cache_leave(c)
        return False
    return True

cdef inline void cache_begin(ThreadCache* c) noexcept nogil:
    """Set up a zeroed cache."""
    cdef int64_t most
    cdef int cls
    c.pool = process.nobody
    for cls in range(CACHED_CLASSES):
        most = CACHE_CLASS_BYTES // class_bytes(cls) - 1
        c.slots[cls].most = <uint16_t>max(1, min(CACHE_SLOTS - 1, most))
        c.slots[cls].batch = 1
    for cls in range(CACHED_CLASSES + 1):
        c.slots[cls].hot = SHUT

cdef inline bint block_kept(const Block* b) noexcept nogil:
    """Say whether thread caches keep such a block."""
    return b.kind == 0 and b.cls < CACHED_CLASSES

cdef inline uint16_t cache_slot(int cls) noexcept nogil:
    """Return where the slot of a class lies, in bytes; CACHED_CLASSES is the one that is always shut."""
    return <uint16_t>(SLOTS_AT + cls * <int>sizeof(CacheSlot))

cdef inline uint16_t block_slot(const Block* b) noexcept nogil:
    """Return where a block is kept."""
    return cache_slot(b.cls if block_kept(b) else CACHED_CLASSES)

cdef inline int cache_count(ThreadCache* c, int cls) noexcept nogil:
    return c.slots[cls].count + slot_is_hot(&c.slots[cls])

cdef inline bint slot_is_hot(CacheSlot* s) noexcept nogil:
    return s.hot != NULL and s.hot != SHUT

cdef inline int slot_room(const CacheSlot* s) noexcept nogil:
    """Return how many blocks a slot may hold, the hot one too."""
    return 0 if s.hot == SHUT else s.limit + 1

cdef inline int half(int n) noexcept nogil:
    return (n + 1) // 2

# What follows is for who is inside.

cdef inline bint cache_put(ThreadCache* c, Block* b) noexcept nogil:
    """Keep a block; False when there is no room for it, and none to be had."""
    cdef CacheSlot* s = &c.slots[b.cls]
    if (s.count >= s.limit if slot_is_hot(s) else s.hot == SHUT) and not cache_widen(c, b.cls):
        return False
    if slot_is_hot(s):
        slot_cool(s)
    s.hot = b
    return True

cdef inline Block* cache_get(ThreadCache* c, int cls) noexcept nogil:
    """Take a block out."""
    cdef CacheSlot* s = &c.slots[cls]
    cdef Block* b = s.hot
    if slot_is_hot(s):
        s.hot = NULL
        return b
    b = s.head
    if b != NULL:
        s.head = next_of(b)
        s.count -= 1
    return b

cdef inline bint cache_widen(ThreadCache* c, int cls) noexcept nogil:
    """Open a slot, or double its limit, if the cache's bound allows it."""
    if c.slots[cls].limit == c.slots[cls].most:
        return False
    if cache_grant(c, cls):
        return True
    c.denied += 1
    if c.denied == DENIALS:
        cache_narrow(c)
        return cache_grant(c, cls)
    return False

cdef inline bint cache_grant(ThreadCache* c, int cls) noexcept nogil:
    cdef CacheSlot* s = &c.slots[cls]
    cdef int wish = 0 if s.hot == SHUT else min(<int>s.most, max(1, 2 * s.limit))
    cdef uint64_t nbytes = (wish + 1 - slot_room(s)) * class_bytes(cls)
    if c.granted + nbytes > CACHE_BYTES:
        return False
    c.granted += nbytes
    c.denied = 0
    s.limit = <uint16_t>wish
    if s.hot == SHUT:
        s.hot = NULL
    return True

cdef inline bint cache_crowded(const ThreadCache* c) noexcept nogil:
    """Say whether blocks that lie idle keep others out."""
    return c.denied >= 2 * DENIALS

cdef inline void cache_narrow(ThreadCache* c) noexcept nogil:
    """Take back the room that no block is in."""
    cdef CacheSlot* s
    cdef int cls
    c.granted = 0
    for cls in range(CACHED_CLASSES):
        s = &c.slots[cls]
        s.limit = min(s.limit, s.count)
        if s.hot == NULL and s.head == NULL:
            s.hot = SHUT
        c.granted += slot_room(s) * class_bytes(cls)

cdef inline Block** big_at(ThreadCache* c, int cls) noexcept nogil:
    """Return the place of a larger class, which it shares with others."""
    return &c.big[cls & (BIG_SLOTS - 1)]

cdef inline Block* big_take(ThreadCache* c, int cls) noexcept nogil:
    """Take a larger block out, of just that class."""
    cdef Block* b = big_at(c, cls)[0]
    if b == NULL or b.cls != cls:
        return NULL
    big_at(c, cls)[0] = NULL
    return b

cdef inline Block* big_put(ThreadCache* c, Block* b) noexcept nogil:
    """Keep a larger block; return the one that was in its place."""
    cdef Block* old = big_at(c, b.cls)[0]
    big_at(c, b.cls)[0] = b
    return old

cdef inline void cache_refill(ThreadCache* c, int cls, FreeList* shared) noexcept nogil:
    """Move a batch from the shared list into an empty slot. One of it is to be taken at once."""
    cdef CacheSlot* s = &c.slots[cls]
    cdef int count
    cdef bint more
    s.head = pop_chain(&shared.head, min(<int>s.batch, s.limit + 1), &count, &more)
    if s.head != NULL:
        s.count = <uint16_t>count
        if more and s.batch < half(s.most):
            s.batch = <uint16_t>min(s.batch * 2, half(s.most))
        if s.limit < s.batch:
            cache_widen(c, cls)

cdef inline uint64_t cache_spill(ThreadCache* c, int cls, int count, FreeList* shared) noexcept nogil:
    """Move the `count` blocks of a class that came first to the shared list in one swap; return their bytes."""
    cdef CacheSlot* s = &c.slots[cls]
    cdef int keep = cache_count(c, cls) - count
    cdef Block* kept = NULL
    cdef Block* row[4]
    cdef Block* first
    cdef Block* last = NULL
    cdef Block* b
    cdef uint64_t moved
    if slot_is_hot(s):
        if keep > 0:
            keep -= 1
        else:
            slot_cool(s)
    first = s.head
    if first == NULL or count <= 0:
        return 0
    count = 0
    s.count = <uint16_t>max(keep, 0)
    while keep > 0:
        keep -= 1
        kept = first
        first = next_of(first)
    b = first
    while b != NULL:
        last = b
        if count >= 2:
            ahead_note(row[(count - 2) & 3], b, NULL)
        if count >= 4:
            ahead_note(row[count & 3], row[(count - 2) & 3], b)
        row[count & 3] = b
        count += 1
        b = next_of(b)
    if kept != NULL:
        set_next(kept, NULL)
    else:
        s.head = NULL
    moved = first.capacity * <uint64_t>count
    push_chain(&shared.head, first, last)
    return moved

cdef inline void slot_cool(CacheSlot* s) noexcept nogil:
    """Put the hot block to the others."""
    set_next(s.hot, s.head)
    s.head = s.hot
    s.hot = NULL
    s.count += 1
