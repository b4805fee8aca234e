"""The pool: acquire, release, reserve, trim, limits."""

from cpython.object cimport PyObject
from cpython.exc cimport PyErr_CheckSignals
from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memset

from zcpool._atomics cimport add64, and32, likely, load32, load64, now_ns, or32, spinlock, tryunlock, unlikely
from zcpool._backend cimport Backend, fault_error
from zcpool._block cimport CLOSED, DEBUG, FIXED, FROZEN, IN_USE, RETIRED, ZERO, Block, word_owned, word_state
from zcpool._buffer cimport Buffer, Buffer_begin, Buffer_new
from zcpool._core cimport Core, core_take
from zcpool._door cimport Api, door_fill, door_pool
from zcpool._freelist cimport block_index
from zcpool._life cimport chores, core_close, core_new, core_orphan, life_begin
from zcpool._miss cimport core_miss, core_trim, fences_poll
from zcpool._process cimport chores_due, descriptor, process
from zcpool._request cimport ALL_IN_USE, BACKEND_FAILED, IS_CLOSED, IS_FROZEN, LIMIT_BYTES, LIMIT_HANDLES, \
    NO_DESCRIPTORS, TOO_LARGE, Request, request_init, worth_waiting
from zcpool._reserve cimport core_reserve
from zcpool._sizes cimport GRANULE, class_bytes, largest_request
from zcpool._stats cimport BucketSums, core_held, core_sums
from zcpool._wait cimport wait_begin, wait_end, wait_some

import atexit
import itertools
import operator
import os
import sys
import warnings
import weakref
from threading import get_ident

from zcpool import _registry
from zcpool._explain import out_of_memory_text
from zcpool._stats import BucketStats, PoolStats
from zcpool._units import format_bytes, parse_bytes
from zcpool._views import array_layout
from zcpool.errors import OutOfMemory, PoolError

__all__ = ["Pool"]

cdef enum:
    MAX_ALIGNMENT = 2 << 20     # bytes: a huge page
    MAX_BLOCKS = 1 << 24        # what the index of a list head can name, and one more: it cannot be had

cdef dict ARENA_LIMITS = {"none": 0, "small": class_bytes(94), "medium": class_bytes(110),
                          "large": class_bytes(126), "all": largest_request()}


