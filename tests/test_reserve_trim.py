"""Memory made ahead and given back: reserve, trim, freeze, and pools of a fixed size."""

from __future__ import annotations

import mmap
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from books import at_home, balanced
from doubles.memory import CountingBackend
from helpers import MakePool, Signal, Workers, eventually, in_threads

import zcpool

KIB, MIB = 1 << 10, 1 << 20
STATM = Path("/proc/self/statm")
SIZES = [100, 4 * KIB, 100 * KIB, MIB, 6 * MIB, 20 * MIB]
pytestmark = pytest.mark.watchdog(60)

# Reserve


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("count", [1, 3, 20])
def test_reserved_blocks_are_acquired_without_a_backend_call(
    make_pool: MakePool, counting: CountingBackend, nbytes: int, count: int
) -> None:
    pool = make_pool(counting)
    pool.reserve(nbytes, count)
    assert balanced(pool, held=[], backend=counting).cached_blocks == count
    calls = counting.calls
    held = [pool.acquire(nbytes) for _ in range(count)]
    assert counting.calls == calls
    assert balanced(pool, held=held, backend=counting).cached_blocks == 0


@pytest.mark.parametrize("options", [{"exclusive": True}, {"alignment": 256}, {"alignment": 64 * KIB}])
@pytest.mark.parametrize("nbytes", [1000, 100 * KIB, 2 * MIB])
def test_reserved_blocks_of_a_kind_serve_that_kind(
    make_pool: MakePool, counting: CountingBackend, nbytes: int, options: dict[str, Any]
) -> None:
    pool = make_pool(counting)
    pool.reserve(nbytes, 5, **options)
    calls = counting.calls
    held = [pool.acquire(nbytes, **options) for _ in range(5)]
    assert counting.calls == calls
    alignment = options.get("alignment", 64)
    assert all(buf.address % alignment == 0 for buf in held)


@pytest.mark.parametrize("nbytes", SIZES)
def test_blocks_that_are_free_already_count(make_pool: MakePool, counting: CountingBackend, nbytes: int) -> None:
    pool = make_pool(counting)
    held = [pool.acquire(nbytes) for _ in range(3)]
    del held
    before = balanced(pool, held=[])
    pool.reserve(nbytes, before.cached_blocks)
    assert balanced(pool, held=[]).backend_allocations == before.backend_allocations
    pool.reserve(nbytes, before.cached_blocks + 2)
    assert balanced(pool, held=[]).cached_blocks == before.cached_blocks + 2


@pytest.mark.parametrize("nbytes", SIZES)
def test_blocks_in_use_do_not_count(make_pool: MakePool, nbytes: int) -> None:
    pool = make_pool()
    held = [pool.acquire(nbytes)]
    pool.trim()
    pool.reserve(nbytes, 2)
    assert balanced(pool, held=held).cached_blocks == 2


def test_reserving_nothing_does_nothing(make_pool: MakePool, counting: CountingBackend) -> None:
    pool = make_pool(counting)
    pool.reserve(0, 10)
    pool.reserve(100, 0)
    assert counting.calls == 0


@pytest.mark.parametrize(("size", "count"), [(-1, 1), (100, -1), ("x", 1)])
def test_a_negative_or_malformed_reserve_is_a_value_error(pool: zcpool.Pool, size: Any, count: int) -> None:
    with pytest.raises(ValueError):
        pool.reserve(size, count)


@pytest.mark.parametrize("count", [1.0, "1", None])
def test_a_count_that_is_not_an_integer_is_a_type_error(pool: zcpool.Pool, count: Any) -> None:
    with pytest.raises(TypeError):
        pool.reserve(100, count)


def test_a_reserve_beyond_the_limit_fails_and_keeps_what_was_made(make_pool: MakePool) -> None:
    pool = make_pool(max_bytes=5 * MIB)
    with pytest.raises(zcpool.OutOfMemory):
        pool.reserve(2 * MIB, 3)
    assert balanced(pool, held=[]).cached_bytes == 4 * MIB


