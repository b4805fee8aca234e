"""The statistics of a pool."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["BucketStats", "PoolStats"]


@dataclass(frozen=True)
class BucketStats:
    """The books of one bucket, or of a whole pool.

    At every look ``reserved_bytes == in_use_bytes + cached_bytes + retired_bytes + slack_bytes``.

    Attributes
    ----------
    name : str
        The bucket's (``"small"`` < 1 MiB <= ``"medium"`` < 4 MiB <= ``"large"`` < 16 MiB <= ``"huge"``) or
        the pool's.
    in_use_bytes, in_use_blocks : int
        Blocks owned by a buffer or a C caller, by their capacity.
    requested_bytes : int
        What was asked for of the bytes in use; the rest is rounding.
    cached_bytes, cached_blocks : int
        Free blocks, in free lists and thread caches.
    retired_bytes, retired_blocks : int
        Released, but waiting for exports, pins, bindings or a fence.
    slack_bytes : int
        Bytes of regions that are not carved into blocks: of arenas (counted with the small bucket), and what a
        backend gave beyond what was asked.
    reserved_bytes : int
        All bytes held from the backend.
    peak_in_use_bytes, peak_reserved_bytes : int
        The largest values so far. With several threads the peak in use is approximate: high by what waits in
        thread caches (at most 4 MiB each), low by what other threads have not told yet (at most 4 MiB and a block
        of each bucket for each).
    handles : int
        Regions held from the backend (an fd each, where the backend's memory has fds).
    acquires, hits, misses : int
        Served acquires; those served from cached blocks; those that needed an arena, another thread's cache,
        or the backend.
    releases : int
        Blocks released (retired ones included).
    failures : int
        Acquires that raised.
    backend_allocations, backend_frees : int
        Calls to the backend that got and gave back a region.
    """

    name: str
    in_use_bytes: int
    in_use_blocks: int
    requested_bytes: int
    cached_bytes: int
    cached_blocks: int
    retired_bytes: int
    retired_blocks: int
    slack_bytes: int
    reserved_bytes: int
    peak_in_use_bytes: int
    peak_reserved_bytes: int
    handles: int
    acquires: int
    hits: int
    misses: int
    releases: int
    failures: int
    backend_allocations: int
    backend_frees: int

    def to_dict(self) -> dict[str, Any]:
        """Return the statistics as plain dictionaries and numbers, ready for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class PoolStats(BucketStats):
    """The books of a pool: the sums of its buckets, and the buckets.

    Attributes
    ----------
    buckets : tuple of BucketStats
        ``small``, ``medium``, ``large``, ``huge``.
    """

    buckets: tuple[BucketStats, BucketStats, BucketStats, BucketStats]
