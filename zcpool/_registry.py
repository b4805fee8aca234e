"""Backends by name: those that come with zcpool, and those that others register.

This is the core's side of `zcpool.backends`: names only, so that nothing is imported before it is used.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Callable
from typing import Any

from zcpool._backend import Backend
from zcpool.errors import BackendUnavailable

__all__ = ["available", "create", "names", "register", "unavailable"]

GROUP = "zcpool.backends"
BUILT_IN = {"posix": "zcpool.backends.posix:PosixBackend"}

# No lock: each use is one atomic operation of a dictionary, and a forked child could not take over a held one.
_factories: dict[str, Callable[..., Backend]] = {}


def register(name: str, factory: Callable[..., Backend]) -> None:
    """Make a backend available by name.

    Packages do it without code, by an entry point in the group ``zcpool.backends``.

    Parameters
    ----------
    name : str
        What users pass to `Pool`.
    factory : callable
        Called with the backend options; returns a `Backend` or raises `BackendUnavailable`.
    """
    if not callable(factory):
        raise TypeError(f"a backend is registered by a callable that returns it, not by {factory!r}")
    _factories[name] = factory


def names() -> list[str]:
    """Return the names of all backends, whether they work here or not."""
    return sorted(set(_factories) | set(BUILT_IN) | {point.name for point in _entry_points()})


def available() -> list[str]:
    """Return the names of the backends that work on this machine."""
    missing = unavailable()
    return [name for name in names() if name not in missing]


def unavailable() -> dict[str, str]:
    """Return, by name, why a backend does not work on this machine."""
    reasons: dict[str, str] = {}
    for name in names():
        try:
            create(name, {})
        except Exception as error:
            reasons[name] = str(error) or type(error).__name__
    return reasons


def create(backend: str | Backend, options: dict[str, Any]) -> Backend:
    """Return the backend of a name, or the one that was passed.

    Raises
    ------
    ValueError
        For an unknown name.
    TypeError
        For something that is neither, or options beside a ready backend.
    BackendUnavailable
        When it cannot work here.
    """
    if isinstance(backend, Backend):
        if options:
            raise TypeError(f"options {sorted(options)} go to a backend given by name; {backend!r} is made already")
        return backend
    if not isinstance(backend, str):
        raise TypeError(f"backend must be a name or a zcpool.Backend, not {type(backend).__name__}")
    factory = _factory(backend)
    try:
        made = factory(**options)
    except TypeError as error:
        if not options:
            raise
        raise TypeError(
            f"backend {backend!r} does not take these options, and neither does the pool: "
            f"{', '.join(sorted(options))} ({error})"
        ) from error
    if not isinstance(made, Backend):
        raise BackendUnavailable(backend, 0, f"its factory returned {made!r}, which is not a zcpool.Backend")
    return made


def _factory(name: str) -> Callable[..., Backend]:
    factory = _factories.get(name)
    if factory is not None:
        return factory
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        # Python 3.9 takes the module's lock even when it is loaded: a child forked meanwhile would wait for ever.
        loaded_module = sys.modules.get(module) or importlib.import_module(module)
        found: Callable[..., Backend] = getattr(loaded_module, attribute)
        return found
    for point in _entry_points():
        if point.name == name:
            loaded: Callable[..., Backend] = point.load()
            return loaded
    raise ValueError(f"unknown backend {name!r}: known are {', '.join(map(repr, names()))}")


def _entry_points() -> Any:
    points: Any = importlib.metadata.entry_points()
    return points.select(group=GROUP) if hasattr(points, "select") else points.get(GROUP, ())