def test_a_reserve_up_to_the_limit_succeeds_after_a_warm_start(make_pool: MakePool) -> None:
    for warm in (100, 60 * KIB, MIB, 3 * MIB):
        pool = make_pool(max_bytes=8 * MIB)
        pool.acquire(warm).release()
        pool.reserve(2 * MIB, 4)
        assert balanced(pool, held=[]).cached_bytes == 8 * MIB


def test_a_reserve_that_the_backend_fails_says_so(make_pool: MakePool, counting: CountingBackend) -> None:
    pool = make_pool(counting)
    counting.fail_next(100, OSError("broken"))
    with pytest.raises(zcpool.BackendError, match="broken"):
        pool.reserve(MIB)
    counting.fail_no_more()
    counting.fail_next(100)
    with pytest.raises(zcpool.OutOfMemory):
        pool.reserve(MIB)
    counting.fail_no_more()
    balanced(pool, held=[], backend=counting)


def test_a_reserve_survives_one_failure_of_the_backend(make_pool: MakePool, counting: CountingBackend) -> None:
    pool = make_pool(counting)
    counting.fail_next()
    pool.reserve(MIB, 2)
    assert pool.stats().cached_blocks == 2


def test_touched_blocks_are_zero_where_the_backend_gives_fresh_pages(
    make_pool: MakePool, counting: CountingBackend
) -> None:
    pool = make_pool(counting)
    pool.reserve(3 * MIB, 2, touch=True)
    for buf in [pool.acquire(3 * MIB) for _ in range(2)]:
        assert not buf.array(3 * MIB).any()


def test_touch_leaves_blocks_that_were_free_already_alone(pool: zcpool.Pool) -> None:
    buf = pool.acquire(MIB)
    buf.array(MIB)[:] = 7
    buf.release()
    pool.reserve(MIB, 2, touch=True)
    values = {int(pool.acquire(MIB).array(MIB)[0])}
    held = [pool.acquire(MIB), pool.acquire(MIB)]
    values |= {int(buf.array(MIB)[0]) for buf in held}
    assert 7 in values


@pytest.mark.skipif(not STATM.exists(), reason="this system does not say what is resident")
def test_touch_faults_the_pages_in(make_pool: MakePool) -> None:
    def resident() -> int:
        return int(STATM.read_text().split()[1]) * mmap.PAGESIZE

    pool = make_pool()
    before = resident()
    pool.reserve(64 * MIB, 1)
    untouched = resident() - before
    pool.reserve(64 * MIB, 2, touch=True)
    touched = resident() - before
    if untouched > 32 * MIB:
        pytest.skip("this machine backs memory that nobody has touched")
    assert touched > 60 * MIB


# No backend call once prepared


def test_a_million_acquires_of_a_reserved_size_call_no_backend(make_pool: MakePool, counting: CountingBackend) -> None:
    pool = make_pool(counting)
    pool.reserve(4 * KIB)
    before = pool.stats()
    acquire = pool.acquire
    for _ in range(1_000_000):
        acquire(4096)
    after = balanced(pool, held=[])
    assert after.acquires - before.acquires == 1_000_000
    assert after.backend_allocations == before.backend_allocations
    assert counting.calls == counting.allocations


@pytest.mark.parametrize("nbytes", [256, 100 * KIB, 2 * MIB])
def test_four_threads_with_four_reserved_blocks_call_no_backend(
    make_pool: MakePool, counting: CountingBackend, nbytes: int
) -> None:
    pool = make_pool(counting)
    pool.reserve(nbytes, 4)
    held = all_there_is(pool, nbytes)
    for buf in held[-4:]:
        buf.release()
    del held[-4:], buf
    calls = counting.calls

    def work(i: int) -> None:
        acquire = pool.acquire
        for _ in range(250_000 if nbytes == 256 else 25_000):
            acquire(nbytes).release()

    in_threads(4, work)
    assert counting.calls == calls
    assert balanced(pool, held=held).cached_blocks == 4