cdef class Pool:
    """A pool of device-visible memory: acquire blocks, release them, and have them again at no cost.

    Blocks below 1 MiB are carved from arenas; larger ones are regions of their own, with their own fd where
    the backend has fds. Released blocks are cached by size class and served again without asking the backend.

    Parameters
    ----------
    backend : str or Backend, default "posix"
        Where memory comes from. See `zcpool.backends`.
    name : str, optional
        For messages and statistics; made up by default.
    alignment : int, default 64
        Bytes; a power of two. Every buffer's address is a multiple of it.
    max_bytes : int or str, optional
        The most the pool may hold from the backend, cached blocks included. ``"64MiB"`` works.
    max_handles : int, optional
        The most regions (fds, on backends that have them) the pool may hold.
    arena_bytes : int or str, default "4MiB"
        The size arenas grow to; the first is small.
    arena_buckets : {"small", "medium", "large", "all", "none"}, default "small"
        Up to which bucket blocks are carved from arenas; blocks larger than `arena_bytes` are regions of their own
        all the same.
    zero_on_release : bool, default False
        Overwrite memory with zeros when it is released.
    on_pressure : callable, optional
        ``on_pressure(pool, nbytes)`` is called when a request cannot be served otherwise, before it fails: drop
        what you can spare, and the request is tried once more.
    **backend_options
        Passed to the backend when it is given by name.

    Raises
    ------
    ValueError
        For an unknown backend, or an argument out of its range.
    BackendUnavailable
        When the backend cannot work on this machine.

    Notes
    -----
    All methods may be called from any thread. A forked child starts with an empty pool of its own.

    Examples
    --------
    >>> import zcpool
    >>> with zcpool.Pool() as pool:
    ...     frame = pool.acquire("6MiB")
    ...     frame.bucket
    'large'
    """

    def __init__(self, backend="posix", *, name=None, alignment=64, max_bytes=None, max_handles=None,
                 arena_bytes="4MiB", arena_buckets="small", zero_on_release=False, on_pressure=None,
                 **backend_options):
        if self._core != NULL:
            raise PoolError("the pool has been initialised already")
        if on_pressure is not None and not callable(on_pressure):
            raise TypeError(f"on_pressure must be callable, not {type(on_pressure).__name__}")
        if arena_buckets not in ARENA_LIMITS:
            raise ValueError(f"arena_buckets must be one of {', '.join(map(repr, ARENA_LIMITS))}, "
                             f"not {arena_buckets!r}")
        align = check_alignment(alignment)
        limit = check_limit(max_bytes, "max_bytes")
        handles = check_limit(None if max_handles is None else operator.index(max_handles), "max_handles")
        if arena_bytes is None:
            raise TypeError('arena_bytes must be a size, not None: arena_buckets="none" turns arenas off')
        arena = check_limit(arena_bytes, "arena_bytes")
        supplier = _registry.create(backend, backend_options)
        state = State(supplier, name, alignment, on_pressure)
        Pool_open(self, supplier, align, limit, handles, arena, ARENA_LIMITS[arena_buckets],
                  (ZERO if zero_on_release else 0) | (DEBUG if debug_wanted() else 0))
        self._state = state
        live_pools.add(self)

    def __del__(self):
        if self._core != NULL:
            Pool_warn_of_leaks(self)

    def __dealloc__(self):
        if self._core != NULL:
            core_orphan(self._core)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback, /):
        self.close()

    def __repr__(self):
        if self._core == NULL:
            return "<zcpool.Pool, not initialised>"
        s = self.stats()
        state = "closed, " if self.closed else "frozen, " if self.frozen else ""
        retired = f", {s.retired_blocks} retired" if s.retired_blocks else ""
        return (f"<zcpool.Pool {self.name!r}: {state}{s.in_use_blocks} block(s) in use "
                f"({format_bytes(s.in_use_bytes)}){retired}, {format_bytes(s.reserved_bytes)} reserved>")

    def acquire(self, nbytes, *, alignment=None, bint exclusive=False, timeout=0):
        """Return a buffer of at least `nbytes`.

        Parameters
        ----------
        nbytes : int or str
            Bytes; 0 gives an empty buffer that never reaches the backend. ``"1.5MiB"`` works.
        alignment : int, optional
            Bytes, a power of two up to 2 MiB; the pool's by default.
        exclusive : bool, default False
            A region of its own, also for a small block: many importers take an fd but no offset.
        timeout : float or None, default 0
            Seconds to wait for a release or a fence when a limit is reached; None waits for ever.

        Returns
        -------
        Buffer
            Its contents are undefined.

        Raises
        ------
        ValueError, TypeError
            For a negative or malformed size, or an alignment that is not possible.
        OutOfMemory
            When neither cached memory, fences, `on_pressure` nor waiting helped.
        BackendError
            When the backend failed for another reason than memory.
        PoolError
            When the pool is closed.
        """
        cdef Buffer buf
        if likely(alignment is None and not exclusive):
            buf = Pool_hit(self, <PyObject*>nbytes)
            if likely(buf is not None):
                return buf
        return Pool_acquire(self, nbytes, alignment, exclusive, timeout, OutOfMemory)

    def array(self, shape, dtype="uint8"):
        """Acquire a buffer and return a numpy array over it.

        Parameters
        ----------
        shape : int or sequence of int
        dtype : dtype_like, default uint8

        Returns
        -------
        numpy.ndarray
            Its contents are undefined. The block goes home when the array and all its views are gone.
        """
        layout = array_layout(shape, dtype)
        return self.acquire(layout.nbytes).array(layout.shape, layout.dtype)

    def reserve(self, nbytes, count=1, *, alignment=None, bint exclusive=False, bint touch=False):
        """Make blocks ahead, so that acquiring them makes no backend call.

        Parameters
        ----------
        nbytes : int or str
            Bytes of each.
        count : int, default 1
            How many blocks of this size are to be free after the call, those that are free already included.
        alignment, exclusive
            As they will be given to `acquire`.
        touch : bool, default False
            Fault in the pages of new blocks now instead of at the first use.

        Raises
        ------
        OutOfMemory, BackendError, PoolError
            As `acquire`; blocks made until then stay cached.
        """
        number = operator.index(count)
        if number < 0:
            raise ValueError(f"count must not be negative, and is {number}")
        Pool_reserve(self, nbytes, number, alignment, exclusive, touch, False)

    def trim(self, keep_bytes=0):
        """Give cached memory back to the backend.

        Parameters
        ----------
        keep_bytes : int or str, default 0
            How much may stay cached; what was used last stays.

        Returns
        -------
        int
            Bytes given back. A frozen pool, and that of a `FixedPool`, gives back nothing.
        """
        cdef uint64_t keep = min(parse_bytes(keep_bytes, "keep_bytes"), largest_request())
        cdef uint64_t given
        cdef Core* core = Pool_core(self)
        Pool_chores()
        with nogil:
            fences_poll(core)
            given = core_trim(core, keep)
        return given

    def freeze(self):
        """Make no backend call until `thaw`: what is not cached cannot be acquired, and nothing is given back."""
        or32(&Pool_core(self).head.flags, FROZEN)

    def thaw(self):
        """End `freeze`."""
        and32(&Pool_core(self).head.flags, ~<uint32_t>FROZEN)

    def close(self):
        """Stop acquires and give back cached memory. Calling it again does nothing.

        Live buffers stay valid and give their memory back when they are released.
        """
        cdef Core* core = Pool_core(self)
        Pool_chores()
        with nogil:
            core_close(core)

    def stats(self):
        """Return the books.

        Returns
        -------
        PoolStats
            A snapshot: ``reserved_bytes == in_use_bytes + cached_bytes + retired_bytes + slack_bytes``, in each
            bucket and in total.
        """
        Pool_chores()
        return Pool_stats(self)

    @property
    def name(self):
        """The pool's name."""
        Pool_core(self)
        return self._state.name

    @property
    def backend(self):
        """The Backend that supplies the memory."""
        Pool_core(self)
        return self._state.backend

    @property
    def alignment(self):
        """Bytes every buffer is aligned to."""
        Pool_core(self)
        return self._state.alignment

    @property
    def max_bytes(self):
        """The limit in bytes, or None."""
        return Pool_core(self).max_bytes or None

    @property
    def max_handles(self):
        """The limit in regions, or None."""
        return Pool_core(self).max_handles or None

    @property
    def c_handle(self):
        """The pool's number for native code: the ``zc_pool`` of ``zcpool.h``."""
        return door_pool(Pool_core(self))

    @property
    def closed(self):
        """Whether `close` has been called."""
        return bool(load32(&Pool_core(self).head.flags) & CLOSED)

    @property
    def frozen(self):
        """Whether the pool is frozen."""
        return bool(load32(&Pool_core(self).head.flags) & FROZEN)


