"""Limits: reached exactly, worked against before they are raised, waited for, and explained."""

from __future__ import annotations

import itertools
import mmap
import os
import pickle
import queue
import signal
import threading
import time
from typing import Any

import pytest
from doubles.memory import CountingBackend
from helpers import MakePool, Signal, Workers, eventually

import zcpool

KIB, MIB = 1 << 10, 1 << 20
pytestmark = pytest.mark.watchdog(60)

# The limit in bytes


def fill(pool: zcpool.Pool, *sizes: int) -> list[zcpool.Buffer]:
    """Acquire the sizes in turn until the pool refuses one."""
    held = []
    try:
        for nbytes in itertools.cycle(sizes):
            held.append(pool.acquire(nbytes))
    except zcpool.OutOfMemory:
        pass
    return held


@pytest.mark.parametrize("count", [1, 2, 7, 16])
@pytest.mark.parametrize("nbytes", [100, 4 * KIB, 64 * KIB, 448 * KIB, MIB, 5 * MIB, 20 * MIB])
def test_the_limit_is_reached_exactly_with_equal_blocks(
    make_pool: MakePool, backend_name: str, nbytes: int, count: int
) -> None:
    with zcpool.Pool(backend_name) as other:
        capacity = other.acquire(nbytes).capacity
    pool = make_pool(max_bytes=count * capacity)
    held = [pool.acquire(nbytes) for _ in range(count)]
    assert pool.stats().reserved_bytes == count * capacity
    with pytest.raises(zcpool.OutOfMemory):
        pool.acquire(1)
    del held


@pytest.mark.parametrize("limit", [256 * KIB, 512 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB])
def test_the_limit_is_reached_by_one_block_of_a_cold_pool(make_pool: MakePool, limit: int) -> None:
    assert make_pool(max_bytes=limit).acquire(limit).capacity == limit


