"""A pool of a fixed number of blocks of one size."""

from zcpool._pool cimport Pool, Pool_forks, Pool_found, Pool_take

import operator
from threading import RLock

from zcpool._units import format_bytes, parse_bytes
from zcpool.errors import Exhausted, PoolError

__all__ = ["FixedPool"]


cdef class FixedPool:
    """A fixed number of blocks of one size, made at once.

    Parameters
    ----------
    nbytes : int or str
        Bytes of each block.
    count : int
        How many.
    backend, name, alignment, zero_on_release, **backend_options
        As for `Pool`.

    Examples
    --------
    >>> import zcpool
    >>> frames = zcpool.FixedPool("6MiB", 3)
    >>> held = [frames.acquire() for _ in range(3)]
    >>> frames.acquire()
    Traceback (most recent call last):
        ...
    zcpool.errors.Exhausted: ...
    """

    def __init__(self, nbytes, count, backend="posix", **options):
        size = parse_bytes(nbytes)
        number = operator.index(count)
        if size < 1 or number < 1:
            raise ValueError(f"a FixedPool needs at least one block of at least one byte, not {number} of {size}")
        unknown = {"max_bytes", "max_handles", "on_pressure"} & set(options)
        if unknown:
            raise TypeError(f"a FixedPool has no {', '.join(sorted(unknown))}: its size is fixed")
        self._pool = Pool(backend, **options)
        if size >= 1 << 63 or number >= 1 << 63:
            self._pool.reserve(size, number)    # raises what says that this is too much
        self.nbytes = size
        self.count = number
        self._fills = {}
        FixedPool_fill(self)

    def __reduce__(self):
        raise TypeError("a pool cannot be copied or pickled")

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback, /):
        self.close()

    def __repr__(self):
        s = self.stats()
        state = "closed, " if self.closed else ""
        return (f"<zcpool.FixedPool {FixedPool_pool(self).name!r}: {state}{s.in_use_blocks + s.retired_blocks} of "
                f"{self.count} blocks of {format_bytes(self.nbytes)} in use>")

    def acquire(self, timeout=0):
        """Return a free block.

        Parameters
        ----------
        timeout : float or None, default 0
            Seconds to wait for a release or a fence; None waits for ever.

        Raises
        ------
        Exhausted
            When all blocks are in use.
        """
        cdef Pool pool = FixedPool_pool(self)
        if self._forks != Pool_forks() + 1:
            FixedPool_fill(self)        # a forked child starts with none of its parent's blocks
        return Pool_take(pool, self.nbytes, timeout, Exhausted)

    def close(self):
        """Stop acquires and give back free blocks; live ones follow when they are released."""
        FixedPool_pool(self).close()

    def stats(self):
        """Return the books, as `Pool.stats` does."""
        return FixedPool_pool(self).stats()

    @property
    def pool(self):
        """The pool behind it."""
        return FixedPool_pool(self)

    @property
    def closed(self):
        """Whether `close` has been called."""
        return FixedPool_pool(self).closed


cdef int FixedPool_fill(FixedPool self) except -1:
    """Make the blocks, once in each process.

    The lock guards that; the backend is called under it, which may be Python, so it can be taken again by the same
    thread. A lock for each generation of forks: the last one may have been held by a thread that is not here.
    """
    cdef uint32_t forks = Pool_forks()
    with self._fills.setdefault(forks, RLock()):
        if self._forks != forks + 1:
            Pool_found(self._pool, self.nbytes, self.count)
            self._forks = forks + 1
    return 0


cdef inline Pool FixedPool_pool(FixedPool self):
    if self._pool is None:
        raise PoolError("the pool was never initialised: call super().__init__() first")
    return self._pool
