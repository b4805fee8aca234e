from types import TracebackType
from typing import Any, Literal, SupportsIndex

from typing_extensions import Self

from zcpool._backend import Backend
from zcpool._buffer import Buffer
from zcpool._pool import Pool
from zcpool._stats import PoolStats

__all__ = ["FixedPool"]

class FixedPool:
    def __init__(
        self,
        nbytes: SupportsIndex | str,
        count: SupportsIndex,
        backend: str | Backend = "posix",
        *,
        name: str | None = None,
        alignment: SupportsIndex = 64,
        arena_bytes: SupportsIndex | str = "4MiB",
        arena_buckets: Literal["none", "small", "medium", "large", "all"] = "small",
        zero_on_release: bool = False,
        **backend_options: Any,
    ) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...
    def acquire(self, timeout: float | None = 0) -> Buffer: ...
    def close(self) -> None: ...
    def stats(self) -> PoolStats: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def pool(self) -> Pool: ...
    @property
    def closed(self) -> bool: ...