# ---- opening -------------------------------------------------------------------------------------------------

class State:
    """What the slow paths of a pool need of Python."""

    __slots__ = ("alignment", "backend", "name", "on_pressure", "origins", "pressed", "told")
    numbers = itertools.count()

    def __init__(self, backend, name, alignment, on_pressure):
        self.backend = backend
        self.name = f"{backend.name}-{next(self.numbers)}" if name is None else str(name)
        self.alignment = alignment
        self.on_pressure = on_pressure
        self.origins = {} if debug_wanted() else None   # by block: the line that acquired it
        self.pressed = set()                            # threads that are inside on_pressure
        self.told = False                               # of leaks


cdef int Pool_open(Pool self, Backend backend, uint64_t alignment, uint64_t limit, uint64_t handles, uint64_t arena,
                   uint64_t arena_limit, uint32_t flags) except -1:
    cdef uint64_t granule = max(alignment, max(backend.granularity, <uint64_t>GRANULE))
    cdef Core* core
    if granule > MAX_ALIGNMENT or granule & (granule - 1):
        raise ValueError(f"granularity {backend.granularity} of the {backend.name} backend is not a power of two up to "
                         f"{MAX_ALIGNMENT} bytes")
    if granule > backend.max_alignment and granule > backend.alignment:
        raise ValueError(f"alignment {alignment} is more than the {backend.name} backend can give: "
                         f"{max(backend.max_alignment, backend.alignment)} bytes")
    if flags & ZERO and not backend.cpu_visible:
        raise ValueError(f"zero_on_release needs memory that the CPU sees, and that of {backend.name} is not")
    core = core_new(backend, granule, flags)
    if self._core != NULL:      # an argument's code, or another thread, has come before
        core_orphan(core)
        raise PoolError("the pool has been initialised already")
    core.max_bytes = limit
    core.max_handles = handles
    core.arena_bytes = arena // granule * granule
    core.arena_limit = min(arena_limit, core.arena_bytes)
    core.region_alignment = max(granule, backend.alignment)
    core.largest_region = min(backend.largest_region, largest_request())
    self._core = core
    return 0

