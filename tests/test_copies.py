"""Counting and forbidding copies."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import zcpool
from zcpool.copies import count_copy


@pytest.fixture(autouse=True)
def from_zero():
    zcpool.reset_copies()
    yield
    zcpool.reset_copies()


@pytest.fixture
def pool():
    with zcpool.Pool() as pool:
        yield pool


# ---- counting ------------------------------------------------------------------------------------------------


def test_the_count_starts_at_zero():
    assert zcpool.copies() == zcpool.CopyCount(bytes=0, count=0, reasons={})


def test_bytes_and_copies_are_counted_by_reason():
    count_copy(100, "layout")
    count_copy(20, "layout")
    count_copy(3, "no fd")
    assert zcpool.copies() == zcpool.CopyCount(bytes=123, count=3, reasons={"layout": (2, 120), "no fd": (1, 3)})


def test_a_copy_of_nothing_is_a_copy():
    count_copy(0, "layout")
    assert (zcpool.copies().bytes, zcpool.copies().count) == (0, 1)


def test_reset_starts_from_zero():
    count_copy(100, "layout")
    zcpool.reset_copies()
    assert zcpool.copies() == zcpool.CopyCount(0, 0, {})


def test_a_count_is_a_snapshot():
    before = zcpool.copies()
    count_copy(100, "layout")
    assert before == zcpool.CopyCount(0, 0, {})
    held = zcpool.copies()
    held.reasons.clear()
    assert zcpool.copies().bytes == 100


def test_a_count_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        zcpool.copies().bytes = 1


def test_more_than_four_gigabytes_are_counted():
    for _ in range(3):
        count_copy(2**62, "layout")
    assert zcpool.copies().bytes == 3 * 2**62


def test_threads_count_together():
    def work():
        for _ in range(2000):
            count_copy(3, "layout")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert zcpool.copies() == zcpool.CopyCount(24_000, 8000, {"layout": (8000, 24_000)})


def test_what_the_library_copies_is_counted(pool):
    pool.acquire(1000).__dlpack__(copy=True)
    seen = zcpool.copies()
    assert (seen.bytes, seen.count) == (1000, 1)


def test_what_the_library_does_not_copy_is_not_counted(pool):
    b = pool.acquire(1000)
    b.array(10)
    memoryview(b)
    b.__dlpack__()
    with b.map("rw"):
        b.sync("to_device")
    assert zcpool.copies().count == 0


# ---- forbidding ----------------------------------------------------------------------------------------------


def test_a_forbidden_copy_raises_what_it_is_and_why():
    with zcpool.require_zero_copy():
        with pytest.raises(zcpool.PoolError, match=r"1000 bytes.*\(layout\).*require_zero_copy"):
            count_copy(1000, "layout")


def test_a_forbidden_copy_is_not_counted():
    with zcpool.require_zero_copy(), pytest.raises(zcpool.PoolError):
        count_copy(1000, "layout")
    assert zcpool.copies().count == 0


def test_copies_are_allowed_again_after_the_block():
    with zcpool.require_zero_copy():
        pass
    count_copy(1, "layout")
    assert zcpool.copies().count == 1


def test_copies_are_allowed_again_after_an_exception():
    with pytest.raises(KeyError), zcpool.require_zero_copy():
        raise KeyError
    count_copy(1, "layout")


def test_blocks_nest():
    with zcpool.require_zero_copy():
        with zcpool.require_zero_copy():
            pass
        with pytest.raises(zcpool.PoolError):
            count_copy(1, "layout")
    count_copy(1, "layout")
    assert zcpool.copies().count == 1


def test_it_can_decorate_a_function():
    @zcpool.require_zero_copy()
    def frame():
        count_copy(1, "layout")

    for _ in range(2):
        with pytest.raises(zcpool.PoolError):
            frame()
    count_copy(1, "layout")


def test_another_thread_is_not_forbidden_to_copy():
    with zcpool.require_zero_copy():
        t = threading.Thread(target=count_copy, args=(5, "layout"))
        # Free-threaded Pythons let threads inherit the context unless they are given another.
        if hasattr(t, "_context"):
            t = threading.Thread(target=contextvars.Context().run, args=(count_copy, 5, "layout"))
        t.start()
        t.join()
    assert zcpool.copies().bytes == 5


def test_a_thread_that_was_there_before_is_not_forbidden_to_copy():
    with ThreadPoolExecutor(1) as executor:
        executor.submit(int).result()
        with zcpool.require_zero_copy():
            executor.submit(count_copy, 5, "layout").result()
    assert zcpool.copies().bytes == 5


def test_tasks_of_one_thread_are_told_apart():
    results = []

    async def strict(entered, leave):
        with zcpool.require_zero_copy():
            entered.set()
            await leave.wait()
            try:
                count_copy(1, "strict")
            except zcpool.PoolError:
                results.append("forbidden")

    async def main():
        entered, leave = asyncio.Event(), asyncio.Event()
        task = asyncio.ensure_future(strict(entered, leave))
        await entered.wait()
        count_copy(1, "free")
        leave.set()
        await task

    asyncio.run(main())
    assert results == ["forbidden"]
    assert zcpool.copies().reasons == {"free": (1, 1)}


def test_a_forbidden_copy_of_a_buffer_leaves_it_as_it_was(pool):
    b = pool.acquire(1000)
    b.array(1000)[:] = 7
    before = pool.stats()
    with zcpool.require_zero_copy(), pytest.raises(zcpool.PoolError):
        b.__dlpack__(copy=True)
    assert pool.stats() == before
    assert bytes(b) == b"\7" * 1000
    b.release(strict=True)
