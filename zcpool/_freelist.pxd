# Lock-free LIFO free lists of blocks.
#
# A list is a Treiber stack whose links lie in descriptors, never in blocks, so that a popper with a stale
# view reads a mapped link, and device memory is never touched. Its head is one word:
#
#   tag (40 bits) | index of the first block (24 bits, 0 = empty)
#
# Invariant: the tag moves on with every push. If a popper's compare-and-swap still finds the head it read,
# nothing was pushed meanwhile, so the first block never left the list, and the links it followed from there
# (any number of them: a chain is taken in one swap) are what they were.
#
# Memory order: a push releases (the block's contents and link), a pop acquires. Pops and pushes of others in
# between are read-modify-writes of the same word, so they carry the release on.
from libc.stdint cimport uint32_t, uint64_t, uintptr_t

from zcpool._atomics cimport cas64, load64, load64_acquire, loadptr, mutex_lock, mutex_unlock, prefetch, store64, \
    storeptr
from zcpool._block cimport Block, Cold
from zcpool._process cimport CHUNK, INDEX_BITS, TAG_BITS, cold_half, descriptor, grow_descriptors, process, window

cdef extern from "zcpool.h" nogil:
    uint32_t block_index "zc_index"(const Block* b) noexcept

cdef enum:
    INDEX_MASK = (1 << 24) - 1


cdef struct FreeList:
    # One cache line: two classes never share one.
    uint64_t head           # atomic
    uint32_t stamp          # atomic: the core's epoch when a block was last taken from here
    uint32_t made           # blocks of this list that exist, wherever they are; guarded by core.lock
    uint32_t floor          # blocks that reserve() promised; automatic trimming leaves them; by core.lock
    uint32_t trimmed        # the epoch when blocks were last given back unasked, 0: never; by core.lock
    uint32_t unused[10]


cdef inline Block* block_at(uint64_t head) noexcept nogil:
    cdef uint32_t index = head & INDEX_MASK
    return <Block*>descriptor(index) if index else NULL

cdef inline Cold* cold(Block* b) noexcept nogil:
    return <Cold*>cold_half(b)

cdef inline Block* next_of(Block* b) noexcept nogil:
    # Relaxed: a stale popper may read it while the block's next owner writes it; the swap then fails.
    return <Block*>loadptr(<uintptr_t*>&b.next)

cdef inline void set_next(Block* b, Block* next) noexcept nogil:
    storeptr(<uintptr_t*>&b.next, <uintptr_t>next)

cdef inline uint64_t head_after_push(uint64_t head, Block* first) noexcept nogil:
    cdef uint64_t tag = (head >> INDEX_BITS) + 1
    return ((tag & ((<uint64_t>1 << TAG_BITS) - 1)) << INDEX_BITS) | block_index(first)

cdef inline uint64_t head_after_pop(uint64_t head, Block* rest) noexcept nogil:
    return (head & ~<uint64_t>INDEX_MASK) | (block_index(rest) if rest else 0)

cdef inline void push_chain(uint64_t* head, Block* first, Block* last) noexcept nogil:
    """Push blocks linked from `first` to `last` in one swap."""
    cdef uint64_t seen = load64(head)
    while True:
        set_next(last, block_at(seen))
        if cas64(head, &seen, head_after_push(seen, first)):
            return

cdef inline Block* pop(uint64_t* head) noexcept nogil:
    cdef uint64_t seen = load64_acquire(head)
    cdef Block* b
    cdef Block* rest
    while True:
        b = block_at(seen)
        if b == NULL:
            return NULL
        rest = next_of(b)
        window()
        if cas64(head, &seen, head_after_pop(seen, rest)):
            return b

# A chain that another core has pushed is a row of cache misses, each of which tells where the next one is. So whoever
# pushes a long chain notes in each block, where its `requested` would be, which ones follow two and four places
# later; and who pops it fetches those while it waits for the next. These are hints: what else is found there names some
# descriptor or none, and a fetch of it does no harm.

cdef inline void ahead_note(Block* b, Block* two, Block* four) noexcept nogil:
    store64(&b.requested, block_index(two) | <uint64_t>block_index(four) << INDEX_BITS)

cdef inline void ahead_fetch(Block* b) noexcept nogil:
    cdef uint64_t hints = load64(&b.requested)
    prefetch(descriptor(<uint32_t>(hints & INDEX_MASK)))
    prefetch(descriptor(<uint32_t>((hints >> INDEX_BITS) & INDEX_MASK)))

cdef inline Block* pop_chain(uint64_t* head, int most, int* count, bint* more) noexcept nogil:
    """Pop up to `most` blocks as a chain in one swap; `more`: the list did not end with them."""
    cdef uint64_t seen = load64_acquire(head)
    cdef Block* first
    cdef Block* last
    cdef Block* rest
    while True:
        first = block_at(seen)
        count[0] = 0
        more[0] = False
        if first == NULL:
            return NULL
        last = first
        count[0] = 1
        rest = next_of(last)
        while rest != NULL and count[0] < most:
            ahead_fetch(last)
            last = rest
            rest = next_of(last)
            count[0] += 1
        window()
        if cas64(head, &seen, head_after_pop(seen, rest)):
            set_next(last, NULL)
            more[0] = rest != NULL
            return first

cdef inline Block* pop_all(uint64_t* head) noexcept nogil:
    """Detach the whole list. The tag stays: an empty list cannot be confused with a full one."""
    cdef uint64_t seen = load64_acquire(head)
    while seen & INDEX_MASK:
        if cas64(head, &seen, head_after_pop(seen, NULL)):
            return block_at(seen)
    return NULL


# ---- descriptors: a free list of their own ---------------------------------------------------------

cdef inline Block* descriptor_take() noexcept nogil:
    """Take a descriptor nobody uses; NULL when there is no memory, or 16 million are in use."""
    cdef Block* b = pop(&process.free_descriptors)
    cdef Block* first
    cdef uint32_t index
    cdef uint32_t i
    if b != NULL:
        return b
    mutex_lock(&process.grow_lock)
    b = pop(&process.free_descriptors)
    if b == NULL:
        index = grow_descriptors()
        if index:
            first = <Block*>descriptor(index)
            for i in range(1, <uint32_t>CHUNK - (index & <uint32_t>(CHUNK - 1))):
                b = first + i
                set_next(b - 1, b)
            push_chain(&process.free_descriptors, first + 1, b)
            b = first
    mutex_unlock(&process.grow_lock)
    return b

cdef inline void descriptor_give(Block* b) noexcept nogil:
    push_chain(&process.free_descriptors, b, b)
