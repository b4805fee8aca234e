# Carving a region into blocks and joining them again. Everything here runs with core.lock held.
#
# The pieces of a region (blocks and spans) form a list by address, so that a block given back joins with
# free neighbours at once. Spans are also kept in bins by the largest class that fits in them, with a bitmap,
# so that the best fit is found in constant time. A region that is not carved has one piece and no bins.
#
#   region.first -> [block][span][block][block][span.............]
#                          bin 12               bin 87
from libc.stdint cimport uint64_t, uintptr_t
from libc.stdlib cimport calloc, free

from zcpool._atomics cimport load64, store64
from zcpool._block cimport SPAN, Block, Cold, Region, block_set, word_state
from zcpool._freelist cimport cold, descriptor_give, descriptor_take, next_of, set_next
from zcpool._sizes cimport CLASSES, GRANULE, class_of, class_within, round_up

cdef extern from * nogil:
    int ctz "__builtin_ctzll"(unsigned long long x) noexcept


cdef inline uint64_t offset_of(Block* b) noexcept nogil:
    """Return the offset of a block in its region, bytes (right for memory the CPU does not see, too)."""
    return <uint64_t>(<uintptr_t>b.data - <uintptr_t>b.region.data)

cdef inline Block* span_prev(Block* b) noexcept nogil:
    return <Block*><uintptr_t>b.requested

cdef inline void span_set_prev(Block* b, Block* prev) noexcept nogil:
    store64(&b.requested, <uint64_t><uintptr_t>prev)

cdef inline void span_bin(Region* r, Block* b) noexcept nogil:
    """Put a span into the bin of its size."""
    cdef int i = class_within(b.capacity)
    block_set(b, SPAN)
    set_next(b, r.bins[i])
    span_set_prev(b, NULL)
    if r.bins[i] != NULL:
        span_set_prev(r.bins[i], b)
    r.bins[i] = b
    r.bin_bits[i >> 6] |= <uint64_t>1 << (i & 63)

cdef inline void span_unbin(Region* r, Block* b) noexcept nogil:
    cdef int i = class_within(b.capacity)
    cdef Block* prev = span_prev(b)
    cdef Block* next = next_of(b)
    if prev != NULL:
        set_next(prev, next)
    else:
        r.bins[i] = next
        if next == NULL:
            r.bin_bits[i >> 6] &= ~(<uint64_t>1 << (i & 63))
    if next != NULL:
        span_set_prev(next, prev)

cdef inline int bin_from(Region* r, int cls) noexcept nogil:
    """Return the first bin at or above a class that is not empty, or -1."""
    cdef int word = cls >> 6
    cdef uint64_t bits = r.bin_bits[word] & (~<uint64_t>0 << (cls & 63))
    while bits == 0:
        word += 1
        if word == 5:
            return -1
        bits = r.bin_bits[word]
    return (word << 6) + ctz(bits)

cdef inline bint is_span(Block* b) noexcept nogil:
    # A neighbour's word may move between CACHED and IN_USE meanwhile, but to and from SPAN only under the lock.
    return word_state(load64(&b.word)) == SPAN

cdef inline void piece_make(Region* r, Block* b, void* data, uint64_t nbytes) noexcept nogil:
    b.region = r
    b.core = r.core
    b.data = data
    b.capacity = nbytes
    cold(b).wiped = 0

cdef inline void piece_after(Block* b, Block* left) noexcept nogil:
    """Put a new piece behind another one in the region's list by address."""
    cdef Cold* c = cold(b)
    cdef Cold* before = cold(left)
    c.left = left
    c.right = before.right
    if before.right != NULL:
        cold(before.right).left = b
    before.right = b

cdef inline void piece_drop(Block* b) noexcept nogil:
    """Take a piece out of the list by address and give its descriptor back."""
    cdef Cold* c = cold(b)
    if c.left != NULL:
        cold(c.left).right = c.right
    else:
        b.region.first = c.right
    if c.right != NULL:
        cold(c.right).left = c.left
    descriptor_give(b)

