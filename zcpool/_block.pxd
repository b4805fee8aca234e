# What a block is: its descriptor, the word that is the truth about it, and its region.
#
#   Region  --first-->  Block <-> Block <-> Block ...      by address; a region of its own has just one
#                         |
#   Buffer  --------------+    the Python object that owns a block
#
# A descriptor is 64 bytes (one cache line), out of band, never moved and never freed while the process
# lives; what only slow paths need lies in a parallel array (Cold). A reader with a stale pointer or token
# so always reads a mapped descriptor, sees another generation, and goes away.
#
# The word:   generation (40 bits) | state (4 bits) | references beyond the owner (20 bits)
#
#   SPAN     uncarved bytes of an arena, or a descriptor nobody uses
#   CACHED   free, in a thread cache or a free list
#   IN_USE   owned by a Buffer
#   HELD     owned by a C caller
#   RETIRED  released by its owner; exports, pins, bindings or a fence still hold references
#   FOREIGN  (a bit beside the state) it belongs to the parent of a forked process
#
# Transitions: only the holder of a block moves it between SPAN, CACHED and IN_USE or HELD (a store suffices:
# list operations order it). References are added by compare-and-swap and dropped by fetch-and-sub. An owned
# block with references becomes RETIRED by compare-and-swap; the thread that takes away the last reference of a
# RETIRED block owns it and sends it home. The generation moves on when the block goes home, so that a token
# dies with its block.
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

from zcpool._atomics cimport cas64, load64, load64_acquire, store64, sub64


cdef enum:
    STATE_SHIFT = 20
    GEN_SHIFT = 24
    REFS_MAX = (1 << 20) - 1
    SPAN = 0
    CACHED = 1
    IN_USE = 2
    RETIRED = 3
    HELD = 4
    FOREIGN = 8


cdef struct Region "zc_region":
    # What the backend fills in.
    void* data              # CPU address, NULL where the CPU cannot see the memory without mapping it
    uint64_t nbytes         # at least what was asked
    int fd                  # -1 where there is none; owned by the backend
    void* cookie            # the backend's own
    # What the core keeps; a backend does not touch it.
    CoreHead* core
    Region* next            # core.regions, guarded by core.lock; after unlinking, a list of regions to free
    Region* prev
    Block* first            # blocks and spans by address, guarded by core.lock
    Block** bins            # arena: spans by the largest class that fits in them; NULL: a region of its own
    uint64_t bin_bits[5]    # arena: which bins are not empty
    uint64_t carved_bytes   # bytes of blocks that are not spans
    uint64_t asked          # bytes reserved for it against the pool's limit
    int bucket              # whose counters it moves


cdef extern from "zcpool.h" nogil:
    # One definition for Cython and for C: capi/include/zcpool.h.
    struct Block "zc_block":
        uint64_t word           # atomic
        void* data
        Block* next             # atomic; link of the list the block is in
        uint16_t cls
        uint8_t kind            # see _core.pxd: which set of free lists
        uint8_t bucket
        uint16_t slot           # bytes into a thread cache
        uint64_t capacity       # bytes
        uint64_t requested "nbytes"     # bytes, atomic; a span keeps its left neighbour in its bin here
        Region* region
        CoreHead* core

    struct CacheSlot "zc_slot":
        Block* hot              # the block that came last, NULL, or SHUT
        Block* head             # the others
        uint64_t taken          # atomic, written by the owner alone: acquires
        uint16_t count          # the others
        uint16_t limit
        uint16_t most
        uint16_t batch          # blocks the next refill takes: doubles while the list has plenty, 1 after a steal

    struct ThreadCache "zc_cache":
        uint32_t busy
        uint32_t closed
        uint64_t pool
        CoreHead* open
        CoreHead* core
        void* owner             # atomic; the thread, NULL when it has ended: then a new thread may take the cache over
        ThreadCache* next       # core.caches
        uint64_t granted
        uint32_t denied
        uint64_t acquires[4]    # by bucket; atomic, written by the owner alone
        uint64_t lent[4]        # by bucket; what the owner lent (mod 2**64) and has not told core.lent
        uint64_t lent_all
        uint32_t keeps_big
        Block* big[8]
        CacheSlot slots[97]
        uint16_t places[1152]


