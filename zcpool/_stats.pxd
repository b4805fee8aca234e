# Reading the books: every descriptor of the pool's regions is looked at once, with the regions held still by
# core.lock. Each block is counted by one load of its word, and what is not a block is slack, so the sums
# balance by construction, even while others acquire and release.
from libc.stdint cimport uint64_t

from zcpool._atomics cimport load64, mutex_lock
from zcpool._block cimport CACHED, FOREIGN, HELD, RETIRED, SPAN, Block, Region, ThreadCache, word_refs, \
    word_state
from zcpool._core cimport Core, peak_note
from zcpool._freelist cimport cold
from zcpool._reclaim cimport core_unlock
from zcpool._sizes cimport CACHED_CLASSES, bucket_of


cdef struct BucketSums:
    uint64_t in_use_bytes
    uint64_t in_use_blocks
    uint64_t requested_bytes
    uint64_t cached_bytes
    uint64_t cached_blocks
    uint64_t retired_bytes
    uint64_t retired_blocks
    uint64_t reserved_bytes
    uint64_t handles
    uint64_t acquires
    uint64_t largest_free


cdef inline void count_block(Block* b, BucketSums* s) noexcept nogil:
    cdef int state = word_state(load64(&b.word)) & ~FOREIGN
    s.reserved_bytes += b.capacity
    if state == CACHED:
        s.cached_bytes += b.capacity
        s.cached_blocks += 1
        s.largest_free = max(s.largest_free, b.capacity)
    elif state == RETIRED:
        s.retired_bytes += b.capacity
        s.retired_blocks += 1
    else:
        s.in_use_bytes += b.capacity
        s.in_use_blocks += 1
        s.requested_bytes += min(load64(&b.requested), b.capacity)

cdef inline uint64_t core_held(Core* core) noexcept nogil:
    """Count the blocks that C callers, pins and bindings hold. The GIL is released; takes core.lock."""
    cdef Region* r
    cdef Block* b
    cdef uint64_t word
    cdef uint64_t held = 0
    cdef uint64_t pins = load64(&core.head.pins)
    mutex_lock(&core.lock)
    r = core.regions
    while r != NULL:
        b = r.first
        while b != NULL:
            word = load64(&b.word)
            if word_state(word) == HELD:
                held += 1
                pins -= min(pins, word_refs(word))      # pins of a held block are not counted again
            b = cold(b).right
        r = r.next
    core_unlock(core)
    return held + pins

cdef inline void core_sums(Core* core, BucketSums* sums) noexcept nogil:
    """Fill four BucketSums (zeroed by the caller). The GIL is released; takes core.lock."""
    cdef Region* r
    cdef Block* b
    cdef ThreadCache* c
    cdef uint64_t left, total
    cdef int i
    mutex_lock(&core.lock)
    # Acquires first: releases are what of them is not in use, and so never more than there were.
    c = core.caches
    for i in range(4):
        sums[i].acquires = load64(&core.counters.acquires[i])
    while c != NULL:
        for i in range(4):
            sums[i].acquires += load64(&c.acquires[i])
        for i in range(CACHED_CLASSES):
            sums[bucket_of(i)].acquires += load64(&c.slots[i].taken)
        c = c.next
    r = core.regions
    while r != NULL:
        sums[r.bucket].handles += 1
        left = r.nbytes
        b = r.first
        while b != NULL:
            if word_state(load64(&b.word)) != SPAN:
                count_block(b, &sums[b.bucket])
                left -= b.capacity
            elif b.capacity > sums[r.bucket].largest_free:
                sums[r.bucket].largest_free = b.capacity
            b = cold(b).right
        sums[r.bucket].reserved_bytes += left      # uncarved bytes are the arena's own bucket's slack
        r = r.next
    total = 0
    for i in range(4):
        peak_note(&core.counters.peak_in_use[i], sums[i].in_use_bytes)
        peak_note(&core.counters.peak_reserved[i], sums[i].reserved_bytes)
        total += sums[i].in_use_bytes
    peak_note(&core.counters.peak_in_use_total, total)
    core_unlock(core)