def all_there_is(pool: zcpool.Pool, nbytes: int) -> list[zcpool.Buffer]:
    """Hold all that a pool can give without its backend: a miss carves what is left of an arena before it steals."""
    held = []
    pool.freeze()
    with suppress(zcpool.OutOfMemory):
        while True:
            held.append(pool.acquire(nbytes))
    pool.thaw()
    return held


def test_threads_that_hold_what_they_take_share_what_was_reserved(
    make_pool: MakePool, counting: CountingBackend
) -> None:
    # What one thread releases lies in its cache: it must not be stranded there when another one needs more.
    pool = make_pool(counting)
    pool.reserve(4 * KIB, 64)
    assert pool.stats().slack_bytes == 0
    calls = counting.calls
    together = threading.Barrier(4)

    def work(i: int) -> None:
        for turn in range(200):
            held = [pool.acquire(4 * KIB) for _ in range((40, 0, 16, 8)[(i + turn) % 4])]
            together.wait(50)
            del held
            together.wait(50)

    in_threads(4, work)
    assert counting.calls == calls


@pytest.mark.parametrize(("nbytes", "count"), [(64, 4096), (4 * KIB, 64), (64 * KIB, 4), (512 * KIB, 4)])
def test_blocks_cached_by_a_thread_that_lives_are_found(
    make_pool: MakePool, counting: CountingBackend, nbytes: int, count: int
) -> None:
    pool = make_pool(counting)
    pool.reserve(nbytes, count)
    assert pool.stats().slack_bytes == 0
    calls = counting.calls
    cached, leave = threading.Event(), threading.Event()

    def work(i: int) -> None:
        held = [pool.acquire(nbytes) for _ in range(count)]
        del held
        cached.set()
        assert leave.wait(50)

    with Workers(1, work):
        assert cached.wait(50)
        held = [pool.acquire(nbytes) for _ in range(count)]
        leave.set()
    assert counting.calls == calls
    held.clear()


def test_blocks_cached_by_threads_that_ended_are_found(make_pool: MakePool, counting: CountingBackend) -> None:
    pool = make_pool(counting)
    pool.reserve(1000, 8)
    calls = counting.calls

    def work(i: int) -> None:
        held = [pool.acquire(1000) for _ in range(8)]
        del held

    for _ in range(50):
        in_threads(1, work)
    work(0)
    # A thread gives its cache up a moment after it can be joined: until then the next one carves from the arena.
    assert counting.calls == calls
    balanced(pool, held=[])


def test_many_threads_that_come_and_go_leave_nothing_stranded(make_pool: MakePool, counting: CountingBackend) -> None:
    pool = make_pool(counting)

    def work(i: int) -> None:
        held = [pool.acquire(100 * (1 + n % 9)) for n in range(50)]
        del held

    for _ in range(30):
        in_threads(8, work)
    stats = balanced(pool, held=[])
    assert stats.acquires == 30 * 8 * 50
    assert stats.reserved_bytes <= 2 * MIB  # a thread gives its cache up a moment after it can be joined
    pool.trim()
    counting.check_empty()


# Trim


@pytest.mark.parametrize("backend_options", [{}, {"granularity": 4096}])
def test_after_trim_the_backend_holds_nothing(make_pool: MakePool, backend_options: dict[str, int]) -> None:
    backend = CountingBackend(**backend_options)
    pool = make_pool(backend)
    held = [pool.acquire(n) for n in SIZES * 3]
    held += [pool.acquire(n, exclusive=True) for n in SIZES]
    held += [pool.acquire(n, alignment=a) for n in SIZES for a in (256, 8 * KIB, 2 * MIB)]
    del held
    reserved = pool.stats().reserved_bytes
    assert pool.trim() == reserved
    backend.check_empty()
    assert balanced(pool, held=[], backend=backend).reserved_bytes == 0


