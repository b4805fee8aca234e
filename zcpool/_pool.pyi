from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Literal, SupportsIndex, TypeVar, overload

import numpy as np
import numpy.typing as npt
from typing_extensions import Self, TypeAlias

from zcpool._backend import Backend
from zcpool._buffer import Buffer
from zcpool._stats import PoolStats

__all__ = ["Pool"]

_ScalarT = TypeVar("_ScalarT", bound=np.generic)
_Bytes: TypeAlias = SupportsIndex | str
_Shape: TypeAlias = SupportsIndex | Iterable[SupportsIndex]
_ArenaBuckets: TypeAlias = Literal["none", "small", "medium", "large", "all"]

class Pool:
    def __init__(
        self,
        backend: str | Backend = "posix",
        *,
        name: str | None = None,
        alignment: SupportsIndex = 64,
        max_bytes: _Bytes | None = None,
        max_handles: SupportsIndex | None = None,
        arena_bytes: _Bytes = "4MiB",
        arena_buckets: _ArenaBuckets = "small",
        zero_on_release: bool = False,
        on_pressure: Callable[[Pool, int], object] | None = None,
        **backend_options: Any,
    ) -> None: ...
    def __del__(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...
    def acquire(
        self,
        nbytes: _Bytes,
        *,
        alignment: SupportsIndex | None = None,
        exclusive: bool = False,
        timeout: float | None = 0,
    ) -> Buffer: ...
    @overload
    def array(self, shape: _Shape, dtype: Literal["uint8"] = "uint8") -> npt.NDArray[np.uint8]: ...
    @overload
    def array(self, shape: _Shape, dtype: type[_ScalarT] | np.dtype[_ScalarT]) -> npt.NDArray[_ScalarT]: ...
    @overload
    def array(self, shape: _Shape, dtype: npt.DTypeLike) -> npt.NDArray[Any]: ...
    def reserve(
        self,
        nbytes: _Bytes,
        count: SupportsIndex = 1,
        *,
        alignment: SupportsIndex | None = None,
        exclusive: bool = False,
        touch: bool = False,
    ) -> None: ...
    def trim(self, keep_bytes: _Bytes = 0) -> int: ...
    def freeze(self) -> None: ...
    def thaw(self) -> None: ...
    def close(self) -> None: ...
    def stats(self) -> PoolStats: ...
    @property
    def name(self) -> str: ...
    @property
    def backend(self) -> Backend: ...
    @property
    def alignment(self) -> int: ...
    @property
    def max_bytes(self) -> int | None: ...
    @property
    def max_handles(self) -> int | None: ...
    @property
    def c_handle(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    @property
    def frozen(self) -> bool: ...
