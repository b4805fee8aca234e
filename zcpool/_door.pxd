# The C door: the functions behind include/zcpool.h. They may be called from any thread, with or without the GIL.
#
# A pool is a number, serial << 12 | id, and a block's acquire a token, generation << 24 | index: both lead to
# memory that is never freed, and are compared with what lies there before anything is believed.
from libc.stdint cimport INT64_MAX, int64_t, uint32_t, uint64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport free
from libc.string cimport memset

from zcpool._atomics cimport add32, add64, cas64, fd_check, likely, load32, load32_acquire, load32_seq, load64, \
    load64_seq, now_ns, sub32, sub64, unlikely
from zcpool._backend cimport Fault, fault_error
from zcpool._block cimport DEBUG, FOREIGN, GEN_SHIFT, HELD, NEEDS_SYNC, ORPHAN, RETIRED, STATE_SHIFT, Block, \
    ThreadCache, block_ref, block_unref, word_make, word_owned, word_refs, word_state
from zcpool._cache cimport cache_give, cache_take, word_renew
from zcpool._core cimport Core, core_release_any, core_take, take_kept
from zcpool._fence cimport FenceNode, fence_node
from zcpool._freelist cimport INDEX_MASK, block_at
from zcpool._arena cimport offset_of
from zcpool._miss cimport cache_of, core_miss, core_trim, fences_poll
from zcpool._process cimport CHUNK, CHUNK_SHIFT, POOLS, call_python, descriptor, error_text, gil_leave, gil_return, \
    last_cache, process, set_last_cache, thread_cache
from zcpool._request cimport ALL_IN_USE, BACKEND_FAILED, IS_CLOSED, IS_FROZEN, LIMIT_BYTES, LIMIT_HANDLES, TOO_LARGE, \
    Request, request_init, worth_waiting
from zcpool._sizes cimport MAX_SHIFT
from zcpool._stats cimport BucketSums, core_sums
from zcpool._wait cimport wait_begin, wait_end, wait_some

cdef extern from "zcpool.h" nogil:
    enum: ZC_ABI
    enum: ZC_EXCLUSIVE
    enum: ZC_TO_DEVICE
    enum: ZC_FROM_DEVICE

    struct Place "zc_place":
        int fd
        uint64_t offset
        uint64_t region_bytes
        void* region_data
        void* cookie

    struct DoorStats "zc_stats":
        uint64_t in_use_bytes, in_use_blocks, cached_bytes, cached_blocks, retired_bytes, retired_blocks
        uint64_t slack_bytes, reserved_bytes, handles, acquires, misses, failures
        uint64_t backend_allocations, backend_frees

    struct Api "zc_api":
        uint32_t abi
        uint32_t size
        const Block* (*acquire)(uint64_t pool, size_t nbytes) noexcept
        const Block* (*acquire_with)(uint64_t pool, size_t nbytes, size_t alignment, int flags,
                                     int64_t timeout_ns) noexcept
        int (*release)(uint64_t token) noexcept
        int (*release_after)(uint64_t token, int fd) noexcept
        int (*pin)(uint64_t token) noexcept
        int (*unpin)(uint64_t token) noexcept
        int (*sync)(uint64_t token, int direction) noexcept
        const Block* (*find)(uint64_t token) noexcept
        int (*place)(uint64_t token, Place* out) noexcept
        int (*stats)(uint64_t pool, DoorStats* out) noexcept
        size_t (*trim)(uint64_t pool, size_t keep_bytes) noexcept
        const char* (*error)() noexcept
        ThreadCache* (*cache)(uint64_t pool) noexcept

cdef enum:
    LARGEST_ALIGNMENT = 2 << 20


# ---- from numbers to what they name ------------------------------------------------------------------------

cdef inline uint64_t door_pool(Core* core) noexcept nogil:
    return load64(&core.head.number)

# A pool may end, and another one take its control block over, while a C caller who came with its number is on the way
# through it. So off the fast way callers are counted as guests, and a pool with guests is not buried: all they find is
# a closed one. A guest counts itself first and compares the number then; who ends a pool changes the number first and
# looks for guests then (both sequentially consistent): one of the two sees the other.

cdef inline Core* guest_enter(uint64_t pool) noexcept nogil:
    """Return the control block of a pool's number; NULL, and why, when it never was or has ended."""
    cdef uint32_t id_ = pool & (POOLS - 1)
    cdef Core* core
    if likely(id_ < load32_acquire(&process.n_pools)):
        core = <Core*>process.pools[id_]
        add32(&core.guests, 1)
        if likely(load64_seq(&core.head.number) == pool):
            return core
        guest_leave(core)
    say("pool 0x%llx has ended, or never was", pool)
    return NULL