def test_trim_gives_back_what_threads_have_cached(make_pool: MakePool, counting: CountingBackend) -> None:
    pool = make_pool(counting)
    cached, leave = threading.Semaphore(0), threading.Event()

    def work(i: int) -> None:
        held = [pool.acquire(n) for n in SIZES[:3] * 10]
        del held
        cached.release()
        assert leave.wait(50)

    with Workers(3, work):
        for _ in range(3):
            assert cached.acquire(timeout=50)
        pool.trim()
        counting.check_empty()
        leave.set()


def test_trim_leaves_what_is_in_use_and_what_is_retired(make_pool: MakePool, counting: CountingBackend) -> None:
    pool = make_pool(counting)
    held = [pool.acquire(n) for n in SIZES]
    array = held[3].array(MIB)
    array[:] = 5
    held.pop(3).release()
    pool.acquire(3 * MIB).release()
    assert pool.trim() >= 3 * MIB
    stats = balanced(pool, held=held, backend=counting)
    assert (stats.cached_bytes, stats.retired_bytes) == (0, MIB)
    assert (array == 5).all()


def test_trim_collects_blocks_whose_fences_have_signalled(make_pool: MakePool, counting: CountingBackend) -> None:
    pool = make_pool(counting)
    done = Signal()
    pool.acquire(MIB).release(after=done.fd)
    assert pool.trim() == 0
    done.set()
    assert pool.trim() == MIB


def test_trimming_one_pool_leaves_another(make_pool: MakePool) -> None:
    one, other = make_pool(CountingBackend()), make_pool(CountingBackend())
    for pool in (one, other):
        for nbytes in SIZES:
            pool.acquire(nbytes).release()
    before = other.stats()
    assert one.trim() > 0
    one.backend.check_empty()
    assert other.stats() == before


def test_trimming_again_gives_nothing(pool: zcpool.Pool) -> None:
    pool.acquire(MIB).release()
    assert pool.trim() == MIB
    assert pool.trim() == 0


def test_a_trimmed_pool_works_as_before(make_pool: MakePool, counting: CountingBackend) -> None:
    pool = make_pool(counting)
    for _ in range(20):
        held = [pool.acquire(n) for n in SIZES]
        balanced(pool, held=held, backend=counting)
        del held
        pool.trim()
        balanced(pool, held=[], backend=counting)


@pytest.mark.parametrize("keep", [1, 3 * MIB, 5 * MIB, "5MiB", 100 * MIB, 1 << 70])
def test_trim_keeps_at_most_the_bytes_it_was_told_to_keep(make_pool: MakePool, keep: Any) -> None:
    pool = make_pool()
    held = [pool.acquire(n) for n in (MIB, MIB, 2 * MIB, 6 * MIB, 20 * MIB)]
    del held
    before = pool.stats()
    given = pool.trim(keep)
    stats = balanced(pool, held=[])
    assert stats.cached_bytes <= (5 * MIB if keep == "5MiB" else keep)
    assert before.reserved_bytes - stats.reserved_bytes == given


def test_trim_with_more_to_keep_than_there_is_gives_back_nothing(pool: zcpool.Pool) -> None:
    held = [pool.acquire(n) for n in SIZES]
    del held
    cached = pool.stats().cached_bytes
    assert pool.trim(cached) == 0
    assert pool.stats().cached_bytes == cached


def test_trim_keeps_what_was_used_last(make_pool: MakePool, counting: CountingBackend) -> None:
    pool = make_pool(counting)
    for nbytes in (2 * MIB, 3 * MIB, 5 * MIB):
        pool.reserve(nbytes, 2)
    for nbytes in (5 * MIB, 2 * MIB, 3 * MIB):
        pool.acquire(nbytes * 2, exclusive=True).release()
        pool.acquire(nbytes).release()
    pool.trim(6 * MIB)
    calls = counting.calls
    pool.acquire(3 * MIB).release()
    assert counting.calls == calls
    pool.acquire(5 * MIB).release()
    assert counting.calls == calls + 1


@pytest.mark.parametrize("bad", [-1, "-1", "x"])
def test_a_negative_or_malformed_number_to_keep_is_a_value_error(pool: zcpool.Pool, bad: Any) -> None:
    with pytest.raises(ValueError):
        pool.trim(bad)


