"""LiteRT over pool memory: tensors that the engine reads and writes where they already are.

The wheel ``ai-edge-litert`` can wrap host memory, but its own Python call makes every tensor one-dimensional, which a
model refuses as an input. This module makes the same tensor with its real shape, through the C API of the library
inside that wheel, and keeps the memory pinned until LiteRT has destroyed the tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from zcpool.interop._litert_buffer import ELEMENT_TYPES, TensorBuffer, describe, tensor_buffer, type_of

if TYPE_CHECKING:
    from types import TracebackType

    from ai_edge_litert.compiled_model import (  # type: ignore[import-untyped, import-not-found, unused-ignore]
        CompiledModel,
    )

    from zcpool import Buffer, Pool

__all__ = ["Bound", "Signature", "TensorSpec", "tensor_buffer"]

# XNNPACK may read this far past the end of an input; what it reads there does not matter, but it must be readable.
_READ_AHEAD = 16
_DTYPES = {number: name for name, number in ELEMENT_TYPES.items()}


class TensorSpec(NamedTuple):
    """What a model says of one input or output, and the bytes to acquire for it."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    nbytes: int

    @classmethod
    def _of(cls, name: str, tensor: TensorBuffer, required: dict[str, Any]) -> TensorSpec:
        shape, element_type = type_of(tensor)
        if element_type not in _DTYPES:
            raise TypeError(f"tensor {name!r} is of LiteRtElementType {element_type}, which numpy has no name for")
        dtype = np.dtype(_DTYPES[element_type])
        return cls(name, shape, dtype, max(describe(shape, dtype)[1], required["buffer_size"]) + _READ_AHEAD)


class Signature:
    """Bind the inputs and outputs of a compiled model to pool memory.

    Parameters
    ----------
    model : ai_edge_litert.compiled_model.CompiledModel
        A model compiled for the CPU, or for any accelerator that takes host memory.
    pool : Pool
        Where the memory comes from.
    index : int, optional
        The model's signature.

    Attributes
    ----------
    inputs, outputs : tuple of TensorSpec
        Name, shape, dtype and size, in the order LiteRT expects. They are read once: after a resize of the model, make
        a new signature.

    Examples
    --------
    >>> detect = Signature(CompiledModel.from_file("model.tflite"), pool)  # doctest: +SKIP
    >>> with detect.bind() as io:  # doctest: +SKIP
    ...     io.inputs["image"][...] = frame
    ...     io.run()
    ...     best = io.outputs["scores"].argmax()
    """

    def __init__(self, model: CompiledModel, pool: Pool, index: int = 0) -> None:
        count = model.get_num_signatures()
        if not 0 <= index < count:
            raise ValueError(f"signature {index} does not exist; the model has {count}, counted from 0")
        self.model = model
        self.pool = pool
        self.index = index
        names = model.get_signature_by_index(index)
        # The tensors LiteRT would make itself, dropped at once: they know their types, a model only in newer wheels.
        self.inputs = tuple(
            TensorSpec._of(name, tensor, model.get_input_buffer_requirements(i, index))
            for i, (name, tensor) in enumerate(zip(names["inputs"], model.create_input_buffers(index)))
        )
        self.outputs = tuple(
            TensorSpec._of(name, tensor, model.get_output_buffer_requirements(i, index))
            for i, (name, tensor) in enumerate(zip(names["outputs"], model.create_output_buffers(index)))
        )

    def acquire(self) -> list[Buffer]:
        """Acquire a block for every input and every output.

        Returns
        -------
        list of Buffer
            Inputs first.
        """
        return [self.pool.acquire(spec.nbytes) for spec in self.inputs + self.outputs]

    def bind(self, buffers: Sequence[Buffer] | None = None) -> Bound:
        """Wrap one block for every input and output, ready to run.

        Parameters
        ----------
        buffers : sequence of Buffer, optional
            Blocks the caller has acquired, and releases, inputs first: an input may be filled already. Without them,
            the blocks come from the pool and go back when the result is released.

        Returns
        -------
        Bound
            Use it as a context manager. Binding anew for each frame is the intended use: it costs microseconds.
        """
        if buffers is not None:
            return Bound(self, buffers)
        buffers = self.acquire()
        try:
            return Bound(self, buffers)
        finally:
            for buf in buffers:  # the views and pins hold the blocks, which go home with the last of them
                buf.release()


class Bound:
    """The inputs and outputs of one run, in memory of the pool; made by :meth:`Signature.bind`.

    Attributes
    ----------
    inputs, outputs : dict of str to ndarray
        Views of the very memory LiteRT reads and writes. A view that is kept stays valid after :meth:`release`; its
        block goes back to the pool when the view is gone.
    input_buffers, output_buffers : list of TensorBuffer
        The same memory, for ``run_by_index``.
    """

    def __init__(self, signature: Signature, buffers: Sequence[Buffer]) -> None:
        self._signature = signature
        self.inputs: dict[str, npt.NDArray[Any]] = {}
        self.outputs: dict[str, npt.NDArray[Any]] = {}
        self.input_buffers: list[TensorBuffer] = []
        self.output_buffers: list[TensorBuffer] = []
        count, expected = len(signature.inputs), len(signature.inputs) + len(signature.outputs)
        if len(buffers) != expected:
            raise ValueError(f"the signature has {expected} inputs and outputs and got {len(buffers)} buffers")
        try:
            self._wrap(signature.inputs, buffers[:count], self.inputs, self.input_buffers)
            self._wrap(signature.outputs, buffers[count:], self.outputs, self.output_buffers)
        except BaseException:
            self.release()
            raise

    @staticmethod
    def _wrap(
        specs: Sequence[TensorSpec],
        buffers: Sequence[Buffer],
        views: dict[str, npt.NDArray[Any]],
        tensors: list[TensorBuffer],
    ) -> None:
        for spec, buf in zip(specs, buffers):
            tensors.append(tensor_buffer(buf, spec.shape, spec.dtype))
            views[spec.name] = buf.array(spec.shape, spec.dtype)

    def run(self) -> None:
        """Run the model on the inputs and fill the outputs."""
        if not self.output_buffers:
            raise ValueError("these inputs and outputs are released; bind() the signature again")
        self._signature.model.run_by_index(self._signature.index, self.input_buffers, self.output_buffers)

    def release(self) -> None:
        """Drop the views and LiteRT's tensor buffers; a second call does nothing."""
        for tensors in (self.input_buffers, self.output_buffers):
            while tensors:
                tensors.pop().destroy()
        self.inputs = {}
        self.outputs = {}

    def __enter__(self) -> Bound:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
