"""Counting and forbidding copies.

Every function of zcpool that copies tensor bytes says so here, so that "zero copy" is a number one can
assert on and not a belief.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from zcpool.errors import PoolError

__all__ = ["CopyCount", "check_copy", "copies", "count_copy", "require_zero_copy", "reset_copies"]

_lock = threading.Lock()  # guards _reasons; nothing but dictionary work happens under it
_reasons: dict[str, list[int]] = {}


def _forked() -> None:
    """Give a child a lock of its own: the parent's may be held by a thread that is not here."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)

_forbidden: contextvars.ContextVar[bool] = contextvars.ContextVar("zcpool_require_zero_copy", default=False)


@dataclass(frozen=True)
class CopyCount:
    """What the library has copied.

    Attributes
    ----------
    bytes : int
        Bytes copied in all.
    count : int
        Number of copies.
    reasons : dict of str to (int, int)
        Count and bytes by reason.
    """

    bytes: int
    count: int
    reasons: dict[str, tuple[int, int]] = field(default_factory=dict)


def copies() -> CopyCount:
    """Return the copies this process has made through zcpool since the start or `reset_copies`."""
    with _lock:
        reasons = {reason: (count, nbytes) for reason, (count, nbytes) in _reasons.items()}
    return CopyCount(
        bytes=sum(nbytes for _, nbytes in reasons.values()),
        count=sum(count for count, _ in reasons.values()),
        reasons=reasons,
    )


def reset_copies() -> None:
    """Start counting from zero."""
    with _lock:
        _reasons.clear()


@contextlib.contextmanager
def require_zero_copy() -> Iterator[None]:
    """Raise `PoolError` from any zcpool function that would copy, inside the ``with`` block.

    It holds for the thread (or asyncio task) that entered the block.
    """
    token = _forbidden.set(True)
    try:
        yield
    finally:
        _forbidden.reset(token)


def check_copy(nbytes: int, reason: str) -> None:
    """Refuse a copy under `require_zero_copy`, before anything is done for it.

    Parameters
    ----------
    nbytes : int
        Bytes to be copied.
    reason : str
        Why there is no way around it, in a few words.

    Raises
    ------
    PoolError
        Under `require_zero_copy`.
    """
    if _forbidden.get():
        raise PoolError(f"a copy of {nbytes} bytes was needed ({reason}), and require_zero_copy() forbids it")


def count_copy(nbytes: int, reason: str) -> None:
    """Count a copy.

    Parameters
    ----------
    nbytes : int
        Bytes to be copied.
    reason : str
        Why there is no way around it, in a few words.

    Raises
    ------
    PoolError
        Under `require_zero_copy`; nothing has been copied or counted then.
    """
    check_copy(nbytes, reason)
    with _lock:
        entry = _reasons.setdefault(reason, [0, 0])
        entry[0] += 1
        entry[1] += nbytes