def test_arenas_that_are_partly_in_use_stay_and_are_reused(make_pool: MakePool, counting: CountingBackend) -> None:
    pool = make_pool(counting)
    held = [pool.acquire(1000) for _ in range(2000)]
    kept = held[::100]
    del held
    pool.trim()
    calls = counting.calls
    again = [pool.acquire(500) for _ in range(1000)]
    assert counting.calls == calls
    balanced(pool, held=kept + again, backend=counting)


def test_neighbours_that_were_trimmed_make_a_larger_block(make_pool: MakePool, counting: CountingBackend) -> None:
    pool = make_pool(counting)
    pool.reserve(4 * KIB, 64)
    held = sorted((pool.acquire(4 * KIB) for _ in range(64)), key=lambda buf: buf.offset)
    first = held[0]
    for buf in held[1:]:
        buf.release()
    pool.trim()
    calls = counting.calls
    assert pool.acquire(240 * KIB).nbytes == 240 * KIB
    assert counting.calls == calls
    first.release()


# Freeze and thaw


def test_a_frozen_pool_serves_what_is_cached(make_pool: MakePool, counting: CountingBackend) -> None:
    pool = make_pool(counting)
    for nbytes in SIZES:
        pool.reserve(nbytes, 2)
    pool.freeze()
    calls = counting.calls
    for _ in range(100):
        held = [pool.acquire(n) for n in SIZES * 2]
        del held
    assert pool.frozen
    assert counting.calls == calls


@pytest.mark.parametrize("nbytes", [MIB, 6 * MIB, 20 * MIB])
def test_a_miss_of_a_frozen_pool_raises(make_pool: MakePool, counting: CountingBackend, nbytes: int) -> None:
    pool = make_pool(counting)
    pool.freeze()
    with pytest.raises(zcpool.OutOfMemory, match="frozen"):
        pool.acquire(nbytes)
    with pytest.raises(zcpool.OutOfMemory, match="frozen"):
        pool.reserve(nbytes)
    assert counting.calls == 0


def test_a_frozen_pool_gives_nothing_back(make_pool: MakePool, counting: CountingBackend) -> None:
    pool = make_pool(counting)
    held = [pool.acquire(n) for n in SIZES]
    pool.freeze()
    del held
    for _ in range(5):
        with pytest.raises(zcpool.OutOfMemory):
            pool.acquire(50 * MIB)
    assert pool.trim() == 0
    assert counting.frees == 0
    balanced(pool, held=[], backend=counting)


def test_a_thawed_pool_grows_and_trims_again(pool: zcpool.Pool) -> None:
    pool.freeze()
    pool.freeze()
    pool.thaw()
    assert not pool.frozen
    pool.acquire(MIB).release()
    assert pool.trim() == MIB


def test_a_frozen_pool_can_be_closed(make_pool: MakePool, counting: CountingBackend) -> None:
    pool = make_pool(counting)
    buf = pool.acquire(2 * MIB)
    pool.acquire(MIB).release()
    pool.freeze()
    pool.close()
    buf.release()
    balanced(pool, held=[], backend=counting)
    counting.check_empty()


# Pools of a fixed size


@pytest.fixture
def make_fixed(backend_name: str) -> Any:
    """Return a function that makes a FixedPool; it must have everything back when the test ends."""
    pools: list[zcpool.FixedPool] = []

    def make(nbytes: Any, count: int, backend: str | zcpool.Backend = backend_name, **options: Any) -> zcpool.FixedPool:
        pools.append(zcpool.FixedPool(nbytes, count, backend, **options))
        return pools[-1]

    yield make
    for fixed in pools:
        assert at_home(fixed)
        fixed.close()
        assert balanced(fixed, held=[]).reserved_bytes == 0


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("count", [1, 3, 17])
def test_a_fixed_pool_has_exactly_its_count_of_blocks(make_fixed: Any, nbytes: int, count: int) -> None:
    fixed = make_fixed(nbytes, count)
    assert (fixed.nbytes, fixed.count) == (nbytes, count)
    for _ in range(3):
        held = [fixed.acquire() for _ in range(count)]
        assert all(buf.nbytes == nbytes for buf in held)
        for _ in range(3):
            with pytest.raises(zcpool.Exhausted, match="all blocks are in use"):
                fixed.acquire()
        del held


