"""The C door: where its header and its library are."""

from __future__ import annotations

from pathlib import Path

__all__ = ["get_include", "get_library"]


def get_include() -> str:
    """Return the directory of ``zcpool.h``, for a compiler's ``-I``."""
    return str(Path(__file__).parent / "include")


def get_library() -> str:
    """Return the path of the library that exports ``zcpool_get_api``.

    Native code that is not an extension module opens it with ``dlopen(path, RTLD_NOW | RTLD_NOLOAD)`` in a process
    that has imported zcpool.
    """
    import zcpool._pool

    return str(zcpool._pool.__file__)