cdef struct Cold:
    # Slow-path half of a descriptor, guarded by core.lock.
    Block* left             # neighbours by address in the arena
    Block* right
    uint64_t wiped          # debug: the free block holds the pattern; written by whoever holds the block
    uint64_t unused


ctypedef void (*block_fn)(CoreHead* core, Block* block) noexcept nogil
ctypedef void (*wait_fn)(CoreHead* core, void* fence_node) noexcept nogil


cdef struct CoreHead "zc_core":
    # The part of a pool's control block that modules above and beside the pool may see.
    block_fn release        # "I am done": home, or retired while references live
    block_fn go_home        # the block has no owner and no references: take it back
    wait_fn wait_for        # let a block wait for an fd: takes a FenceNode, whose reference the block has already
    uint32_t flags          # atomic, see below
    uint32_t id             # the place in process.pools
    uint64_t number         # atomic; which pool this is, of those that had the control block, and id: serial << 12 | id
    void* backend           # the Backend; the control block holds a reference while regions live
    uint64_t pins           # atomic: blocks that pins and bindings hold; a pool that ends with some warns


cdef enum:
    # Bits of CoreHead.flags.
    CLOSED = 1
    DEBUG = 2
    WAITERS = 4
    ZERO = 8
    FROZEN = 16             # no backend call until thaw
    FIXED = 32              # never grow: FixedPool
    PYTHON_BACKEND = 64     # regions are freed from Python entry points only
    ORPHAN = 128            # the Pool object is gone
    VISIBLE = 256           # the CPU sees the memory
    NEEDS_SYNC = 512        # the memory is not coherent
    SLOW_ACQUIRE = 1 | 2    # these take acquire off the hot path, and these take release past the thread caches
    SLOW_RELEASE = 1 | 2 | 4


cdef inline int word_state(uint64_t word) noexcept nogil:
    return <int>((word >> STATE_SHIFT) & 15)

cdef inline bint word_owned(uint64_t word) noexcept nogil:
    """Say whether a buffer or a C caller owns the block."""
    return (word_state(word) & ~FOREIGN) == IN_USE or (word_state(word) & ~FOREIGN) == HELD

cdef inline uint64_t word_refs(uint64_t word) noexcept nogil:
    return word & REFS_MAX

cdef inline uint64_t word_make(uint64_t generation_of, int state) noexcept nogil:
    """Return a word with the generation of another one, a state, and no references."""
    return ((generation_of >> GEN_SHIFT) << GEN_SHIFT) | (<uint64_t>state << STATE_SHIFT)

cdef inline void block_set(Block* b, int state) noexcept nogil:
    """Move a block the caller holds to another state, in the same generation."""
    store64(&b.word, word_make(load64(&b.word), state))

cdef inline void block_renew(Block* b) noexcept nogil:
    """Make a block the caller holds CACHED in the next generation: tokens of the last one die."""
    store64(&b.word, word_make(load64(&b.word), CACHED) + (<uint64_t>1 << GEN_SHIFT))

cdef inline bint block_ref(Block* b, uint64_t owner) noexcept nogil:
    """Add a reference for the owner whose word was `owner` when it took the block.

    False when the block is not that owner's any more, or a million references are held.
    """
    cdef uint64_t seen = load64(&b.word)
    while (seen >> GEN_SHIFT) == (owner >> GEN_SHIFT) and word_refs(seen) < REFS_MAX:
        if not word_owned(seen) and (word_state(seen) & ~FOREIGN) != RETIRED:
            return False
        if cas64(&b.word, &seen, seen + 1):
            return True
    return False

cdef inline void block_unref(Block* b) noexcept nogil:
    """Drop a reference; the last one of a retired block sends it home.

    The fetch-and-sub is an acquire and a release: whatever earlier holders did with the memory happens
    before its next use.
    """
    cdef CoreHead* core = b.core
    cdef uint64_t before = sub64(&b.word, 1)
    if word_refs(before) == 1 and word_state(before) == RETIRED:
        core.go_home(core, b)

cdef inline bint block_retire(Block* b) noexcept nogil:
    """Turn IN_USE with references into RETIRED; False if the last reference went meanwhile.

    On False the caller still owns the block, now without references.
    """
    cdef uint64_t seen = load64_acquire(&b.word)
    while word_refs(seen):
        if cas64(&b.word, &seen, word_make(seen, RETIRED) | word_refs(seen)):
            return True
    return False
