"""What memory costs from Python: the pool's ways beside what one would take without it, size by size.

A round runs a statement many times in a compiled loop (see loops.py). The name of a group says how many times: with
1000 statements, the microseconds in the table are nanoseconds for each. Where pages are touched, one byte of each is
written, as whoever fills the memory does: memory that went back to the system is faulted in and cleared again.
"""

from __future__ import annotations

import mmap
from typing import Any, Callable

import numpy
import pytest

import zcpool

Measure = Callable[..., None]

SIZES = {"256 B": 256, "64 KiB": 64 << 10, "1 MiB": 1 << 20, "8 MiB": 8 << 20, "64 MiB": 64 << 20}
PAGE = mmap.PAGESIZE


def sized(largest: str = "64 MiB", smallest: str = "256 B") -> pytest.MarkDecorator:
    """Parametrize over the sizes, which are groups."""
    low, high = SIZES[smallest], SIZES[largest]
    return pytest.mark.parametrize("size", [name for name, nbytes in SIZES.items() if low <= nbytes <= high])


@pytest.fixture
def n(size: str) -> int:
    """Bytes."""
    return SIZES[size]


@pytest.fixture
def number(request: pytest.FixtureRequest, benchmark: Any, size: str, n: int) -> int:
    """How many statements a round runs; the same for all of a group."""
    touched = "touched" in request.node.name
    number = max(1, (64 << 20) // n) if touched else 1000 if n < 1 << 20 else 100
    benchmark.group = f"{size}{', pages touched' if touched else ''}, {number} statement(s)"
    return number


def touch(memory: Any) -> None:
    """Write one byte of each page."""
    numpy.frombuffer(memory, "u1")[::PAGE] = 1


# ---- making and dropping ---------------------------------------------------------------------------------------


@sized()
def test_object(measure: Measure, size: str, number: int) -> None:
    measure("object()", number)


@sized()
def test_acquire_drop(measure: Measure, pool: zcpool.Pool, n: int, number: int) -> None:
    measure("pool.acquire(n)", number, pool=pool, n=n)


@sized()
def test_acquire_release(measure: Measure, pool: zcpool.Pool, n: int, number: int) -> None:
    measure("buf = pool.acquire(n)\nbuf.release()", number, pool=pool, n=n)


@sized()
def test_acquire_with(measure: Measure, pool: zcpool.Pool, n: int, number: int) -> None:
    measure("with pool.acquire(n):\n    pass", number, pool=pool, n=n)


@sized()
def test_fixed_pool(measure: Measure, backend: dict[str, Any], n: int, number: int) -> None:
    with zcpool.FixedPool(n, 2, **backend) as pool:
        measure("pool.acquire()", number, pool=pool)


@sized()
def test_array(measure: Measure, pool: zcpool.Pool, n: int, number: int) -> None:
    measure("pool.array(n)", number, pool=pool, n=n)


@sized()
def test_numpy_empty(measure: Measure, n: int, number: int) -> None:
    measure("numpy.empty(n, 'u1')", number, numpy=numpy, n=n)


@sized(largest="1 MiB")  # it is cleared
def test_bytearray(measure: Measure, n: int, number: int) -> None:
    measure("bytearray(n)", number, n=n)


@sized()
def test_pyarrow(measure: Measure, n: int, number: int) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    measure("allocate_buffer(n)", number, allocate_buffer=pyarrow.allocate_buffer, n=n)


def shared_memory(n: int) -> Callable[[], None]:
    """Return a function that makes a segment and removes it."""
    from multiprocessing.shared_memory import SharedMemory

    def make_and_remove(use: Callable[[Any], None] = lambda memory: None) -> None:
        memory = SharedMemory(create=True, size=n)
        use(memory.buf)
        memory.close()
        memory.unlink()

    return make_and_remove


@sized(smallest="1 MiB")  # four system calls, whatever the size
def test_shared_memory(measure: Measure, n: int, number: int) -> None:
    measure("make_and_remove()", number, make_and_remove=shared_memory(n))


# ---- and writing to every page ---------------------------------------------------------------------------------


@sized(smallest="1 MiB")
def test_touched_acquire(measure: Measure, pool: zcpool.Pool, n: int, number: int) -> None:
    measure("touch(pool.acquire(n))", number, touch=touch, pool=pool, n=n)


@sized(smallest="1 MiB")
def test_touched_numpy_empty(measure: Measure, n: int, number: int) -> None:
    measure("touch(numpy.empty(n, 'u1'))", number, touch=touch, numpy=numpy, n=n)


@sized(smallest="1 MiB")
def test_touched_bytearray(measure: Measure, n: int, number: int) -> None:
    measure("touch(bytearray(n))", number, touch=touch, n=n)


@sized(smallest="1 MiB")
def test_touched_pyarrow(measure: Measure, n: int, number: int) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    measure("touch(allocate_buffer(n))", number, touch=touch, allocate_buffer=pyarrow.allocate_buffer, n=n)


@sized(smallest="1 MiB")
def test_touched_shared_memory(measure: Measure, n: int, number: int) -> None:
    measure("make_and_remove(touch)", number, make_and_remove=shared_memory(n), touch=touch)


# ---- the first of its size -------------------------------------------------------------------------------------


@sized()
def test_first_acquire(benchmark: Any, backend: dict[str, Any], size: str, n: int) -> None:
    benchmark.group = f"{size}, the first after creation"

    def setup() -> tuple[tuple[int], dict[str, Any]]:
        nonlocal pool
        pool = zcpool.Pool(**backend)
        return (n,), {}

    def first(n: int) -> zcpool.Buffer:
        return pool.acquire(n)

    pool = zcpool.Pool(**backend)
    benchmark.pedantic(first, setup=setup, rounds=200)


@sized()
def test_first_mmap(benchmark: Any, size: str, n: int) -> None:
    benchmark.group = f"{size}, the first after creation"
    benchmark.pedantic(mmap.mmap, args=(-1, n), rounds=200)
