"""LiteRT over pool memory: zero-copy both ways, and pinned exactly as long as LiteRT can reach it."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import zcpool

pytest.importorskip("ai_edge_litert", "2.1", reason='the extra "demo" is not installed')

from ai_edge_litert.compiled_model import CompiledModel  # type: ignore[import-untyped, unused-ignore]
from litert_models import SHAPE, add_model

from zcpool.interop import _litert_buffer, litert

NBYTES = 4 * 48  # of SHAPE


@pytest.fixture
def pool() -> Iterator[zcpool.Pool]:
    """Yield a pool, and check that everything has gone home at the end."""
    with zcpool.Pool() as pool:
        yield pool
        gc.collect()
        assert held(pool) == 0


@pytest.fixture
def signature(pool: zcpool.Pool) -> litert.Signature:
    return litert.Signature(CompiledModel.from_buffer(add_model()), pool)


def held(pool: zcpool.Pool) -> int:
    """Return the bytes that are not free to be handed out: in use, or released but pinned or exported."""
    stats = pool.stats()
    return stats.in_use_bytes + stats.retired_bytes


# One tensor buffer


@pytest.mark.parametrize(
    "dtype", ["float32", "int32", "uint8", "int64", "bool", "int16", "int8", "float16", "float64", "uint32", "uint16"]
)
def test_every_dtype_reaches_litert_with_its_shape(pool: zcpool.Pool, dtype: str) -> None:
    with pool.acquire(1024) as buf:
        tensor = litert.tensor_buffer(buf, (2, 3, 5), dtype)
        assert _litert_buffer.type_of(tensor) == ((2, 3, 5), _litert_buffer.ELEMENT_TYPES[dtype])
        tensor.destroy()


@pytest.mark.parametrize("shape", [(), (1,), (2, 1, 2, 1, 2, 1, 2, 1)])
def test_every_rank_from_0_to_8_is_taken(pool: zcpool.Pool, shape: tuple[int, ...]) -> None:
    with pool.acquire(64) as buf:
        tensor = litert.tensor_buffer(buf, shape, np.float32)
        assert _litert_buffer.type_of(tensor)[0] == shape
        tensor.destroy()


def test_an_empty_tensor_is_up_to_litert_and_pins_nothing_for_ever(pool: zcpool.Pool) -> None:
    buf = pool.acquire(64)
    with contextlib.suppress(RuntimeError):  # 2.1.0 takes none
        litert.tensor_buffer(buf, (0,), np.float32).destroy()
    buf.release()
    assert held(pool) == 0


def test_litert_and_the_view_share_the_memory(pool: zcpool.Pool) -> None:
    with pool.acquire(4096) as buf:
        view = buf.array((3,), np.float32, offset=1024)
        tensor = litert.tensor_buffer(buf, (3,), np.float32, offset=1024)
        tensor.write(np.array([1, 2, 3], np.float32))
        assert view.tolist() == [1, 2, 3]
        view[1] = 7
        assert tensor.read(3, np.float32).tolist() == [1, 7, 3]
        tensor.destroy()
        del view


def test_released_buffer_stays_pinned_until_destroy(pool: zcpool.Pool) -> None:
    buf = pool.acquire(NBYTES)
    tensor = litert.tensor_buffer(buf, SHAPE, np.float32)
    buf.release()
    assert held(pool) > 0
    tensor.destroy()
    assert held(pool) == 0


def test_dropping_the_last_reference_destroys(pool: zcpool.Pool) -> None:
    buf = pool.acquire(NBYTES)
    tensor = litert.tensor_buffer(buf, SHAPE, np.float32)
    buf.release()
    del tensor
    gc.collect()
    assert held(pool) == 0


def test_each_tensor_over_one_address_has_its_own_pin(pool: zcpool.Pool) -> None:
    buf = pool.acquire(NBYTES)
    first, second = (litert.tensor_buffer(buf, SHAPE, np.float32) for _ in range(2))
    buf.release()
    first.destroy()
    assert held(pool) > 0
    second.destroy()
    assert held(pool) == 0


def test_a_second_destroy_does_nothing(pool: zcpool.Pool) -> None:
    buf = pool.acquire(NBYTES)
    first, second = (litert.tensor_buffer(buf, SHAPE, np.float32) for _ in range(2))
    buf.release()
    first.destroy()
    first.destroy()
    assert held(pool) > 0
    with pytest.raises(ValueError, match="destroyed"):
        _ = first.capsule
    second.destroy()


def test_a_capsule_that_outlives_its_tensor_is_refused_and_not_followed(pool: zcpool.Pool) -> None:
    with pool.acquire(NBYTES) as buf:
        capsule = litert.tensor_buffer(buf, SHAPE, np.float32).capsule
    gc.collect()
    with pytest.raises(RuntimeError, match="null pointer"):
        _litert_buffer.TensorBuffer(capsule).read(1, np.float32)


def test_threads_may_create_and_destroy_over_one_buffer(pool: zcpool.Pool) -> None:
    buf = pool.acquire(NBYTES)
    keep = litert.tensor_buffer(buf, SHAPE, np.float32)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(300):
                tensors = [litert.tensor_buffer(buf, SHAPE, np.float32) for _ in range(3)]
                tensors.pop().destroy()
                tensors.pop().destroy()
                # the third ends with the list
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    buf.release()
    assert held(pool) > 0
    keep.destroy()
    assert held(pool) == 0


def test_deallocators_are_used_again(pool: zcpool.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    with pool.acquire(NBYTES) as buf:
        litert.tensor_buffer(buf, SHAPE, np.float32).destroy()
        monkeypatch.delattr(_litert_buffer, "_Owner")  # no new one can be made from here on
        for _ in range(50):
            litert.tensor_buffer(buf, SHAPE, np.float32).destroy()


# What is refused


@pytest.mark.parametrize(
    ("shape", "dtype", "offset", "error", "message"),
    [
        ((17,), "float32", 0, ValueError, "needs 68 bytes at offset 0 and the buffer has 64; acquire at least 68"),
        ((16,), "float32", 64, ValueError, "needs 64 bytes at offset 64 .* acquire at least 128"),
        ((1,), "uint8", -64, ValueError, "offset of 0 or more"),
        ((0,), "uint8", 64, ValueError, "needs 1 bytes at offset 64"),
        ((1,), "uint8", 4, ValueError, r"aligned to 64 bytes and 0x[0-9a-f]+ is 4 past .* alignment=64"),
        ((1,) * 9, "uint8", 0, ValueError, "has 9 dimensions and LiteRT takes 8; merge"),
        ((-1, 3), "uint8", 0, ValueError, r"shape \(-1, 3\) must have dimensions of 0 to 2147483647; resize"),
        ((2**31,), "uint8", 0, ValueError, "dimensions of 0 to 2147483647"),
        ((2**30, 2**30, 2**30), "float64", 0, ValueError, f"needs {2**93} bytes"),
        ((1,), "complex64", 0, TypeError, "no element type for dtype '<c8'; use one of float32, int32"),
        ((1,), ">f4", 0, TypeError, "no element type for dtype '>f4'"),
        ((1.5,), "uint8", 0, TypeError, "integer"),
    ],
)
def test_what_litert_would_refuse_is_refused_before(
    pool: zcpool.Pool, shape: Any, dtype: str, offset: int, error: type[Exception], message: str
) -> None:
    buf = pool.acquire(64)
    with pytest.raises(error, match=message):
        litert.tensor_buffer(buf, shape, dtype, offset=offset)
    buf.release()
    assert held(pool) == 0  # no pin was left behind


def test_a_released_buffer_is_refused(pool: zcpool.Pool) -> None:
    buf = pool.acquire(64)
    buf.release()
    with pytest.raises(BufferError, match="released"):
        litert.tensor_buffer(buf, (1,), np.uint8)


def test_memory_the_cpu_does_not_see_is_refused() -> None:
    class DeviceBuffer:
        nbytes, address, pinned = 64, 0, 0

        def pin(self) -> DeviceBuffer:
            self.pinned += 1
            return self

        def release(self) -> None:
            self.pinned -= 1

    buf = DeviceBuffer()
    with pytest.raises(ValueError, match="memory the CPU sees"):
        litert.tensor_buffer(buf, (1,), np.uint8)  # type: ignore[arg-type]
    assert buf.pinned == 0


@pytest.mark.parametrize("address", [0, 4], ids=["before the deallocator is called", "after it was called"])
def test_a_refusal_by_litert_ends_the_pin_once(address: int) -> None:
    class Pin:
        released = 0

        def release(self) -> None:
            self.released += 1

    pin = Pin()
    tensor_type, nbytes = _litert_buffer.describe((1,), np.dtype(np.uint8))
    with pytest.raises(RuntimeError, match=r"LiteRT refused 1 bytes at 0x[04] as a tensor buffer \(LiteRtStatus"):
        _litert_buffer._wrap(tensor_type, address, nbytes, pin)
    assert pin.released == 1


# A model's inputs and outputs


def test_signature_says_what_the_model_says(signature: litert.Signature) -> None:
    assert [spec.name for spec in signature.inputs] == ["left", "right"]
    assert [spec.name for spec in signature.outputs] == ["sum"]
    for spec in signature.inputs + signature.outputs:
        assert spec.shape == SHAPE
        assert spec.dtype == np.float32
        assert spec.nbytes >= NBYTES + 16  # XNNPACK reads ahead


def test_each_name_comes_with_its_own_shape(pool: zcpool.Pool) -> None:
    signature = litert.Signature(CompiledModel.from_buffer(add_model(right=(1, 1, 1, 3))), pool)
    assert [(spec.name, spec.shape) for spec in signature.inputs] == [("left", SHAPE), ("right", (1, 1, 1, 3))]
    with signature.bind() as io:
        io.inputs["left"][...] = 1
        io.inputs["right"][...] = [10, 20, 30]
        io.run()
        assert io.outputs["sum"].reshape(16, 3).tolist() == [[11, 21, 31]] * 16


def test_a_type_without_a_name_in_numpy_is_refused(
    signature: litert.Signature, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(litert._DTYPES, 1)
    with pytest.raises(TypeError, match="tensor 'left' is of LiteRtElementType 1, which numpy has no name for"):
        litert.Signature(signature.model, signature.pool)


def test_the_engine_reads_and_writes_pool_memory(signature: litert.Signature) -> None:
    copied = zcpool.copies().bytes
    for number in range(20):
        with signature.bind() as io:
            io.inputs["left"][...] = number
            io.inputs["right"][...] = np.arange(48, dtype=np.float32).reshape(SHAPE)
            io.outputs["sum"][...] = np.nan
            io.run()
            np.testing.assert_array_equal(io.outputs["sum"].ravel(), np.arange(48, dtype=np.float32) + number)
    assert zcpool.copies().bytes == copied


def test_a_steady_loop_makes_no_backend_calls(signature: litert.Signature) -> None:
    def frame() -> None:
        with signature.bind() as io:
            io.run()

    frame()
    before = signature.pool.stats()
    for _ in range(50):
        frame()
    after = signature.pool.stats()
    assert after.backend_allocations == before.backend_allocations
    assert after.backend_frees == before.backend_frees
    assert after.acquires == before.acquires + 150


def test_buffers_of_the_caller_are_bound_with_what_they_hold(signature: litert.Signature) -> None:
    left, right, result = buffers = signature.acquire()
    left.array(SHAPE, np.float32)[...] = 2
    right.array(SHAPE, np.float32)[...] = 3
    with signature.bind(buffers) as io:
        io.run()
    assert result.array(SHAPE, np.float32).ravel().tolist() == [5] * 48
    for buf in buffers:
        assert not buf.released
        buf.release()


def test_a_kept_view_stays_valid_after_release(signature: litert.Signature) -> None:
    with signature.bind() as io:
        for view in io.inputs.values():
            view[...] = 1
        io.run()
        kept = io.outputs["sum"]
    with signature.bind() as other:  # would get the same block if the view did not hold it
        other.outputs["sum"][...] = np.nan
    assert kept.ravel().tolist() == [2] * 48


def test_released_bindings_refuse_to_run(signature: litert.Signature) -> None:
    io = signature.bind()
    io.release()
    io.release()
    with pytest.raises(ValueError, match="released; bind"):
        io.run()


def test_a_wrong_number_of_buffers_is_refused(signature: litert.Signature) -> None:
    with pytest.raises(ValueError, match="3 inputs and outputs and got 2 buffers"):
        signature.bind(signature.acquire()[:2])


def test_a_buffer_too_small_releases_what_was_bound(signature: litert.Signature) -> None:
    buffers = signature.acquire()
    buffers[2] = signature.pool.acquire(64)
    with pytest.raises(ValueError, match="needs 192 bytes at offset 0 and the buffer has 64"):
        signature.bind(buffers)


def test_an_unknown_signature_is_refused(signature: litert.Signature) -> None:
    with pytest.raises(ValueError, match="signature 1 does not exist; the model has 1"):
        litert.Signature(signature.model, signature.pool, 1)


# The process


def in_a_process_of_its_own(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("ending", ["", "del model, signature.model", "sys.exit(0)"])
def test_exit_with_live_tensor_buffers_is_clean(ending: str, tmp_path: Any) -> None:
    path = tmp_path / "add.tflite"
    path.write_bytes(add_model())
    done = in_a_process_of_its_own(f"""
        import atexit, sys, threading, time
        import numpy as np, zcpool
        from ai_edge_litert.compiled_model import CompiledModel

        late = []
        atexit.register(lambda: late[0]())  # registered first, so it runs after every other handler

        from zcpool.interop import litert

        pool = zcpool.Pool()
        model = CompiledModel.from_file({str(path)!r})
        signature = litert.Signature(model, pool)
        io = signature.bind()
        io.run()
        buf = pool.acquire(1024)
        first = litert.tensor_buffer(buf, (4,), np.float32)
        second = litert.tensor_buffer(buf, (4,), np.float32)
        buf.release()
        cycle = [litert.tensor_buffer(pool.acquire(64), (4,), np.float32)]
        cycle.append(cycle)
        dropped = litert.tensor_buffer(pool.acquire(64), (4,), np.float32)
        del dropped

        def churn():
            while True:
                with pool.acquire(256) as buf:
                    litert.tensor_buffer(buf, (4,), np.float32).destroy()
                    litert.tensor_buffer(buf, (4,), np.float32)

        def at_the_very_end():
            second.destroy()
            held = litert.tensor_buffer(pool.acquire(64), (4,), np.float32)
            held.write(np.ones(4, np.float32))
            sys.stdout.write("clean")

        late.append(at_the_very_end)
        threading.Thread(target=churn, daemon=True).start()
        time.sleep(0.1)
        {ending}
    """)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "clean"
    for sign in ("Traceback", "Exception ignored", "Fatal", "Error in"):
        assert sign not in done.stderr, done.stderr


def test_without_the_engine_the_import_names_the_extra() -> None:
    done = in_a_process_of_its_own("""
        import sys
        sys.modules["ai_edge_litert"] = None
        import zcpool.interop
        assert "zcpool.interop.litert" not in sys.modules
        try:
            import zcpool.interop.litert
        except ImportError as error:
            print(error)
    """)
    assert done.returncode == 0, done.stderr
    assert 'pip install "zcpool[demo]"' in done.stdout