cdef inline void guest_leave(Core* core) noexcept nogil:
    if sub32(&core.guests, 1) == 1 and unlikely(load32_seq(&core.head.flags) & ORPHAN):
        call_python()           # the pool has ended meanwhile, and could not be buried

cdef inline Block* door_block(uint64_t token) noexcept nogil:
    """Return the block of a token that is owned or retired; NULL for a stale one."""
    cdef uint32_t index = token & INDEX_MASK
    cdef uint64_t word
    cdef Block* b
    if unlikely(index == 0 or index >= load32_acquire(&process.n_chunks) * <uint32_t>CHUNK):
        return NULL
    b = block_at(index)
    word = load64(&b.word)
    if (word >> GEN_SHIFT) != (token >> GEN_SHIFT) or not (word_owned(word) or word_state(word) == RETIRED):
        return NULL
    return b

cdef inline int say(const char* text, uint64_t value) noexcept nogil:
    snprintf(error_text(), 256, text, <unsigned long long>value)
    return -1

cdef inline void fault_tell(Fault* fault) noexcept with gil:
    """Put the text of the Python exception of a fault in place of its meaning, and let the exception go."""
    cdef bytes text
    try:
        error = fault_error(fault)
        cause = getattr(error, "__cause__", None) or error
        text = f"{type(cause).__name__}: {cause}".encode("utf-8", "replace")
    except BaseException:
        text = b"an exception without a text"
    snprintf(fault.meaning, sizeof(fault.meaning), "%s", <const char*>text)

cdef inline int say_fault(Fault* fault) noexcept nogil:
    cdef const char* call = fault.call
    if call == NULL:
        call = "the backend"
    if fault.error != NULL:
        fault_tell(fault)
    snprintf(error_text(), 256, "%s failed with %d: %s", call, fault.code, fault.meaning)
    return -1


# ---- acquire ---------------------------------------------------------------------------------------------------

cdef inline const Block* door_acquire(uint64_t pool, size_t nbytes) noexcept nogil:
    cdef const Block* b = cache_take(last_cache(), pool, nbytes, HELD)
    return b if likely(b != NULL) else <const Block*>process.acquire(pool, nbytes)

cdef inline const void* door_acquire_any(uint64_t pool, size_t nbytes) noexcept nogil:
    cdef ThreadCache* c = <ThreadCache*>thread_cache(pool & (POOLS - 1))
    cdef Block* b
    if c != NULL and nbytes - 1 < (<uint64_t>1 << MAX_SHIFT):
        set_last_cache(c)
        b = take_kept(c, pool, nbytes, HELD)
        if likely(b != NULL):
            return b
    return door_acquire_with(pool, nbytes, 0, 0, 0)

cdef inline const Block* door_acquire_with(uint64_t pool, size_t nbytes, size_t alignment, int flags,
                                           int64_t timeout_ns) noexcept nogil:
    cdef Core* core = guest_enter(pool)
    cdef Block* b = NULL
    if core == NULL:
        return NULL
    if nbytes == 0 or nbytes > (<uint64_t>1 << MAX_SHIFT) - LARGEST_ALIGNMENT:
        say("cannot serve %llu bytes", nbytes)
    elif alignment & (alignment - 1) or alignment > LARGEST_ALIGNMENT:
        say("alignment %llu is not a power of two up to 2 MiB", alignment)
    elif flags & ~<int>ZC_EXCLUSIVE:
        say("flags 0x%llx: only ZC_EXCLUSIVE is known", <uint64_t>flags)
    elif timeout_ns < -1:
        say("timeout -%llu ns: -1 means for ever", <uint64_t>0 - <uint64_t>timeout_ns)
    else:
        if alignment == 0 and flags == 0:
            b = core_take(core, nbytes, HELD)
        if b == NULL:
            b = door_miss(core, nbytes, alignment, flags, timeout_ns)
    guest_leave(core)
    return b

cdef inline Block* door_miss(Core* core, uint64_t nbytes, uint64_t alignment, int flags, int64_t timeout_ns) \
        noexcept nogil:
    cdef Request rq
    cdef Block* b
    cdef void* left
    request_init(core, &rq, nbytes, alignment, flags & ZC_EXCLUSIVE, HELD)
    left = gil_leave()
    b = core_miss(core, &rq)
    if b == NULL and timeout_ns != 0 and worth_waiting(&rq):
        b = door_wait(core, &rq, timeout_ns)
    gil_return(left)
    if b == NULL:
        add64(&core.counters.failures[rq.bucket], 1)
        door_explain(&rq)
    if rq.fault.error != NULL:
        fault_tell(&rq.fault)       # of a try that another one made good, or that was not the last word
    return b