cdef bint debug_wanted():
    return os.environ.get("ZCPOOL_DEBUG", "") not in ("", "0")

cdef uint64_t check_alignment(alignment) except 0:
    value = operator.index(alignment)
    if value < 1 or value & (value - 1) or value > MAX_ALIGNMENT:
        raise ValueError(f"alignment must be a power of two from 1 to {MAX_ALIGNMENT} bytes, and is {value}")
    return value

cdef uint64_t check_limit(limit, str what) except? 0:
    if limit is None:
        return 0
    value = parse_bytes(limit, what) if isinstance(limit, str) else operator.index(limit)
    if value < 1:
        raise ValueError(f"{what} must be positive, and is {value}")
    return min(value, largest_request())

cdef inline Core* Pool_core(Pool self) except NULL:
    if unlikely(self._core == NULL):
        raise PoolError("the pool was never initialised: call super().__init__() first")
    return self._core

cdef inline void Pool_chores() noexcept:
    if unlikely(chores_due()):
        chores(NULL)


# ---- acquire ---------------------------------------------------------------------------------------------------

cdef extern from "Python.h":
    long long PyLong_AsLongLongAndOverflow(PyObject* value, int* overflow) except? -1
    bint PyLong_CheckExact(PyObject* value)

cdef inline long long as_size(PyObject* nbytes) except? -1:
    """Return an int as bytes; what does not fit comes out as -1, for the slow path to look at."""
    cdef int overflow
    return PyLong_AsLongLongAndOverflow(nbytes, &overflow)

cdef object Pool_take(Pool self, uint64_t nbytes, timeout, kind):
    """Acquire a size that has been checked; `kind` is the exception when there is none. For FixedPool."""
    cdef Buffer buf = Buffer_new()
    cdef Block* block = core_take(self._core, nbytes, IN_USE)
    if likely(block != NULL):
        Buffer_begin(buf, self, block, nbytes)
        return buf
    return Pool_acquire(self, nbytes, None, False, timeout, kind)

cdef int Pool_found(Pool self, uint64_t nbytes, uint64_t count) except -1:
    """Make the blocks of a FixedPool, and let the pool never grow or shrink by itself."""
    or32(&Pool_core(self).head.flags, FIXED)
    return Pool_reserve(self, nbytes, count, None, False, False, True)

cdef uint32_t Pool_forks() noexcept:
    return process.generation

cdef extern from "_object.h":
    void* method_replace "zc_method_replace" (object kind, const char* name, void* function) noexcept

ctypedef object (*method)(object self, PyObject** args, Py_ssize_t n_args, PyObject* keywords)

cdef method acquire_any         # the door that Cython made: any arguments

cdef object acquire_plain(object self, PyObject** args, Py_ssize_t n_args, PyObject* keywords):
    """Serve `pool.acquire(nbytes)`, the way it is called for every frame; pass on all else, and a miss."""
    cdef Buffer buf
    if likely(n_args == 1 and keywords == NULL):
        buf = Pool_hit(<Pool>self, args[0])
        if likely(buf is not None):
            return buf
    return acquire_any(self, args, n_args, keywords)

cdef inline Buffer Pool_hit(Pool self, PyObject* nbytes):
    """Return a buffer over a cached block when the size is an int; None for the slow path."""
    cdef Buffer buf
    cdef Block* block
    cdef long long size
    if likely(PyLong_CheckExact(nbytes) and self._core != NULL):
        size = as_size(nbytes)
        if likely(0 < size <= <long long>largest_request()):
            buf = Buffer_new()      # before the block: a failure here loses nothing
            block = core_take(self._core, <uint64_t>size, IN_USE)
            if likely(block != NULL):
                Buffer_begin(buf, self, block, <uint64_t>size)
                return buf
    return None

acquire_any = <method>method_replace(Pool, "acquire", <void*>acquire_plain)