@pytest.mark.parametrize("limit", [256 * KIB, 512 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB])
@pytest.mark.parametrize("nbytes", [64, 1000, 60 * KIB, 900 * KIB, 3 * MIB, 9 * MIB])
def test_the_limit_is_reached_by_one_block_after_a_warm_start(make_pool: MakePool, limit: int, nbytes: int) -> None:
    if nbytes * 2 > limit:
        nbytes = limit // 4
    pool = make_pool(max_bytes=limit)
    held = [pool.acquire(nbytes) for _ in range(min(limit // nbytes // 2, 20_000))]
    del held
    assert pool.acquire(limit).capacity == limit


@pytest.mark.parametrize(("nbytes", "percent"), [(4 * KIB, 98), (2 * MIB, 100)])
def test_a_limit_filled_once_is_filled_again_with_another_size(make_pool: MakePool, nbytes: int, percent: int) -> None:
    # Carved blocks may end up a little apart, since those of the last size lie in the same arenas.
    limit = 8 * MIB
    pool = make_pool(max_bytes=limit)
    for size in (nbytes, nbytes // 2, nbytes * 2, nbytes):
        held = [pool.acquire(size) for _ in range(limit // size * percent // 100)]
        assert pool.stats().reserved_bytes <= limit
        del held


def test_the_limit_holds_whatever_the_mixture(make_pool: MakePool, counting: CountingBackend) -> None:
    pool = make_pool(counting, max_bytes=20 * MIB)
    held = fill(pool, 100, 5000, MIB, 70 * KIB, 3 * MIB)
    assert len(held) > 20
    assert counting.peak_bytes <= 20 * MIB
    held.clear()


def test_the_limit_holds_in_many_threads(make_pool: MakePool, counting: CountingBackend) -> None:
    pool = make_pool(counting, max_bytes=8 * MIB)

    def work(i: int) -> None:
        for n in range(200):
            held = []
            try:
                for _ in range(4):
                    held.append(pool.acquire((n * 7 + i) % 32 * 64 * KIB + 1))
            except zcpool.OutOfMemory:
                pass

    with Workers(4, work):
        pass
    assert counting.peak_bytes <= 8 * MIB


@pytest.mark.parametrize("limit", [8 * MIB, 9 * MIB])
def test_what_is_held_never_exceeds_the_limit_even_if_regions_are_larger_than_asked(
    make_pool: MakePool, limit: int
) -> None:
    class Generous(zcpool.PythonBackend):
        def allocate(self, nbytes: int, alignment: int) -> Any:
            return mmap.mmap(-1, nbytes + MIB)

    pool = make_pool(Generous(), arena_buckets="none", max_bytes=limit)
    held = fill(pool, MIB)
    assert held
    assert pool.stats().reserved_bytes == 8 * MIB
    held.clear()


# The limit in handles


def test_the_limit_in_handles_is_reached_exactly(make_pool: MakePool) -> None:
    pool = make_pool(max_handles=5)
    held = [pool.acquire(MIB) for _ in range(5)]
    with pytest.raises(zcpool.OutOfMemory, match=r"handles 5 of 5") as caught:
        pool.acquire(MIB)
    assert caught.value.details["handles"] == caught.value.details["max_handles"] == 5
    assert "limit in handles" in str(caught.value)
    del held


def test_many_small_blocks_need_few_handles(make_pool: MakePool) -> None:
    pool = make_pool(max_handles=6)
    held = [pool.acquire(4 * KIB) for _ in range(1500)]
    assert pool.stats().handles <= 6
    del held


def test_cached_regions_make_room_for_handles(make_pool: MakePool) -> None:
    pool = make_pool(max_handles=2)
    for nbytes in (MIB, 3 * MIB, 9 * MIB, 100, 27 * MIB):
        held = [pool.acquire(nbytes), pool.acquire(nbytes)]
        del held


# Sizes no machine has


@pytest.mark.parametrize("nbytes", [1 << 46, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, 1 << 100, "8 EiB"])
def test_a_size_that_no_machine_has_is_out_of_memory(
    make_pool: MakePool, counting: CountingBackend, nbytes: Any
) -> None:
    pool = make_pool(counting)
    for options in ({}, {"exclusive": True}, {"alignment": 2 * MIB}, {"timeout": None}):
        with pytest.raises(zcpool.OutOfMemory):
            pool.acquire(nbytes, **options)
    with pytest.raises(zcpool.OutOfMemory):
        pool.reserve(nbytes)
    assert counting.calls == 0


@pytest.mark.parametrize("nbytes", [(1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_the_error_of_a_huge_size_says_the_size_that_was_asked(pool: zcpool.Pool, nbytes: int) -> None:
    with pytest.raises(zcpool.OutOfMemory) as caught:
        pool.acquire(nbytes)
    assert caught.value.details["asked"] == nbytes


@pytest.mark.parametrize(
    "shape",
    [(1 << 61, 8), (1 << 62, 4), (1 << 32, 1 << 32), (1 << 64,), (3, 1 << 63), ((1 << 62) + 1, 4)],
)
@pytest.mark.parametrize("dtype", ["uint8", "float64"])
def test_a_product_of_dimensions_does_not_wrap(pool: zcpool.Pool, shape: tuple[int, ...], dtype: str) -> None:
    with pytest.raises(zcpool.OutOfMemory):
        pool.array(shape, dtype)


def test_a_count_times_a_size_does_not_wrap(make_pool: MakePool) -> None:
    pool = make_pool(max_bytes=16 * MIB)
    for count in (1 << 44, 1 << 62, 1 << 64):
        with pytest.raises(zcpool.OutOfMemory):
            pool.reserve(MIB, count)
    pool.trim()


def test_more_than_a_machine_can_map_is_out_of_memory_and_not_a_crash(pool: zcpool.Pool) -> None:
    with pytest.raises(zcpool.OutOfMemory):
        pool.acquire(1 << 45)


def test_a_region_larger_than_the_backend_can_give_is_out_of_memory(make_pool: MakePool) -> None:
    backend = CountingBackend(largest_region=MIB)
    pool = make_pool(backend)
    assert pool.acquire(MIB).capacity == MIB
    with pytest.raises(zcpool.OutOfMemory, match="backend"):
        pool.acquire(MIB + 1)
    with pytest.raises(zcpool.OutOfMemory, match="backend"):
        pool.reserve(MIB + 1)


def test_more_than_the_limit_fails_without_giving_back_what_is_cached(
    make_pool: MakePool, counting: CountingBackend
) -> None:
    pool = make_pool(counting, max_bytes=8 * MIB)
    pool.acquire(4 * MIB).release()
    with pytest.raises(zcpool.OutOfMemory):
        pool.acquire(9 * MIB)
    assert pool.stats().cached_bytes == 4 * MIB


# What the error says


def test_out_of_memory_says_all_that_is_needed(make_pool: MakePool) -> None:
    pool = make_pool(name="npu", max_bytes=16 * MIB, max_handles=9)
    held = [pool.acquire(4 * MIB), pool.acquire(4 * MIB)]
    retired = pool.acquire(2 * MIB)
    view = memoryview(retired)
    retired.release()
    with pytest.raises(zcpool.OutOfMemory) as caught:
        pool.acquire(10 * MIB)
    assert caught.value.details == {
        "asked": 10 * MIB,
        "reason": "limit in bytes",
        "limit": 16 * MIB,
        "in_use": 8 * MIB,
        "cached": 0,
        "retired": 2 * MIB,
        "largest_free": 0,
        "handles": 3,
        "max_handles": 9,
        "code": None,
    }
    text = str(caught.value)
    for said in (
        "'npu'",
        "10 MiB",
        "limit 16 MiB",
        "in use 8 MiB",
        "cached 0 B",
        "retired 2 MiB",
        "largest free block 0 B",
        "handles 3 of 9",
        "raise max_bytes",
        "Release",
    ):
        assert said in text, (said, text)
    view.release()
    del held


def test_out_of_memory_says_what_the_backend_said(make_pool: MakePool, counting: CountingBackend) -> None:
    pool = make_pool(counting)
    counting.fail_next(100, MemoryError("the CMA area is full"))
    with pytest.raises(zcpool.OutOfMemory, match="the CMA area is full") as caught:
        pool.acquire(MIB)
    assert isinstance(caught.value.details["code"], int)
    assert isinstance(caught.value.__cause__, zcpool.BackendError)
    assert isinstance(caught.value.__cause__.__cause__, MemoryError)


def test_out_of_memory_is_a_memory_error_and_a_pool_error(make_pool: MakePool) -> None:
    with pytest.raises(MemoryError):
        make_pool(max_bytes=64).acquire(65)
    with pytest.raises(zcpool.PoolError):
        make_pool(max_bytes=64).acquire(65)


def test_out_of_memory_can_be_pickled(make_pool: MakePool) -> None:
    with pytest.raises(zcpool.OutOfMemory) as caught:
        make_pool(max_bytes=64).acquire(65)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (type(copy), str(copy), copy.details) == (zcpool.OutOfMemory, str(caught.value), caught.value.details)


def test_the_largest_free_block_is_what_could_still_be_had(make_pool: MakePool) -> None:
    pool = make_pool(max_bytes=MIB)
    pool.reserve(64 * KIB, 16)
    held = sorted((pool.acquire(64 * KIB) for _ in range(16)), key=lambda buf: buf.offset)
    for i in (3, 4, 5, 9):
        held[i].release()
    with pytest.raises(zcpool.OutOfMemory) as caught:
        pool.acquire(256 * KIB)
    assert caught.value.details["largest_free"] == 192 * KIB
    assert pool.acquire(192 * KIB).capacity == 192 * KIB
    del held


# on_pressure


def test_pressure_is_reported_once_with_the_pool_and_the_bytes(make_pool: MakePool) -> None:
    calls = []
    pool = make_pool(max_bytes=MIB, on_pressure=lambda *args: calls.append(args))
    held = pool.acquire(MIB)
    with pytest.raises(zcpool.OutOfMemory):
        pool.acquire(5000)
    assert calls == [(pool, 5000)]
    del held


def test_what_pressure_releases_serves_the_request(make_pool: MakePool) -> None:
    held: list[zcpool.Buffer] = []
    pool = make_pool(max_bytes=4 * MIB, on_pressure=lambda pool, nbytes: held.pop().release())
    held += [pool.acquire(2 * MIB), pool.acquire(2 * MIB)]
    assert pool.acquire(2 * MIB).nbytes == 2 * MIB
    assert len(held) == 1
    assert pool.stats().failures == 0
    held.clear()


def test_pressure_is_not_reported_where_something_cached_helps(make_pool: MakePool) -> None:
    calls = []
    pool = make_pool(max_bytes=4 * MIB, on_pressure=lambda *args: calls.append(args))
    for nbytes in (MIB, 3 * MIB, 4 * MIB, 5000):
        pool.acquire(nbytes).release()
    assert calls == []


def test_pressure_is_not_reported_where_nothing_could_help(make_pool: MakePool) -> None:
    calls = []
    pool = make_pool(max_bytes=4 * MIB, on_pressure=lambda *args: calls.append(args))
    with pytest.raises(zcpool.OutOfMemory):
        pool.acquire(5 * MIB)
    pool.close()
    with pytest.raises(zcpool.PoolError):
        pool.acquire(MIB)
    assert calls == []


def test_what_pressure_raises_ends_the_acquire(make_pool: MakePool) -> None:
    def refuse(pool: zcpool.Pool, nbytes: int) -> None:
        raise LookupError("nothing to spare")

    pool = make_pool(max_bytes=MIB, on_pressure=refuse)
    held = pool.acquire(MIB)
    with pytest.raises(LookupError, match="nothing to spare"):
        pool.acquire(MIB)
    held.release()
    assert pool.acquire(MIB).nbytes == MIB


def test_an_acquire_that_pressure_ended_counts_as_a_failure(make_pool: MakePool) -> None:
    def refuse(pool: zcpool.Pool, nbytes: int) -> None:
        raise LookupError

    pool = make_pool(max_bytes=MIB, on_pressure=refuse)
    held = pool.acquire(MIB)
    with pytest.raises(LookupError):
        pool.acquire(MIB)
    assert pool.stats().failures == 1
    del held


def test_pressure_may_acquire_from_the_same_pool(make_pool: MakePool) -> None:
    inner = []

    def copy_out(pool: zcpool.Pool, nbytes: int) -> None:
        with pool.acquire(1000) as scratch:
            inner.append(scratch.nbytes)
        held.pop().release()

    pool = make_pool(max_bytes=4 * MIB, on_pressure=copy_out)
    small = pool.acquire(1000)
    held = [pool.acquire(MIB), pool.acquire(2 * MIB)]
    assert pool.acquire(2 * MIB).nbytes == 2 * MIB
    assert inner == [1000]
    small.release()
    held.clear()


def test_pressure_is_not_reported_from_within_itself(make_pool: MakePool) -> None:
    calls = []

    def try_in_vain(pool: zcpool.Pool, nbytes: int) -> None:
        calls.append(nbytes)
        assert len(calls) < 10, "on_pressure is called from within itself"
        with pytest.raises(zcpool.OutOfMemory):
            pool.acquire(MIB)

    pool = make_pool(max_bytes=MIB, on_pressure=try_in_vain)
    held = pool.acquire(MIB)
    with pytest.raises(zcpool.OutOfMemory):
        pool.acquire(2000)
    assert calls == [2000]
    del held


def test_pressure_may_trim_and_close_the_pool(make_pool: MakePool) -> None:
    def give_up(pool: zcpool.Pool, nbytes: int) -> None:
        pool.trim()
        pool.close()

    pool = make_pool(max_bytes=MIB, on_pressure=give_up)
    held = pool.acquire(MIB)
    with pytest.raises(zcpool.PoolError, match="closed"):
        pool.acquire(MIB)
    held.release()


# Waiting


def waiting(pool: zcpool.Pool, nbytes: int, got: list[Any], timeout: float | None = 50) -> Workers:
    """Return a thread that acquires and appends the buffer or the exception to `got`."""

    def work(i: int) -> None:
        try:
            got.append(pool.acquire(nbytes, timeout=timeout))
        except zcpool.PoolError as error:
            got.append(error)

    return Workers(1, work)


def asleep() -> None:
    """Give a thread the time to fall asleep. Awake, it must be served as well, so nothing depends on it."""
    threading.Event().wait(0.05)


def test_a_timeout_ends_in_out_of_memory(make_pool: MakePool) -> None:
    pool = make_pool(max_bytes=MIB)
    held = pool.acquire(MIB)
    for timeout in (1e-9, 0.01, 0.1):
        with pytest.raises(zcpool.OutOfMemory):
            pool.acquire(MIB, timeout=timeout)
    held.release()
    assert pool.stats().failures == 3


@pytest.mark.parametrize("timeout", [50, 1e300, float("inf"), None])
@pytest.mark.parametrize("nbytes", [4 * KIB, MIB])
def test_a_waiter_is_woken_by_a_release_in_another_thread(
    make_pool: MakePool, nbytes: int, timeout: float | None
) -> None:
    pool = make_pool(max_bytes=nbytes)
    held, got = pool.acquire(nbytes), []
    with waiting(pool, nbytes, got, timeout):
        asleep()
        assert got == []
        held.release()
    assert got[0].nbytes == nbytes
    got.clear()


def test_a_waiter_is_woken_by_the_last_view_of_a_released_buffer(make_pool: MakePool) -> None:
    pool = make_pool(max_bytes=MIB)
    held, got = pool.acquire(MIB), []
    view = memoryview(held)
    held.release()
    with waiting(pool, MIB, got):
        asleep()
        assert got == []
        view.release()
    assert got.pop().nbytes == MIB


def test_a_waiter_is_woken_by_a_fence_that_is_set(make_pool: MakePool) -> None:
    pool = make_pool(max_bytes=MIB)
    fence, got = zcpool.Fence(), []
    pool.acquire(MIB).release(after=fence)
    with waiting(pool, MIB, got):
        asleep()
        assert got == []
        fence.set()
    assert got.pop().nbytes == MIB


@pytest.mark.parametrize("pipe", [False, True])
def test_a_waiter_is_woken_by_a_fence_fd(make_pool: MakePool, pipe: bool) -> None:
    if not pipe and not hasattr(os, "eventfd"):
        pytest.skip("no eventfd here")
    pool = make_pool(max_bytes=MIB)
    done, got = Signal(pipe), []
    pool.acquire(MIB).release(after=done.fd)
    with waiting(pool, MIB, got):
        asleep()
        assert got == []
        done.set()
    assert got.pop().nbytes == MIB


def test_a_waiter_is_woken_by_a_fence_fd_that_came_while_it_slept(make_pool: MakePool) -> None:
    pool = make_pool(max_bytes=MIB)
    done, got = Signal(), []
    held = pool.acquire(MIB)
    with waiting(pool, MIB, got):
        asleep()
        held.release(after=done.fd)
        asleep()
        assert got == []
        done.set()
    assert got.pop().nbytes == MIB


@pytest.mark.parametrize("by", ["release", "view", "pin", "fence", "fd", "late fd", "close"])
def test_a_waiter_is_woken_and_does_not_just_look_now_and_then(make_pool: MakePool, by: str) -> None:
    # Looking twice a second, as is done for signals, sixty rounds would take half a minute.
    turns: queue.SimpleQueue[zcpool.Pool | None] = queue.SimpleQueue()
    served = threading.Semaphore(0)

    def work(i: int) -> None:
        for pool in iter(turns.get, None):
            try:
                pool.acquire(MIB, timeout=None).release()
            except zcpool.PoolError:
                assert by == "close"
            served.release()

    woken = 0
    deadline = time.monotonic() + 12
    with Workers(1, work):
        pool = make_pool(max_bytes=MIB)
        while woken < 60:
            if pool.closed:
                pool = make_pool(max_bytes=MIB)
            buf, done, fence = pool.acquire(MIB), Signal(), zcpool.Fence()
            view, pin = memoryview(buf), buf.pin()
            if by != "view":
                view.release()
            if by != "pin":
                pin.release()
            if by in ("view", "pin", "fence", "fd"):
                buf.release(after={"fence": fence, "fd": done.fd}.get(by))
            turns.put(pool)
            threading.Event().wait(0.002)
            if by == "close":
                pool.close()
            elif by == "late fd":
                buf.release(after=done.fd)
                threading.Event().wait(0.002)
            for signal in (buf.release, view.release, pin.release, fence.set, done.set):
                signal()
            if by not in ("fd", "late fd"):
                os.close(done.fd)
            if time.monotonic() > deadline or not served.acquire(timeout=12):
                break
            woken += 1
        turns.put(None)
    assert woken == 60


def test_one_of_a_hundred_fence_fds_wakes_a_waiter(make_pool: MakePool) -> None:
    pool = make_pool(max_bytes=200 * MIB)
    signals = [Signal() for _ in range(200)]
    for done in signals:
        pool.acquire(MIB).release(after=done.fd)
    got: list[Any] = []
    with waiting(pool, MIB, got):
        asleep()
        assert got == []
        signals[150].set()
    assert got.pop().nbytes == MIB
    for i, done in enumerate(signals):
        if i != 150:
            done.set()
    assert eventually(lambda: not pool.stats().retired_blocks)


def test_a_waiter_is_woken_when_the_pool_is_closed(make_pool: MakePool) -> None:
    pool = make_pool(max_bytes=MIB)
    held, got = pool.acquire(MIB), []
    with waiting(pool, MIB, got, None):
        asleep()
        pool.close()
    assert type(got[0]) is zcpool.PoolError
    held.release()


def test_a_waiter_on_a_frozen_pool_is_woken_by_thaw_or_a_release(make_pool: MakePool) -> None:
    pool = make_pool()
    held, got = pool.acquire(MIB), []
    pool.freeze()
    with waiting(pool, MIB, got):
        asleep()
        held.release()
    assert got.pop().nbytes == MIB
    held = pool.acquire(MIB)
    with waiting(pool, MIB, got, 1):
        asleep()
        pool.thaw()
    assert got.pop().nbytes == MIB
    held.release()


def test_two_waiters_of_different_sizes_are_both_served(make_pool: MakePool) -> None:
    pool = make_pool(max_bytes=8 * MIB)
    held = [pool.acquire(4 * MIB), pool.acquire(4 * MIB)]
    large: list[Any] = []
    small: list[Any] = []
    with waiting(pool, 8 * MIB, large), waiting(pool, 2 * MIB, small):
        asleep()
        held.pop().release()
        assert eventually(lambda: small)
        assert large == []
        held.pop().release()
        asleep()
        assert large == []
        small.pop().release()
        assert eventually(lambda: large)
    assert large.pop().nbytes == 8 * MIB


def test_more_waiters_than_slots_are_all_served(make_pool: MakePool) -> None:
    pool = make_pool(max_bytes=MIB)
    held = pool.acquire(MIB)
    served = []

    def work(i: int) -> None:
        with pool.acquire(MIB, timeout=50):
            served.append(i)

    with Workers(80, work):
        asleep()
        held.release()
    assert sorted(served) == list(range(80))


def test_a_signal_ends_the_waiting(make_pool: MakePool) -> None:
    class Alarm(Exception):
        pass

    def ring(number: int, frame: object) -> None:
        raise Alarm

    pool = make_pool(max_bytes=MIB)
    held = pool.acquire(MIB)
    before = signal.signal(signal.SIGALRM, ring)
    try:
        for timeout in (50, None):
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(Alarm):
                pool.acquire(MIB, timeout=timeout)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    held.release()
    with pool.acquire(MIB) as again:
        assert again.nbytes == MIB


def test_ctrl_c_ends_the_waiting(make_pool: MakePool) -> None:
    pool = make_pool(max_bytes=MIB)
    held = pool.acquire(MIB)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            pool.acquire(MIB, timeout=50)
        timer.join()
    finally:
        signal.signal(signal.SIGINT, before)
    held.release()


def test_a_handler_that_returns_does_not_end_the_waiting(make_pool: MakePool) -> None:
    pool = make_pool(max_bytes=MIB)
    held = pool.acquire(MIB)
    before = signal.signal(signal.SIGALRM, lambda number, frame: held.release())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        assert pool.acquire(MIB, timeout=50).nbytes == MIB
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_size_that_can_never_be_served_is_not_waited_for(make_pool: MakePool) -> None:
    pool = make_pool(max_bytes=MIB)
    for nbytes in (2 * MIB, 1 << 50, 1 << 64):
        with pytest.raises(zcpool.OutOfMemory):
            pool.acquire(nbytes, timeout=None)


def test_a_backend_error_is_not_waited_for(make_pool: MakePool, counting: CountingBackend) -> None:
    pool = make_pool(counting)
    counting.fail_next(100, OSError("the device is gone"))
    with pytest.raises(zcpool.BackendError, match="the device is gone"):
        pool.acquire(MIB, timeout=None)


def test_a_waiter_is_served_when_the_device_has_memory_again(make_pool: MakePool) -> None:
    backend = CountingBackend(memory=4 * MIB)
    pool = make_pool(backend)
    held, got = [pool.acquire(4 * MIB)], []
    with waiting(pool, 3 * MIB, got):
        asleep()
        held.pop().release()
    assert got.pop().nbytes == 3 * MIB


def test_after_waiting_release_is_as_before(make_pool: MakePool) -> None:
    pool = make_pool(max_bytes=64 * KIB)
    held = pool.acquire(64 * KIB)
    with pytest.raises(zcpool.OutOfMemory):
        pool.acquire(64 * KIB, timeout=0.01)
    address = held.address
    held.release()
    before = pool.stats()
    for _ in range(100):
        with pool.acquire(64 * KIB) as buf:
            assert buf.address == address
    assert pool.stats().misses == before.misses


# An out-of-memory that would succeed if retried succeeds within one call


@pytest.mark.parametrize("nbytes", [1000, 300 * KIB, MIB, 20 * MIB])
def test_a_backend_that_fails_once_is_asked_again(make_pool: MakePool, counting: CountingBackend, nbytes: int) -> None:
    pool = make_pool(counting)
    counting.fail_next()
    assert pool.acquire(nbytes).nbytes == nbytes
    assert pool.stats().failures == 0


def test_a_backend_without_memory_gets_back_what_is_cached(make_pool: MakePool) -> None:
    for warm, nbytes in [(3 * MIB, 4 * MIB), (100, 4 * MIB), (4 * MIB, 3 * MIB), (2 * MIB, 100), (100 * KIB, MIB)]:
        backend = CountingBackend(memory=4 * MIB)
        pool = make_pool(backend)
        held = [pool.acquire(warm) for _ in range(4 * MIB // warm // 2 or 1)]
        del held
        assert pool.acquire(nbytes).nbytes == nbytes


def test_an_arena_shrinks_to_what_the_backend_has_left(make_pool: MakePool) -> None:
    backend = CountingBackend(memory=MIB + 64 * KIB)
    pool = make_pool(backend)
    large = pool.acquire(MIB)
    assert pool.acquire(40 * KIB).nbytes == 40 * KIB
    large.release()


@pytest.mark.parametrize("nbytes", [4 * KIB, 2 * MIB])
def test_a_block_whose_fence_fd_has_signalled_serves(make_pool: MakePool, nbytes: int) -> None:
    pool = make_pool(max_bytes=nbytes)
    for _ in range(3):
        done = Signal()
        pool.acquire(nbytes).release(after=done.fd)
        done.set()


@pytest.mark.parametrize("size", [4 * KIB, 3 * MIB, 4 * MIB])
def test_blocks_of_another_class_whose_fences_have_signalled_make_room(make_pool: MakePool, size: int) -> None:
    pool = make_pool(max_bytes=4 * MIB)
    signals = [Signal() for _ in range(4)]
    for buf, done in zip([pool.acquire(MIB) for _ in range(4)], signals):
        buf.release(after=done.fd)
        done.set()
    assert pool.acquire(size).nbytes == size


def test_more_signalled_fences_than_one_look_sees_still_make_room(make_pool: MakePool) -> None:
    pool = make_pool(max_bytes=200 * MIB)
    signals = [Signal() for _ in range(200)]
    for buf, done in zip([pool.acquire(MIB) for _ in signals], signals):
        buf.release(after=done.fd)
        done.set()
    assert pool.acquire(192 * MIB).nbytes == 192 * MIB


def test_a_signalled_fence_behind_a_hundred_stuck_ones_serves(make_pool: MakePool) -> None:
    pool = make_pool(max_bytes=101 * MIB)
    signals = [Signal() for _ in range(101)]
    for buf, done in zip([pool.acquire(MIB) for _ in signals], signals):
        buf.release(after=done.fd)
    signals[-1].set()
    assert pool.acquire(MIB).nbytes == MIB
    for done in signals[:-1]:
        done.set()
    assert eventually(lambda: not pool.stats().retired_blocks)


def test_blocks_cached_by_another_thread_make_room(make_pool: MakePool) -> None:
    pool = make_pool(max_bytes=MIB)
    leave = threading.Event()
    cached = threading.Event()

    def work(i: int) -> None:
        for nbytes in (100, 5000, 60 * KIB):
            held = [pool.acquire(nbytes) for _ in range(4)]
            del held
        cached.set()
        assert leave.wait(50)

    with Workers(1, work):
        assert cached.wait(50)
        assert pool.acquire(MIB).nbytes == MIB
        leave.set()


def test_a_reservation_that_comes_to_nothing_does_not_fail_others(
    make_pool: MakePool, counting: CountingBackend
) -> None:
    class Interrupt(BaseException):
        """Not tried again by the thread that gets it, as an error of the device may be."""

    def interrupted(i: int) -> None:
        with pytest.raises(Interrupt):
            pool.acquire(4 * MIB)

    pool = make_pool(counting, max_bytes=4 * MIB)
    gate = counting.shut()
    counting.fail_next(error=Interrupt)
    got: list[Any] = []
    with Workers(1, interrupted):
        assert gate.entered.wait(50)
        with waiting(pool, 4 * MIB, got, 0):
            asleep()
            assert got == []
            gate.open()
    assert got.pop().nbytes == 4 * MIB


def test_memory_that_is_just_going_back_is_waited_for(make_pool: MakePool) -> None:
    going, go = threading.Event(), threading.Event()

    class Slow(CountingBackend):
        def free(self, memory: memoryview) -> None:
            going.set()
            assert go.wait(50)
            super().free(memory)

    pool = make_pool(Slow(), max_bytes=4 * MIB)
    pool.acquire(4 * MIB).release()
    got: list[Any] = []
    with Workers(1, lambda i: pool.trim()):
        assert going.wait(50)
        with waiting(pool, 3 * MIB, got, 0):
            asleep()
            assert got == []
            go.set()
    assert got.pop().nbytes == 3 * MIB
