"""zcpool: a bucketed pool of memory that the CPU and an accelerator both see.

>>> import zcpool
>>> pool = zcpool.Pool()
>>> with pool.acquire("1MiB") as buf:
...     frame = buf.array((512, 512), "float32")
"""

from zcpool import backends
from zcpool._backend import Backend, Handle, PythonBackend
from zcpool._buffer import Buffer, Mapping, Pin
from zcpool._fence import Fence
from zcpool._fixed import FixedPool
from zcpool._pool import Pool
from zcpool._stats import BucketStats, PoolStats
from zcpool._version import __version__
from zcpool.capi import get_include, get_library
from zcpool.copies import CopyCount, copies, require_zero_copy, reset_copies
from zcpool.errors import BackendError, BackendUnavailable, Exhausted, OutOfMemory, PoolError

__all__ = [
    "Backend",
    "BackendError",
    "BackendUnavailable",
    "BucketStats",
    "Buffer",
    "CopyCount",
    "Exhausted",
    "Fence",
    "FixedPool",
    "Handle",
    "Mapping",
    "OutOfMemory",
    "Pin",
    "Pool",
    "PoolError",
    "PoolStats",
    "PythonBackend",
    "__version__",
    "backends",
    "copies",
    "get_include",
    "get_library",
    "require_zero_copy",
    "reset_copies",
]