cdef object Pool_acquire(Pool self, nbytes, alignment, bint exclusive, timeout, kind):
    """Acquire the slow way: odd arguments, misses, pressure, waiting."""
    cdef Core* core = Pool_core(self)
    cdef Buffer buf
    cdef Block* block
    cdef Request rq
    size = parse_bytes(nbytes)
    deadline = check_timeout(timeout)
    buf = Buffer_new()
    if size == 0:
        if alignment is not None:
            Pool_check_alignment(self, alignment)
        if load32(&core.head.flags) & CLOSED:
            raise PoolError(f"pool {self.name!r} is closed: make a new one")
        Buffer_begin(buf, self, NULL, 0)
        return buf
    Pool_request(self, &rq, size, alignment, exclusive)
    if rq.reason == TOO_LARGE:
        Pool_fail(self, &rq, size, kind)
    block = Pool_find(self, &rq, deadline)
    if block == NULL:
        Pool_fail(self, &rq, size, kind)
    Buffer_begin(buf, self, block, size)
    if self._state.origins is not None:
        Pool_debug(self, block)
    return buf

cdef int64_t check_timeout(timeout) except -2:
    """Return nanoseconds, -1 for ever."""
    if timeout is None:
        return -1
    seconds = float(timeout)
    if not seconds >= 0:
        raise ValueError(f"timeout must be None or a number of seconds from 0 on, and is {timeout!r}")
    return <int64_t>(min(seconds, 1e9) * 1e9)

cdef uint64_t Pool_check_alignment(Pool self, alignment) except 0:
    cdef uint64_t align = check_alignment(alignment)
    cdef Backend backend = self._state.backend
    if align > self._core.region_alignment and align > backend.max_alignment:
        raise ValueError(f"alignment {align} is more than the {backend.name} backend can give: "
                         f"{max(backend.max_alignment, self._core.region_alignment)} bytes")
    return align

cdef int Pool_request(Pool self, Request* rq, size, alignment, bint exclusive) except -1:
    """Classify a request; too large for any machine is a reason in the request, not an error yet."""
    cdef uint64_t align = 1 if alignment is None else Pool_check_alignment(self, alignment)
    if size > largest_request() - MAX_ALIGNMENT:
        request_init(self._core, rq, largest_request() - MAX_ALIGNMENT, align, exclusive, IN_USE)
        rq.reason = TOO_LARGE
    else:
        request_init(self._core, rq, size, align, exclusive, IN_USE)
    return 0

cdef Block* Pool_find(Pool self, Request* rq, int64_t timeout) except? NULL:
    """Find a block: the pool's own means, then on_pressure, then waiting."""
    cdef Core* core = self._core
    cdef Block* block
    Pool_chores()
    with nogil:
        block = core_miss(core, rq)
    if block == NULL and chores_due():
        chores(NULL)
        with nogil:
            block = core_miss(core, rq)
    if block == NULL and self._state.on_pressure is not None and worth_waiting(rq):
        if Pool_press(self, rq):
            with nogil:
                block = core_miss(core, rq)
    if block == NULL and timeout != 0 and worth_waiting(rq):
        block = Pool_wait(self, rq, timeout)
    if block != NULL:
        drop_error(rq)
    return block

cdef bint Pool_press(Pool self, Request* rq) except -1:
    """Call on_pressure, unless this thread is inside it already; say whether it was called."""
    thread = process.generation, get_ident()     # a forked child has threads of the same name
    if thread in self._state.pressed:
        return False
    drop_error(rq)
    self._state.pressed.add(thread)
    try:
        self._state.on_pressure(self, rq.nbytes)
    except BaseException:
        add64(&self._core.counters.failures[rq.bucket], 1)
        raise
    finally:
        self._state.pressed.discard(thread)
    Pool_chores()
    return True

cdef inline void drop_error(Request* rq) noexcept:
    """Forget the Python exception of a failed try that will be repeated."""
    if rq.fault.error != NULL:
        fault_error(&rq.fault)

