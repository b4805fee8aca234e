"""The books of a pool, checked against each other, against a backend that counts, and against what a test holds."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import fields

from doubles.memory import CountingBackend

import zcpool

BUCKETS = ("small", "medium", "large", "huge")
BYTES_OF = {
    "small": (1, 1 << 20),
    "medium": (1 << 20, 4 << 20),
    "large": (4 << 20, 16 << 20),
    "huge": (16 << 20, 1 << 63),
}
PEAKS = {"peak_in_use_bytes", "peak_reserved_bytes"}
COUNTS = [f.name for f in fields(zcpool.BucketStats) if f.name != "name"]


def balanced(
    pool: zcpool.Pool | zcpool.FixedPool,
    *,
    held: Iterable[zcpool.Buffer] | None = None,
    backend: CountingBackend | None = None,
    at_rest: bool = True,
) -> zcpool.PoolStats:
    """Check that the books of a pool balance, and return them.

    Parameters
    ----------
    pool
        Slack is what the pool computes from the other sums, so that they balance is little by itself: no sum may
        be negative (wrapped), and each must agree with what is known from elsewhere.
    held
        Every buffer of the pool that has not been released.
    backend
        The pool's backend, if no other pool uses it: it must have as much out as the pool says it holds.
    at_rest
        Nobody else uses the pool meanwhile, so counters and states belong to the same instant.
    """
    stats = pool.stats()
    for books in (stats, *stats.buckets):
        for name in COUNTS:
            assert 0 <= getattr(books, name) < 1 << 62, (books.name, name, getattr(books, name))
        assert books.reserved_bytes == (
            books.in_use_bytes + books.cached_bytes + books.retired_bytes + books.slack_bytes
        ), books
        assert books.acquires == books.hits + books.misses, books
        assert books.requested_bytes <= books.in_use_bytes, books
        assert books.peak_in_use_bytes >= books.in_use_bytes, books
        assert books.peak_reserved_bytes >= books.reserved_bytes, books
        for kind in ("in_use", "cached", "retired"):
            blocks, nbytes = getattr(books, f"{kind}_blocks"), getattr(books, f"{kind}_bytes")
            assert 64 * blocks <= nbytes, (kind, books)
            assert blocks or not nbytes, (kind, books)
        assert books.backend_frees <= books.backend_allocations, books
        if at_rest:
            assert books.releases == books.acquires - books.in_use_blocks, books
            assert books.handles == books.backend_allocations - books.backend_frees, books
    assert tuple(books.name for books in stats.buckets) == BUCKETS
    for name in COUNTS:
        total = sum(getattr(books, name) for books in stats.buckets)
        if name not in PEAKS:
            assert getattr(stats, name) == total, name
        elif at_rest:  # buckets need not have had their peaks at the same time
            assert getattr(stats, name) <= total, name
    if held is not None:
        _agrees_with_buffers(stats, [buf for buf in held if buf.capacity])
    if backend is not None:
        backend.check()
        assert stats.reserved_bytes == backend.live_bytes
        assert stats.handles == backend.live_regions
        assert stats.backend_allocations == backend.allocations
        assert stats.backend_frees == backend.frees
    return stats


def _agrees_with_buffers(stats: zcpool.PoolStats, held: list[zcpool.Buffer]) -> None:
    for books in stats.buckets:
        mine = [buf for buf in held if buf.bucket == books.name]
        low, high = BYTES_OF[books.name]
        assert all(low <= buf.capacity < high for buf in mine)
        assert books.in_use_blocks == len(mine)
        assert books.in_use_bytes == sum(buf.capacity for buf in mine)
        assert books.requested_bytes == sum(buf.nbytes for buf in mine)


def at_home(pool: zcpool.Pool | zcpool.FixedPool) -> bool:
    """Return whether every block has gone home, after a garbage collection if need be."""
    stats = pool.stats()
    if stats.in_use_blocks or stats.retired_blocks:
        gc.collect()
        stats = pool.stats()
    return not stats.in_use_blocks and not stats.retired_blocks
