"""Small models for the tests of the LiteRT adapter."""

from __future__ import annotations

import functools
from typing import Any

import flatbuffers  # type: ignore[import-untyped, unused-ignore]
from ai_edge_litert import schema_py_generated as schema  # type: ignore[import-untyped, unused-ignore]

SHAPE = (1, 4, 4, 3)


@functools.cache
def add_model(right: tuple[int, ...] = SHAPE) -> bytes:
    """Return a model of one ADD: "sum" = "left" + "right", float32 of SHAPE; "right" may be of one to broadcast."""

    def tensor(name: str, shape: tuple[int, ...] = SHAPE) -> Any:
        made = schema.TensorT()
        made.name, made.shape, made.type = name, list(shape), schema.TensorType.FLOAT32
        return made

    operator = schema.OperatorT()
    operator.inputs, operator.outputs = [0, 1], [2]
    operator.builtinOptionsType = schema.BuiltinOptions.AddOptions
    operator.builtinOptions = schema.AddOptionsT()
    graph = schema.SubGraphT()
    graph.tensors = [tensor("left"), tensor("right", right), tensor("sum")]
    graph.inputs, graph.outputs, graph.operators = [0, 1], [2], [operator]
    code = schema.OperatorCodeT()
    code.builtinCode = code.deprecatedBuiltinCode = schema.BuiltinOperator.ADD
    model = schema.ModelT()
    model.version, model.subgraphs, model.operatorCodes, model.buffers = 3, [graph], [code], [schema.BufferT()]
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), file_identifier=b"TFL3")
    return bytes(builder.Output())