def test_a_fixed_pool_asks_the_backend_when_it_is_made_and_never_again(make_fixed: Any) -> None:
    backend = CountingBackend()
    fixed = make_fixed(2 * MIB, 4, backend)
    calls = backend.calls
    for _ in range(50):
        held = [fixed.acquire() for _ in range(4)]
        with pytest.raises(zcpool.Exhausted):
            fixed.acquire()
        del held
    assert (backend.calls, backend.frees) == (calls, 0)


def test_exhausted_is_an_out_of_memory_with_its_details(make_fixed: Any) -> None:
    fixed = make_fixed(MIB, 2)
    held = [fixed.acquire(), fixed.acquire()]
    with pytest.raises(zcpool.OutOfMemory) as caught:
        fixed.acquire()
    assert type(caught.value) is zcpool.Exhausted
    assert caught.value.details["asked"] == MIB
    assert caught.value.details["in_use"] == 2 * MIB
    assert "count" in str(caught.value)
    assert "raise max_bytes" not in str(caught.value)
    del held


@pytest.mark.parametrize("nbytes", [100, 2 * MIB])
def test_trim_through_a_buffer_does_not_shrink_a_fixed_pool(make_fixed: Any, nbytes: int) -> None:
    fixed = make_fixed(nbytes, 3)
    assert fixed.acquire().pool.trim() == 0
    held = [fixed.acquire() for _ in range(3)]
    del held


@pytest.mark.parametrize("nbytes", [100, 2 * MIB])
def test_a_fixed_pool_does_not_grow_through_its_pool(make_fixed: Any, nbytes: int) -> None:
    fixed = make_fixed(nbytes, 3)
    held = [fixed.acquire() for _ in range(3)]
    for use in (lambda: fixed.pool.acquire(nbytes), lambda: fixed.pool.acquire(50 * MIB)):
        with pytest.raises(zcpool.OutOfMemory):
            use()
    with pytest.raises(zcpool.OutOfMemory):
        fixed.pool.reserve(nbytes, 1)
    assert balanced(fixed, held=held).cached_blocks == 0
    del held


def test_a_failed_request_through_its_pool_costs_a_fixed_pool_nothing(make_fixed: Any) -> None:
    fixed = make_fixed(2 * MIB, 3)
    for nbytes in (50 * MIB, 100, 3 * MIB):
        with pytest.raises(zcpool.OutOfMemory):
            fixed.pool.acquire(nbytes)
    held = [fixed.acquire() for _ in range(3)]
    del held


def test_a_fixed_pool_waits_for_a_release(make_fixed: Any) -> None:
    fixed = make_fixed(MIB, 1)
    held, got = fixed.acquire(), []
    with Workers(1, lambda i: got.append(fixed.acquire(timeout=50))):
        threading.Event().wait(0.05)
        assert got == []
        held.release()
    assert got.pop().nbytes == MIB


def test_a_fixed_pool_waits_for_a_fence(make_fixed: Any) -> None:
    fixed = make_fixed(MIB, 1)
    fence, done = zcpool.Fence(), Signal()
    for after, signal in ((fence, fence.set), (done.fd, done.set)):
        fixed.acquire().release(after=after)
        timer = threading.Timer(0.05, signal)
        timer.start()
        with fixed.acquire(timeout=None) as buf:
            assert buf.nbytes == MIB
        timer.join()


def test_a_timeout_of_a_fixed_pool_ends_in_exhausted(make_fixed: Any) -> None:
    fixed = make_fixed(MIB, 1)
    with fixed.acquire():
        for timeout in (0, 0.01):
            with pytest.raises(zcpool.Exhausted):
                fixed.acquire(timeout)
        with pytest.raises(ValueError):
            fixed.acquire(-1)