cdef Block* Pool_wait(Pool self, Request* rq, int64_t timeout) except? NULL:
    cdef Core* core = self._core
    cdef Block* block = NULL
    cdef int64_t deadline = now_ns() + timeout
    cdef int64_t left = -1
    cdef uint32_t forks = process.generation
    cdef int slot
    with nogil:
        slot = wait_begin(core)
    try:
        while True:
            drop_error(rq)
            with nogil:
                block = core_miss(core, rq)
            if block != NULL or not worth_waiting(rq):
                return block
            if timeout >= 0:
                left = deadline - now_ns()
                if left <= 0:
                    return NULL
            with nogil:
                wait_some(core, slot, left)
            Pool_chores()
            PyErr_CheckSignals()
            if forks != process.generation:     # a handler forked, and this is the child: the slot is the parent's
                forks = process.generation
                slot = wait_begin(core)
    except BaseException:
        drop_error(rq)      # a signal's handler ended the wait
        raise
    finally:
        with nogil:
            wait_end(core, slot)

cdef int Pool_reserve(Pool self, nbytes, count, alignment, bint exclusive, bint touch, bint founding) except -1:
    cdef Core* core = Pool_core(self)
    cdef Request rq
    cdef uint64_t number
    cdef bint done
    size = parse_bytes(nbytes)
    if size == 0 or count == 0:
        return 0
    Pool_request(self, &rq, size, alignment, exclusive)
    rq.founding = founding
    if count >= MAX_BLOCKS or count * rq.capacity >= largest_request():
        rq.reason = TOO_LARGE       # before a machine's memory has gone into the attempt
        Pool_fail(self, &rq, size * count, OutOfMemory)
    number = count
    if rq.reason != TOO_LARGE:
        Pool_chores()
        with nogil:
            done = core_reserve(core, &rq, number, touch)
        if done:
            drop_error(&rq)
            return 0
    Pool_fail(self, &rq, size, OutOfMemory)


# ---- failing -----------------------------------------------------------------------------------------------------

cdef int Pool_fail(Pool self, Request* rq, size, kind) except -1:
    """Count a failed request and raise what says why, and what to do."""
    cdef Core* core = self._core
    add64(&core.counters.failures[rq.bucket], 1)
    error = None
    if rq.reason == BACKEND_FAILED:
        error = fault_error(&rq.fault)
        if not rq.fault.no_memory:
            raise error
    drop_error(rq)
    if rq.reason == IS_CLOSED:
        raise PoolError(f"pool {self.name!r} is closed: make a new one")
    raise Pool_out_of_memory(self, rq, size, kind, error) from error

cdef object Pool_out_of_memory(Pool self, Request* rq, size, kind, error):
    cdef BucketSums sums[4]
    cdef int i
    s = Pool_sums(self, sums)
    details = {
        "asked": size, "reason": REASONS[<int>rq.reason], "limit": self.max_bytes, "in_use": s.in_use_bytes,
        "cached": s.cached_bytes, "retired": s.retired_bytes,
        "largest_free": max([sums[i].largest_free for i in range(4)]),
        "handles": s.handles, "max_handles": self.max_handles,
        "code": rq.fault.code if rq.reason == BACKEND_FAILED else None,
    }
    return kind(out_of_memory_text(self.name, details, error), details)


cdef dict REASONS = {
    <int>TOO_LARGE: "too large", <int>LIMIT_BYTES: "limit in bytes", <int>LIMIT_HANDLES: "limit in handles",
    <int>IS_FROZEN: "frozen", <int>ALL_IN_USE: "all in use", <int>BACKEND_FAILED: "backend",
    <int>NO_DESCRIPTORS: "host memory",
}


# ---- the books ---------------------------------------------------------------------------------------------------

cdef object Pool_stats(Pool self):
    cdef BucketSums sums[4]
    return Pool_sums(self, sums)

cdef object Pool_sums(Pool self, BucketSums* sums):
    """Fill four BucketSums, and return the PoolStats made of them."""
    cdef Core* core = Pool_core(self)
    cdef int i
    memset(sums, 0, 4 * sizeof(BucketSums))
    with nogil:
        fences_poll(core)
        core_sums(core, sums)
    buckets = []
    for i, name in enumerate(("small", "medium", "large", "huge")):
        buckets.append(BucketStats(**bucket_fields(core, i, &sums[i], name)))
    total = {field: sum(getattr(b, field) for b in buckets) for field in BucketStats.__dataclass_fields__
             if field != "name"}
    # Threads tell of what they lend at different times: the sum may have been noted with more than its parts.
    total["peak_in_use_bytes"] = min(load64(&core.counters.peak_in_use_total), total["peak_in_use_bytes"])
    total["peak_reserved_bytes"] = max(load64(&core.counters.peak_reserved_total), total["reserved_bytes"])
    return PoolStats(name=self._state.name, buckets=tuple(buckets), **total)