cdef inline Block* door_wait(Core* core, Request* rq, int64_t timeout_ns) noexcept nogil:
    cdef int64_t now = now_ns()
    cdef int64_t deadline = now + min(timeout_ns, INT64_MAX - now)
    cdef int64_t left = -1
    cdef int slot = wait_begin(core)
    cdef Block* b
    while True:
        b = core_miss(core, rq)
        if timeout_ns >= 0:
            left = deadline - now_ns()
        if b != NULL or not worth_waiting(rq) or (timeout_ns >= 0 and left <= 0):
            break
        wait_some(core, slot, left)
    wait_end(core, slot)
    return b

cdef inline void door_explain(Request* rq) noexcept nogil:
    if rq.reason == IS_CLOSED:
        say("the pool is closed; %llu bytes were asked", rq.nbytes)
    elif rq.reason == TOO_LARGE:
        say("%llu bytes are more than the limit or the backend allows", rq.nbytes)
    elif rq.reason == LIMIT_BYTES:
        say("the pool's limit in bytes is reached; %llu bytes were asked", rq.nbytes)
    elif rq.reason == LIMIT_HANDLES:
        say("the pool's limit in handles is reached; %llu bytes were asked", rq.nbytes)
    elif rq.reason == IS_FROZEN:
        say("the pool is frozen, and %llu bytes are not cached", rq.nbytes)
    elif rq.reason == ALL_IN_USE:
        say("all blocks of the fixed pool are in use; %llu bytes were asked", rq.nbytes)
    elif rq.reason == BACKEND_FAILED:
        say_fault(&rq.fault)
    else:
        say("the host has no memory for the pool's books; %llu bytes were asked", rq.nbytes)

cdef inline ThreadCache* door_cache(uint64_t pool) noexcept nogil:
    cdef Core* core = guest_enter(pool)
    cdef ThreadCache* c
    cdef void* left
    if core == NULL:
        return NULL
    left = gil_leave()
    c = cache_of(core)
    gil_return(left)
    guest_leave(core)
    if c == NULL:
        say("no memory for a cache of pool 0x%llx", pool)
    return c


# ---- release ---------------------------------------------------------------------------------------------------

cdef inline int door_release(uint64_t token) noexcept nogil:
    cdef uint64_t index = token & INDEX_MASK
    cdef uint64_t held = (token - index) | (<uint64_t>HELD << STATE_SHIFT)
    cdef Block* b
    if likely(index >> CHUNK_SHIFT < load32_acquire(&process.n_chunks)):
        b = <Block*>descriptor(<uint32_t>index)
        if likely(load64(&b.word) == held) and likely(cache_give(last_cache(), b, word_renew(held, HELD))):
            return 0
    return process.release(token)

cdef inline int door_release_any(uint64_t token) noexcept nogil:
    cdef Block* b = door_block(token)
    if unlikely(b == NULL or word_state(load64(&b.word)) != HELD):
        return say("token 0x%llx is stale, or of a block that a Buffer owns: nothing was released", token)
    if unlikely(load32(&b.core.flags) & DEBUG):
        return door_release_once(b, token)
    core_release_any(b.core, b)
    return 0

cdef inline int door_release_once(Block* b, uint64_t token) noexcept nogil:
    """Release in debug mode: of two threads that race with one token, one is refused, at the price of two locked
    instructions.
    """
    cdef uint64_t seen = load64(&b.word)
    while (seen >> GEN_SHIFT) == (token >> GEN_SHIFT) and word_state(seen) == HELD:
        if cas64(&b.word, &seen, word_make(seen, RETIRED) | (word_refs(seen) + 1)):
            block_unref(b)
            return 0
    return say("token 0x%llx was released by two threads at once: the second was refused", token)

cdef inline int door_release_after(uint64_t token, int fd) noexcept nogil:
    cdef Block* b = door_block(token)
    cdef FenceNode* node
    if b == NULL or word_state(load64(&b.word)) != HELD:
        return say("token 0x%llx is stale, or of a block that a Buffer owns: nothing was released", token)
    if fd_check(fd):
        return say("fence fd %lld is not open, or a regular file: nothing was released", fd)
    node = fence_node(b, fd)
    if node == NULL:
        return say("no memory to note fence fd %lld: nothing was released", fd)
    if not block_ref(b, token):
        free(node)
        return say("token 0x%llx is stale, or has a million references: nothing was released", token)
    b.core.wait_for(b.core, node)
    core_release_any(b.core, b)
    return 0

