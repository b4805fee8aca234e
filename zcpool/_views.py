"""Array arguments, checked in Python's own integers, which do not overflow."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["Layout", "array_layout"]


class Layout(NamedTuple):
    """Where the elements of an array lie in a buffer.

    Attributes
    ----------
    shape : tuple of int
    dtype : numpy.dtype
        A subarray dtype is taken apart: its dimensions are at the end of `shape`.
    offset : int
        Bytes.
    strides : tuple of int or None
        Bytes; None is C order.
    nbytes : int
        What the elements take in C order.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int
    strides: tuple[int, ...] | None
    nbytes: int

    def check(self, available: int) -> None:
        """Raise ValueError unless every element lies inside `available` bytes."""
        low, high = self._extent()
        if low < 0 or high > available:
            text = f"an array of shape {self.shape} and dtype {self.dtype} at offset {self.offset}"
            if self.strides is not None:
                text += f" with strides {self.strides}"
            needs = f"{high} bytes" if low >= 0 else f"bytes from {low} on"
            raise ValueError(f"{text} needs {needs}; the buffer has {available}")

    def _extent(self) -> tuple[int, int]:
        if 0 in self.shape:
            return self.offset, self.offset
        if self.strides is None:
            return self.offset, self.offset + self.nbytes
        steps = [(n - 1) * stride for n, stride in zip(self.shape, self.strides)]
        low = self.offset + sum(min(0, step) for step in steps)
        return low, self.offset + sum(max(0, step) for step in steps) + self.dtype.itemsize


def array_layout(
    shape: SupportsIndex | Iterable[SupportsIndex],
    dtype: npt.DTypeLike,
    offset: SupportsIndex = 0,
    strides: SupportsIndex | Iterable[SupportsIndex] | None = None,
) -> Layout:
    """Return the layout that array arguments describe.

    Raises
    ------
    ValueError
        For negative dimensions or offsets, strides that do not match the shape, and dtypes that hold objects.
    """
    import numpy as np

    kind = np.dtype(dtype)
    if kind.hasobject:
        raise ValueError(f"dtype {kind} holds Python objects, which cannot live in a pool's memory")
    dims = _integers(shape)
    if any(n < 0 for n in dims):
        raise ValueError(f"negative dimension in shape {dims}")
    start = operator.index(offset)
    if start < 0:
        raise ValueError(f"offset must not be negative, and is {start}")
    steps = None if strides is None else _integers(strides)
    if steps is not None and len(steps) != len(dims):
        raise ValueError(f"{len(steps)} strides {steps} do not go with {len(dims)} dimensions {dims}")
    if steps is not None and any(not -(2**63) <= step < 2**63 for step in steps):
        raise ValueError(f"strides {steps} do not fit 64 bits")
    if kind.subdtype is not None:
        if steps is not None:
            raise ValueError(f"strides do not go with the subarray dtype {kind}: give its dimensions in the shape")
        kind, inner = kind.subdtype
        dims += tuple(inner)
    nbytes = kind.itemsize
    for n in dims:
        nbytes *= n
    return Layout(dims, kind, start, steps, nbytes)


def _integers(value: SupportsIndex | Iterable[SupportsIndex]) -> tuple[int, ...]:
    if isinstance(value, Iterable):
        return tuple(operator.index(n) for n in value)
    return (operator.index(value),)
