"""One LiteRT tensor buffer over pool memory, through the C API of the library inside the wheel."""

from __future__ import annotations

import atexit
import ctypes
import functools
import math
import operator
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

try:
    import ai_edge_litert  # type: ignore[import-untyped, import-not-found, unused-ignore]
    from ai_edge_litert.tensor_buffer import (  # type: ignore[import-untyped, import-not-found, unused-ignore]
        TensorBuffer,
    )
except ImportError as error:
    raise ImportError('zcpool.interop.litert needs ai-edge-litert; run: pip install "zcpool[demo]"') from error

if TYPE_CHECKING:
    from zcpool import Buffer

__all__ = ["ELEMENT_TYPES", "TensorBuffer", "describe", "tensor_buffer", "type_of"]

_ALIGNMENT = 64  # LITERT_HOST_MEMORY_BUFFER_ALIGNMENT
_MAX_RANK = 8  # LITERT_TENSOR_MAX_RANK
_MAX_DIMENSION = 2**31 - 1
# LiteRtElementType, by the name of the numpy dtype (bfloat16 and the float8 types come with ml_dtypes).
ELEMENT_TYPES = {
    "float32": 1,
    "int32": 2,
    "uint8": 3,
    "int64": 4,
    "bool": 6,
    "int16": 7,
    "int8": 9,
    "float16": 10,
    "float64": 11,
    "uint32": 16,
    "uint16": 17,
    "bfloat16": 19,
    "float8_e4m3fn": 22,
    "float8_e5m2": 23,
}


class _Layout(ctypes.Structure):
    _fields_ = (
        ("rank", ctypes.c_uint32, 7),
        ("has_strides", ctypes.c_uint32, 1),
        ("dimensions", ctypes.c_int32 * _MAX_RANK),
        ("strides", ctypes.c_uint32 * _MAX_RANK),
    )


class _RankedTensorType(ctypes.Structure):
    _fields_ = (("element_type", ctypes.c_int32), ("layout", _Layout))


_Deallocator = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def _load() -> tuple[Any, Any]:
    """Return the C functions that wrap host memory in a tensor buffer, and that say of what type one is."""
    name = "libLiteRt.dylib" if sys.platform == "darwin" else "libLiteRt.so"
    path = Path(ai_edge_litert.__file__).with_name(name)
    try:
        # The wheel's Python modules have loaded the same file, so this is the same library and not a second one.
        library = ctypes.CDLL(str(path))
        create, get_type = library.LiteRtCreateTensorBufferFromHostMemory, library.LiteRtGetTensorBufferTensorType
    except (OSError, AttributeError) as error:
        raise ImportError(f"{error}; update to ai-edge-litert 2.1 or newer: pip install -U ai-edge-litert") from error
    create.restype = ctypes.c_int
    create.argtypes = (
        ctypes.POINTER(_RankedTensorType),
        ctypes.c_void_p,
        ctypes.c_size_t,
        _Deallocator,
        ctypes.POINTER(ctypes.c_void_p),
    )
    get_type.restype = ctypes.c_int
    get_type.argtypes = (ctypes.c_void_p, ctypes.POINTER(_RankedTensorType))
    return create, get_type


_create, _get_type = _load()
_capsule_new = ctypes.pythonapi.PyCapsule_New
_capsule_new.restype = ctypes.py_object
_capsule_new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
_CAPSULE_NAME = b"LiteRtTensorBuffer"  # LiteRT keeps the pointer to this name: it must never be collected.


class _Owner:
    """The deallocator of one tensor buffer, and the pin it ends.

    LiteRT passes a deallocator the address and no user data, and one address may carry several tensor buffers, so each
    of them gets a C function of its own. Making one costs more than everything else here: they are used again.
    """

    __slots__ = ("function", "pin")

    def __init__(self) -> None:
        self.pin: Any = None
        self.function = _Deallocator(self._ended)
        # Never collected, not even at exit: LiteRT has its address.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))

    def _ended(self, _address: int | None) -> None:
        # Any thread. Every step is one atomic operation on a built-in, so no lock is needed, and the pin goes last:
        # releasing it may run other code.
        pin, self.pin = self.pin, None
        _idle.append(self)
        pin.release()


_idle: list[_Owner] = []


class _PoolTensorBuffer(TensorBuffer):  # type: ignore[misc, unused-ignore]
    """A tensor buffer that ends with its last reference, as those made by LiteRT do, or with ``destroy()``.

    From the interpreter's exit on nothing ends any more, or LiteRT would call the deallocator, Python code, after
    Python. LiteRT keeps its references then, and the memory goes with the process.
    """

    # Here and not in the module, whose names may be gone when the last objects are collected.
    _exiting = False
    _ending: ClassVar[set[object]] = set()

    def __init__(self, capsule: Any) -> None:
        self._owned = [capsule]
        super().__init__(capsule)

    def destroy(self) -> None:
        """Give LiteRT's reference back and unpin the memory; a second call does nothing."""
        self._capsule = None
        token = object()
        self._ending.add(token)  # before the look at _exiting: one of the two sides sees the other
        try:
            if not self._exiting:
                TensorBuffer(self._owned.pop()).destroy()
        except IndexError:  # somebody was here before
            pass
        finally:
            self._ending.discard(token)

    def __del__(self) -> None:
        self.destroy()

    @classmethod
    def _exit(cls) -> None:
        cls._exiting = True
        # A daemon thread that loses the interpreter inside a deallocator would be unwound through LiteRT, and abort.
        deadline = time.monotonic() + 1
        while cls._ending and time.monotonic() < deadline:
            time.sleep(0.001)


