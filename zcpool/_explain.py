"""What an `OutOfMemory` says: what was asked, what there is, why that is not enough, and what to do."""

from __future__ import annotations

from typing import Any

from zcpool._units import format_bytes

__all__ = ["out_of_memory_text"]

# By the "reason" of the details: why, and what to do about it.
_CAUSES = {
    "too large": (
        "it is more than the limit, the backend or the machine allows",
        "Ask for less, or raise max_bytes.",
    ),
    "limit in bytes": (
        "the limit in bytes is reached",
        "Release buffers (retired ones wait for views, pins or fences), wait with timeout=, or raise max_bytes.",
    ),
    "limit in handles": (
        "the limit in handles is reached",
        "Release buffers, raise max_handles, or carve more from arenas (arena_buckets=).",
    ),
    "frozen": (
        "the pool is frozen and nothing that fits is cached",
        "Reserve it before freeze(), call thaw(), or wait for a release with timeout=.",
    ),
    "all in use": (
        "all blocks are in use",
        "Release a buffer, wait with timeout=, or make the pool with a larger count.",
    ),
    "backend": (
        "the backend has no more memory",
        "Release buffers (retired ones wait for views, pins or fences), or give memory back elsewhere.",
    ),
    "host memory": (
        "the host has no memory for the pool's own books",
        "Give memory back elsewhere in the process.",
    ),
}


def out_of_memory_text(name: str, details: dict[str, Any], error: BaseException | None) -> str:
    """Put the details of an `OutOfMemory` into words.

    Parameters
    ----------
    name : str
        The pool's.
    details : dict
        As in `OutOfMemory.details`.
    error : BaseException or None
        What the backend said.
    """
    why, advice = _CAUSES[details["reason"]]
    said = f" ({error})" if error is not None else ""
    limit = "no limit" if details["limit"] is None else f"limit {format_bytes(details['limit'])}"
    handles = f"{details['handles']} of {details['max_handles'] or 'any number'}"
    return (
        f"pool {name!r} cannot serve {format_bytes(details['asked'])}: {why}{said}; {limit}, "
        f"in use {format_bytes(details['in_use'])}, cached {format_bytes(details['cached'])}, "
        f"retired {format_bytes(details['retired'])}, largest free block {format_bytes(details['largest_free'])}, "
        f"handles {handles}. {advice}"
    )