cdef dict bucket_fields(Core* core, int i, BucketSums* s, str name):
    misses = min(load64(&core.counters.misses[i]), s.acquires)
    return dict(
        name=name,
        in_use_bytes=s.in_use_bytes, in_use_blocks=s.in_use_blocks, requested_bytes=s.requested_bytes,
        cached_bytes=s.cached_bytes, cached_blocks=s.cached_blocks,
        retired_bytes=s.retired_bytes, retired_blocks=s.retired_blocks,
        slack_bytes=s.reserved_bytes - s.in_use_bytes - s.cached_bytes - s.retired_bytes,
        reserved_bytes=s.reserved_bytes,
        peak_in_use_bytes=load64(&core.counters.peak_in_use[i]),
        peak_reserved_bytes=load64(&core.counters.peak_reserved[i]),
        handles=s.handles, acquires=s.acquires, hits=s.acquires - misses, misses=misses,
        releases=s.acquires - min(s.acquires, s.in_use_blocks),
        failures=load64(&core.counters.failures[i]),
        backend_allocations=load64(&core.counters.backend_allocations[i]),
        backend_frees=load64(&core.counters.backend_frees[i]),
    )


# ---- debug mode and leaks ----------------------------------------------------------------------------------------

cdef int Pool_debug(Pool self, Block* block) except -1:
    """Note who acquired the block, and tell of memory faults seen since the last look."""
    frame = sys._getframe()
    self._state.origins[block_index(block)] = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    text = Pool_fault(self._core)
    if text:
        warnings.warn(f"pool {self.name!r}: {text}", RuntimeWarning, stacklevel=1)   # Cython has no frame
    return 0

cdef str Pool_fault(Core* core):
    """Take the text of the first fault nobody has read."""
    cdef char text[256]
    cdef int i
    if core.faults.text[0] == 0:
        return ""
    with nogil:
        spinlock(&core.faults.lock)
        for i in range(256):
            text[i] = core.faults.text[i]
        core.faults.text[0] = 0
        tryunlock(&core.faults.lock)
    return text.decode("utf-8", "replace")

cdef int Pool_warn_of_leaks(Pool self) except -1:
    """Warn when a pool ends while C code, pins or bindings hold blocks, and when memory was written wrongly."""
    cdef Core* core = self._core
    cdef uint64_t held
    if self._state is None or self._state.told:
        return 0
    self._state.told = True
    with nogil:
        held = core_held(core)
    text = Pool_fault(self._core)
    if text:
        warnings.warn(f"pool {self._state.name!r}: {text}", RuntimeWarning, source=self)
    if held:
        lines = Pool_origins(self)
        warnings.warn(f"pool {self._state.name!r} ends while {held} block(s) are held by C code, pins or bindings"
                      + (f"; acquired at {', '.join(lines)}" if lines else
                         "; set ZCPOOL_DEBUG=1 to see where they were acquired"), ResourceWarning, source=self)
    return 0

cdef list Pool_origins(Pool self):
    """Return the lines that acquired the blocks that are still held (debug mode)."""
    cdef Block* b
    lines = []
    for index, line in (self._state.origins or {}).items():
        b = <Block*>descriptor(index)
        if b.core == &self._core.head and (word_owned(load64(&b.word))
                                           or word_state(load64(&b.word)) == RETIRED):
            lines.append(line)
    return lines


live_pools = weakref.WeakSet()


@atexit.register
def warn_at_exit():
    """Tell of pools that are still held when the interpreter ends."""
    cdef Pool pool
    for pool in list(live_pools):
        Pool_warn_of_leaks(pool)


# ---- the C door --------------------------------------------------------------------------------------------------

cdef extern from *:
    """
    #include "zcpool.h"
    static zc_api zc_the_api;
    __attribute__((visibility("default"))) const zc_api *zcpool_get_api(uint32_t abi)
    {
        return abi == ZC_ABI ? &zc_the_api : NULL;
    }
    """
    Api the_api "zc_the_api"
    const Api* get_api "zcpool_get_api"(uint32_t abi) noexcept nogil

life_begin()
door_fill(&the_api)
c_api = PyCapsule_New(<void*>get_api, "zcpool._pool.c_api", NULL)
