"""A camera loop that has settled: no call of the backend, nothing held that was not held before.

Each frame takes a 1080p NV12 picture and a model's input and output. These are tests as much as benchmarks: they fail
when the loop calls the backend, or when fds, mappings or resident memory grow.
"""

from __future__ import annotations

import contextlib
import mmap
import queue
import threading
from collections.abc import Iterator
from typing import Any, Callable

import numpy
import pytest
from machine import holdings

import zcpool

FRAME = (1920 * 1080 * 3 // 2, 1 * 128 * 128 * 3 * 4, 1 * 896 * 16 * 4)  # NV12; float32 tensors in and out
FRAMES = 500  # in a round
ROUNDS = 40
AHEAD = 4  # frames on their way from one thread to the other
SLACK = 2 << 20  # bytes the interpreter and the benchmark itself may need meanwhile

Make = Callable[[int], Any]


@contextlib.contextmanager
def nothing_new(pool: zcpool.Pool) -> Iterator[None]:
    """Fail when what runs inside calls the backend, or leaves the process holding more than before."""
    books, held = pool.stats(), holdings()
    yield
    after, holds = pool.stats(), holdings()
    assert after.backend_allocations == books.backend_allocations, "the loop called the backend for memory"
    assert after.backend_frees == books.backend_frees, "the loop gave memory back"
    assert (after.reserved_bytes, after.handles) == (books.reserved_bytes, books.handles)
    assert after.in_use_blocks == books.in_use_blocks
    if held:
        assert holds["fds"] == held["fds"]
        assert holds["mappings"] <= held["mappings"] + 2  # an arena of the interpreter's own
        assert holds["resident_bytes"] <= held["resident_bytes"] + SLACK


def touch(memory: Any) -> None:
    numpy.frombuffer(memory, "u1")[:: mmap.PAGESIZE] = 1


def plain_loop(make: Make) -> None:
    for _ in range(FRAMES):
        picture, source, result = map(make, FRAME)
        del picture, source, result


def touching_loop(make: Make) -> None:
    for _ in range(FRAMES // 10):
        picture, source, result = map(make, FRAME)
        for memory in (picture, source, result):
            touch(memory)
        del picture, source, result, memory


def numpy_bytes(n: int) -> numpy.ndarray:
    return numpy.empty(n, "u1")


def settle(benchmark: Any, pool: zcpool.Pool, loop: Callable[[], None]) -> None:
    """Let the loop run until it has settled, then measure it."""
    for _ in range(5):
        loop()
    with nothing_new(pool):
        benchmark.pedantic(loop, rounds=ROUNDS)


@pytest.mark.benchmark(group=f"{FRAMES} frames")
def test_frames(benchmark: Any, pool: zcpool.Pool) -> None:
    settle(benchmark, pool, lambda: plain_loop(pool.acquire))


@pytest.mark.benchmark(group=f"{FRAMES} frames")
def test_frames_numpy(benchmark: Any) -> None:
    benchmark.pedantic(plain_loop, (numpy_bytes,), rounds=ROUNDS, warmup_rounds=2)


@pytest.mark.benchmark(group=f"{FRAMES // 10} frames, pages touched")
def test_touched_frames(benchmark: Any, pool: zcpool.Pool) -> None:
    settle(benchmark, pool, lambda: touching_loop(pool.acquire))


@pytest.mark.benchmark(group=f"{FRAMES // 10} frames, pages touched")
def test_touched_frames_numpy(benchmark: Any) -> None:
    benchmark.pedantic(touching_loop, (numpy_bytes,), rounds=ROUNDS, warmup_rounds=2)


class Consumer:
    """A thread that drops the frames it is given."""

    def __enter__(self) -> Consumer:
        self.frames: queue.Queue[Any] = queue.Queue(AHEAD)
        self.done: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, kind: object, error: object, traceback: object, /) -> None:
        self.frames.put(StopIteration)
        self.thread.join(60)
        assert not self.thread.is_alive(), "the consumer hangs"

    def run(self) -> None:
        frame: Any
        while (frame := self.frames.get()) is not StopIteration:
            if frame is None:
                self.done.put(None)
            del frame

    def hand_over(self, make: Make) -> None:
        """Make frames here and drop them there; return when all are dropped."""
        for _ in range(FRAMES):
            self.frames.put(tuple(map(make, FRAME)))
        self.frames.put(None)
        self.done.get()


@pytest.mark.benchmark(group=f"{FRAMES} frames from thread to thread")
def test_hand_over(benchmark: Any, pool: zcpool.Pool) -> None:
    for nbytes in FRAME:
        pool.reserve(nbytes, AHEAD + 2)  # one in either hand
    with Consumer() as consumer:
        settle(benchmark, pool, lambda: consumer.hand_over(pool.acquire))


@pytest.mark.benchmark(group=f"{FRAMES} frames from thread to thread")
def test_hand_over_numpy(benchmark: Any) -> None:
    with Consumer() as consumer:
        benchmark.pedantic(consumer.hand_over, (numpy_bytes,), rounds=ROUNDS, warmup_rounds=2)