atexit.register(_PoolTensorBuffer._exit)


def tensor_buffer(buf: Buffer, shape: Sequence[int], dtype: npt.DTypeLike, *, offset: int = 0) -> TensorBuffer:
    """Wrap a pool buffer in a LiteRT tensor buffer, without a copy.

    Parameters
    ----------
    buf : Buffer
        The memory. It stays pinned until LiteRT destroys the tensor buffer, so it may be released before.
    shape : sequence of int
        At most eight dimensions.
    dtype : dtype-like
        The element type, of native byte order.
    offset : int, optional
        Where in the buffer the tensor begins, in bytes.

    Returns
    -------
    ai_edge_litert.tensor_buffer.TensorBuffer
        For ``CompiledModel.run_by_index`` and ``run_by_name``. It ends with ``destroy()`` or its last reference.

    Raises
    ------
    TypeError
        If LiteRT has no such element type.
    ValueError
        If the shape, the offset, the size or the alignment does not fit, or the CPU does not see the memory.
    BufferError
        If the buffer is released.
    RuntimeError
        If LiteRT refuses the tensor; of empty ones it takes few, and version 2.1.0 none.
    """
    dims = tuple(map(operator.index, shape))
    tensor_type, nbytes = describe(dims, np.dtype(dtype))
    pin = buf.pin()
    try:
        address, size = _checked_memory(buf, nbytes, offset)
    except BaseException:
        pin.release()
        raise
    return _PoolTensorBuffer(_capsule_new(_wrap(tensor_type, address, size, pin), _CAPSULE_NAME, None))


def _wrap(tensor_type: _RankedTensorType, address: int, size: int, pin: Any) -> ctypes.c_void_p:
    """Make LiteRT's tensor buffer and take over the pin: it ends with the tensor buffer, or with the failure."""
    try:
        owner = _idle.pop()
    except IndexError:
        owner = _Owner()
    owner.pin = pin
    handle = ctypes.c_void_p()
    status = _create(ctypes.byref(tensor_type), address, size, owner.function, ctypes.byref(handle))
    if status:
        # On most failures LiteRT has called the deallocator already, on some it has not: the owner knows.
        if owner.pin is pin:
            owner._ended(None)
        raise RuntimeError(f"LiteRT refused {size} bytes at {address:#x} as a tensor buffer (LiteRtStatus {status})")
    return handle


@functools.lru_cache(maxsize=256)  # LiteRT only reads it, so tensors of one kind share it
def describe(dims: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[_RankedTensorType, int]:
    """Return LiteRT's description of a tensor and its size in bytes."""
    element_type = ELEMENT_TYPES.get(dtype.name)
    if element_type is None or not dtype.isnative:
        raise TypeError(f"LiteRT has no element type for dtype {dtype.str!r}; use one of {', '.join(ELEMENT_TYPES)}")
    if len(dims) > _MAX_RANK:
        raise ValueError(f"shape {dims} has {len(dims)} dimensions and LiteRT takes {_MAX_RANK}; merge some of them")
    if not all(0 <= dim <= _MAX_DIMENSION for dim in dims):
        raise ValueError(
            f"shape {dims} must have dimensions of 0 to {_MAX_DIMENSION}; resize the model's dynamic ones first"
        )
    layout = _Layout(len(dims), 0, (ctypes.c_int32 * _MAX_RANK)(*dims))
    return _RankedTensorType(element_type, layout), math.prod(dims) * dtype.itemsize


def type_of(tensor: TensorBuffer) -> tuple[tuple[int, ...], int]:
    """Return the shape and the LiteRtElementType of any tensor buffer; its own methods tell only in newer wheels."""
    tensor_type = _RankedTensorType()  # if LiteRT did not fill it, the element type would stay 0, which is none
    _get_type(_capsule_pointer(tensor.capsule, _CAPSULE_NAME), ctypes.byref(tensor_type))
    layout = tensor_type.layout
    return tuple(layout.dimensions[: layout.rank]), tensor_type.element_type


def _checked_memory(buf: Buffer, nbytes: int, offset: int) -> tuple[int, int]:
    """Return address and size of the buffer from the offset on, if LiteRT will take them."""
    needed = max(nbytes, 1)  # LiteRT refuses a null pointer even for an empty tensor
    if not 0 <= offset <= buf.nbytes - needed:
        raise ValueError(
            f"the tensor needs {needed} bytes at offset {offset} and the buffer has {buf.nbytes}; "
            f"acquire at least {max(offset, 0) + needed} and use an offset of 0 or more"
        )
    if not buf.address:
        raise ValueError("LiteRT needs memory the CPU sees, and this buffer has no address; use a host backend")
    address = buf.address + offset
    if address % _ALIGNMENT:
        raise ValueError(
            f"LiteRT needs memory aligned to {_ALIGNMENT} bytes and {address:#x} is {address % _ALIGNMENT} past that; "
            f"acquire with alignment={_ALIGNMENT} and use offsets that are multiples of {_ALIGNMENT}"
        )
    return address, buf.nbytes - offset
