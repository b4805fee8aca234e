# Waiting for a release when a limit is reached.
#
# A waiter has an eventfd of its own, so that nobody can eat its wake-up. It registers first and looks then; a
# release pushes first and looks for waiters then (both sequentially consistent): one sees the other. While it
# waits, releases pass the thread caches by.
from libc.stdint cimport int64_t, uint32_t, uint64_t

from zcpool._atomics cimport and32, and64, load64_seq, mutex_lock, or32, or64
from zcpool._block cimport WAITERS
from zcpool._core cimport Core
from zcpool._fence cimport queue_fds
from zcpool._process cimport slot_give, slot_take, slot_wait
from zcpool._reclaim cimport core_unlock
from zcpool._visit cimport caches_tell

cdef enum:
    WAIT_STEP = 500_000_000     # ns: a signal that arrives just before the sleep is seen after this
    BLIND_STEP = 5_000_000      # ns: without a slot, or with more fences than can be slept on


cdef inline int wait_begin(Core* core) noexcept nogil:
    """Register a waiter; returns its slot, or -1 when all 64 are taken: it then looks every few ms."""
    cdef int slot = slot_take()
    if slot >= 0:
        mutex_lock(&core.lock)      # against a wait_end that is about to clear the flag
        or64(&core.wait_mask, <uint64_t>1 << slot)
        or32(&core.head.flags, WAITERS)
        caches_tell(core)
        core_unlock(core)
    return slot

cdef inline void wait_end(Core* core, int slot) noexcept nogil:
    if slot < 0:
        return
    mutex_lock(&core.lock)
    if and64(&core.wait_mask, ~(<uint64_t>1 << slot)) == <uint64_t>1 << slot:
        and32(&core.head.flags, ~<uint32_t>WAITERS)
        caches_tell(core)
    core_unlock(core)
    slot_give(slot)

cdef inline void wait_some(Core* core, int slot, int64_t left) noexcept nogil:
    """Sleep until a block comes home, a fence signals, a signal arrives, or `left` ns (-1: no end) are over."""
    cdef int fences[63]
    cdef int n
    cdef int64_t step = WAIT_STEP
    mutex_lock(&core.lock)
    n = queue_fds(&core.fences, fences, 63)
    core_unlock(core)
    if slot < 0 or load64_seq(&core.fences.pending) > <uint64_t>n:
        step = BLIND_STEP
    slot_wait(slot, fences, n, left if 0 <= left < step else step)
