"""The exceptions of zcpool.

.. code-block:: text

    PoolError
      +-- BackendError (.call, .code, .meaning)
      |     +-- BackendUnavailable
      +-- OutOfMemory (also a MemoryError)
            +-- Exhausted

Wrong arguments raise ``ValueError`` or ``TypeError``; using a released buffer raises ``BufferError``.
"""

from __future__ import annotations

from typing import Any

__all__ = ["BackendError", "BackendUnavailable", "Exhausted", "OutOfMemory", "PoolError"]


class PoolError(Exception):
    """Something about a pool is wrong; the base class of what zcpool raises itself."""


class BackendError(PoolError):
    """A call into a backend failed.

    Parameters
    ----------
    call : str
        The backend's function, as its vendor names it.
    code : int
        What it returned; 0 where it returns no code.
    meaning : str
        What that means, and what to do.
    """

    def __init__(self, call: str, code: int = 0, meaning: str = "") -> None:
        super().__init__(call, code, meaning)
        self.call = call
        self.code = code
        self.meaning = meaning

    def __str__(self) -> str:
        code = f" with {self.code}" if self.code else ""
        return f"{self.call} failed{code}" + (f": {self.meaning}" if self.meaning else "")


class BackendUnavailable(BackendError):
    """The backend cannot work here: no library, no device node, no permission."""

    def __str__(self) -> str:
        return f"{self.call}: {self.meaning}"


class OutOfMemory(MemoryError, PoolError):
    """The pool cannot serve a request, and everything that could help has been tried.

    Attributes
    ----------
    details : dict
        What the text says, by name: ``asked``, ``limit``, ``in_use``, ``cached``, ``retired``,
        ``largest_free``, ``handles``, ``max_handles`` (bytes and counts), ``reason``, and ``code``, the
        backend's own, where it failed.
    """

    def __init__(self, text: str = "", details: dict[str, Any] | None = None) -> None:
        super().__init__(text, details)
        self.details: dict[str, Any] = details if details is not None else {}

    def __str__(self) -> str:
        return str(self.args[0])


class Exhausted(OutOfMemory):
    """Every block of a `FixedPool` is in use."""