cdef inline bint region_begin(Region* r, bint carve, uint64_t capacity) noexcept nogil:
    """Give a fresh region its first piece: one span of an arena, or the one block of `capacity` bytes."""
    cdef Block* b = descriptor_take()
    if b == NULL:
        return False
    r.bins = NULL
    r.carved_bytes = 0
    r.bin_bits[0] = r.bin_bits[1] = r.bin_bits[2] = r.bin_bits[3] = r.bin_bits[4] = 0
    if carve:
        r.bins = <Block**>calloc(CLASSES, sizeof(Block*))
        if r.bins == NULL:
            descriptor_give(b)
            return False
    r.first = b
    piece_make(r, b, r.data, r.nbytes & ~<uint64_t>(GRANULE - 1) if carve else capacity)
    cold(b).left = NULL
    cold(b).right = NULL
    if carve:
        span_bin(r, b)
    return True

cdef inline void region_end(Region* r) noexcept nogil:
    """Give back the descriptors of a region none of whose blocks anybody holds."""
    while r.first != NULL:
        block_set(r.first, SPAN)
        piece_drop(r.first)
    free(r.bins)
    r.bins = NULL

cdef inline uint64_t padding(Block* span, uint64_t alignment) noexcept nogil:
    return round_up(<uint64_t><uintptr_t>span.data, alignment) - <uint64_t><uintptr_t>span.data

cdef inline Block* find_span(Region* r, uint64_t nbytes, uint64_t alignment) noexcept nogil:
    """Return the smallest span that holds an aligned piece, looking at a few in each bin."""
    cdef int i = bin_from(r, class_of(nbytes))
    cdef int tries
    cdef Block* b
    while i >= 0:
        b = r.bins[i]
        tries = 0
        while b != NULL and tries < 8:
            if padding(b, alignment) + nbytes <= b.capacity:
                return b
            b = next_of(b)
            tries += 1
        i = bin_from(r, i + 1) if i + 1 < CLASSES else -1
    return NULL

cdef inline Block* arena_carve(Region* r, uint64_t nbytes, uint64_t alignment) noexcept nogil:
    """Cut a piece out of an arena; NULL, with nothing changed, when no span fits.

    The piece comes back as a span outside the bins: its caller makes a block of it.
    """
    cdef Block* span = find_span(r, nbytes, alignment)
    cdef Block* front = NULL
    cdef Block* tail = NULL
    cdef uint64_t pad
    cdef uint64_t left
    if span == NULL:
        return NULL
    pad = padding(span, alignment)
    left = span.capacity - pad - nbytes
    if pad:
        front = span
        span = descriptor_take()
        if span == NULL:
            return NULL
    if left:
        tail = descriptor_take()
        if tail == NULL:
            if front != NULL:
                descriptor_give(span)
            return NULL
    if front != NULL:
        span_unbin(r, front)
        piece_make(r, span, <char*>front.data + pad, nbytes)
        piece_after(span, front)
        front.capacity = pad
        span_bin(r, front)
    else:
        span_unbin(r, span)
        span.capacity = nbytes
    if tail != NULL:
        piece_make(r, tail, <char*>span.data + nbytes, left)
        piece_after(tail, span)
        span_bin(r, tail)
    r.carved_bytes += nbytes
    return span

cdef inline void arena_join(Region* r, Block* b) noexcept nogil:
    """Make a block that the caller holds a span again, and join it with free neighbours."""
    cdef Block* left = cold(b).left
    cdef Block* right = cold(b).right
    r.carved_bytes -= b.capacity
    cold(b).wiped = 0
    block_set(b, SPAN)
    if right != NULL and is_span(right):
        span_unbin(r, right)
        b.capacity += right.capacity
        piece_drop(right)
    if left != NULL and is_span(left):
        span_unbin(r, left)
        left.capacity += b.capacity
        piece_drop(b)
        b = left
    span_bin(r, b)