cdef inline int door_pin(uint64_t token) noexcept nogil:
    cdef Block* b = door_block(token)
    if b == NULL or not block_ref(b, token):
        return say("token 0x%llx is stale: nothing was pinned", token)
    add64(&b.core.pins, 1)
    return 0

cdef inline int door_unpin(uint64_t token) noexcept nogil:
    cdef Block* b = door_block(token)
    if b == NULL or word_state(load64(&b.word)) & FOREIGN or not word_refs(load64(&b.word)):
        return say("token 0x%llx is stale, or not pinned", token)
    sub64(&b.core.pins, 1)
    block_unref(b)
    return 0


# ---- the rest --------------------------------------------------------------------------------------------------

cdef inline const Block* door_find(uint64_t token) noexcept nogil:
    cdef Block* b = door_block(token)
    if b == NULL:
        say("token 0x%llx is stale", token)
    return b

cdef inline int door_place(uint64_t token, Place* out) noexcept nogil:
    cdef Block* b = door_block(token)
    if b == NULL:
        return say("token 0x%llx is stale", token)
    out.fd = b.region.fd
    out.offset = offset_of(b)
    out.region_bytes = b.region.nbytes
    out.region_data = b.region.data
    out.cookie = b.region.cookie
    return 0

cdef inline int door_sync(uint64_t token, int direction) noexcept nogil:
    cdef Block* b = door_block(token)
    cdef Fault fault
    cdef Core* core
    cdef void* left
    cdef int failed
    if b == NULL:
        return say("token 0x%llx is stale: nothing was synced", token)
    if direction != ZC_TO_DEVICE and direction != ZC_FROM_DEVICE:
        return say("direction %llu is neither ZC_TO_DEVICE nor ZC_FROM_DEVICE", <uint64_t>direction)
    core = <Core*>b.core
    if not load32(&core.head.flags) & NEEDS_SYNC:
        return 0
    memset(&fault, 0, sizeof(fault))
    left = gil_leave()
    failed = core.ops.sync(core.head.backend, b.region, offset_of(b), load64(&b.requested), direction, &fault)
    gil_return(left)
    return say_fault(&fault) if failed else 0

cdef inline int door_stats(uint64_t pool, DoorStats* out) noexcept nogil:
    cdef Core* core = guest_enter(pool)
    cdef BucketSums sums[4]
    cdef void* left
    cdef int i
    memset(out, 0, sizeof(DoorStats))
    memset(sums, 0, sizeof(sums))
    if core == NULL:
        return -1
    left = gil_leave()
    fences_poll(core)
    core_sums(core, sums)
    gil_return(left)
    for i in range(4):
        out.in_use_bytes += sums[i].in_use_bytes
        out.in_use_blocks += sums[i].in_use_blocks
        out.cached_bytes += sums[i].cached_bytes
        out.cached_blocks += sums[i].cached_blocks
        out.retired_bytes += sums[i].retired_bytes
        out.retired_blocks += sums[i].retired_blocks
        out.reserved_bytes += sums[i].reserved_bytes
        out.handles += sums[i].handles
        out.acquires += sums[i].acquires
        out.misses += load64(&core.counters.misses[i])
        out.failures += load64(&core.counters.failures[i])
        out.backend_allocations += load64(&core.counters.backend_allocations[i])
        out.backend_frees += load64(&core.counters.backend_frees[i])
    out.slack_bytes = out.reserved_bytes - out.in_use_bytes - out.cached_bytes - out.retired_bytes
    guest_leave(core)
    return 0

cdef inline size_t door_trim(uint64_t pool, size_t keep_bytes) noexcept nogil:
    cdef Core* core = guest_enter(pool)
    cdef size_t given
    cdef void* left
    if core == NULL:
        return 0
    left = gil_leave()
    fences_poll(core)
    given = core_trim(core, keep_bytes)
    gil_return(left)
    guest_leave(core)
    return given

cdef inline const char* door_error() noexcept nogil:
    return error_text()

cdef inline void door_fill(Api* api) noexcept nogil:
    api.abi = ZC_ABI
    api.size = sizeof(Api)
    api.acquire = door_acquire
    api.acquire_with = door_acquire_with
    api.release = door_release
    api.release_after = door_release_after
    api.pin = door_pin
    api.unpin = door_unpin
    api.sync = door_sync
    api.find = door_find
    api.place = door_place
    api.stats = door_stats
    api.trim = door_trim
    api.error = door_error
    api.cache = door_cache
    process.acquire = door_acquire_any
    process.release = door_release_any