@pytest.mark.parametrize("nbytes", [100, 4 * KIB, 2 * MIB])
@pytest.mark.parametrize("timeout", [0, 50])
def test_many_threads_share_a_fixed_pool(make_fixed: Any, nbytes: int, timeout: float) -> None:
    fixed = make_fixed(nbytes, 5)
    out = threading.Semaphore(5)

    def work(i: int) -> None:
        for _ in range(300):
            try:
                buf = fixed.acquire(timeout)
            except zcpool.Exhausted:
                assert timeout == 0
                continue
            assert out.acquire(blocking=False), "more blocks are out than there are"
            view = buf.array(nbytes)
            view[:] = i
            assert (view[:: max(1, nbytes // 64)] == i).all()
            out.release()
            del view
            buf.release()

    in_threads(8, work)
    held = [fixed.acquire() for _ in range(5)]
    assert balanced(fixed, held=held).cached_blocks == 0
    del held


def test_fixed_blocks_are_reused_last_first(make_fixed: Any) -> None:
    fixed = make_fixed(2 * MIB, 3)
    held = [fixed.acquire() for _ in range(3)]
    addresses = [buf.address for buf in held]
    for buf in held:
        buf.release()
    assert [fixed.acquire().address, fixed.acquire().address] == [addresses[-1], addresses[-1]]


def test_the_options_of_a_fixed_pool_reach_its_pool(make_fixed: Any) -> None:
    fixed = make_fixed(100, 2, name="frames", alignment=256, zero_on_release=True)
    assert (fixed.pool.name, fixed.pool.alignment) == ("frames", 256)
    assert "frames" in repr(fixed)
    buf = fixed.acquire()
    assert buf.address % 256 == 0
    assert "1 of 2 blocks" in repr(fixed)
    address = buf.address
    buf.array(100)[:] = 1
    buf.release()
    again = fixed.acquire()
    assert again.address == address
    assert not np.asarray(memoryview(again)).any()


@pytest.mark.parametrize("option", ["max_bytes", "max_handles", "on_pressure"])
def test_a_fixed_pool_has_no_limits(option: str) -> None:
    with pytest.raises(TypeError, match=option):
        zcpool.FixedPool(100, 2, **{option: None})


@pytest.mark.parametrize(("nbytes", "count"), [(0, 1), (1, 0), (-1, 1), (1, -1)])
def test_a_fixed_pool_of_nothing_is_a_value_error(nbytes: int, count: int) -> None:
    with pytest.raises(ValueError):
        zcpool.FixedPool(nbytes, count)


def test_a_fixed_pool_that_cannot_be_made_leaves_nothing_behind() -> None:
    backend = CountingBackend(memory=5 * MIB)
    with pytest.raises(zcpool.OutOfMemory):
        zcpool.FixedPool(2 * MIB, 3, backend)
    assert eventually(lambda: not backend.live_regions)


def test_a_closed_fixed_pool_refuses(make_fixed: Any) -> None:
    backend = CountingBackend()
    fixed = make_fixed(2 * MIB, 3, backend)
    buf = fixed.acquire()
    with fixed:
        assert not fixed.closed
    assert fixed.closed
    assert backend.live_regions == 1
    for timeout in (0, None):
        with pytest.raises(zcpool.PoolError, match="closed") as caught:
            fixed.acquire(timeout)
        assert not isinstance(caught.value, MemoryError)
    buf.release()
    assert fixed.stats().reserved_bytes == 0
    backend.check_empty()


def test_a_fixed_pool_that_was_never_initialised_says_so() -> None:
    fixed = zcpool.FixedPool.__new__(zcpool.FixedPool)
    for use in (fixed.acquire, fixed.close, fixed.stats, lambda: fixed.pool, lambda: fixed.closed):
        with pytest.raises(zcpool.PoolError, match="initialised"):
            use()
