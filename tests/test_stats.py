"""The books balance after any history, failures included."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
from typing import Any

import pytest
from books import balanced
from doubles.memory import CountingBackend
from helpers import MakePool, Signal, in_threads
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

import zcpool

KIB, MIB = 1 << 10, 1 << 20
pytestmark = pytest.mark.watchdog(120)

# Any history


class Lease:
    """A buffer, and what holds its block beyond its release; without a buffer when the acquire failed.

    Whether it fails may depend on what pools before it left in the memory of the process. Every acquire makes a
    lease, so that what comes next does not.
    """

    def __init__(self, buf: zcpool.Buffer | None) -> None:
        self.buf = buf
        self.capacity = buf.capacity if buf is not None else 0
        self.bucket = buf.bucket if buf is not None else ""
        self.views: list[memoryview] = []
        self.pins: list[zcpool.Pin] = []
        self.fences: list[zcpool.Fence | Signal] = []

    @property
    def open(self) -> bool:
        return self.buf is not None and not self.buf.released

    @property
    def held(self) -> bool:
        return bool(self.views or self.pins or self.fences)

    @property
    def retired(self) -> bool:
        return self.held and not self.open


class History(RuleBasedStateMachine):
    """A pool, and beside it a model of what must be in its books."""

    leases = Bundle("leases")

    @initialize(
        max_bytes=st.sampled_from([None, None, 3 * MIB, 20 * MIB]),
        max_handles=st.sampled_from([None, None, 4]),
        arena_buckets=st.sampled_from(["small", "small", "none", "medium", "all"]),
        granularity=st.sampled_from([64, 64, 4096]),
        zero=st.booleans(),
    )
    def open(
        self, max_bytes: int | None, max_handles: int | None, arena_buckets: str, granularity: int, zero: bool
    ) -> None:
        self.backend = CountingBackend(granularity=granularity)
        self.pool = zcpool.Pool(
            self.backend,
            max_bytes=max_bytes,
            max_handles=max_handles,
            arena_buckets=arena_buckets,
            zero_on_release=zero,
        )
        self.living: list[Lease] = []
        self.acquired = self.failed = 0
        self.max_bytes, self.max_handles = max_bytes, max_handles

    @rule(
        target=leases,
        nbytes=st.one_of(
            st.integers(1, 5000), st.integers(1, 2 * MIB), st.sampled_from([64, 4096, MIB, 3 * MIB, 5 * MIB, 17 * MIB])
        ),
        alignment=st.sampled_from([None, None, None, 64, 256, 8192]),
        exclusive=st.sampled_from([False, False, False, True]),
    )
    def acquire(self, nbytes: int, alignment: int | None, exclusive: bool) -> Lease:
        return self._acquire(nbytes, alignment=alignment, exclusive=exclusive)

    @rule(nbytes=st.sampled_from([1 << 46, 1 << 63, 1 << 64]))
    def acquire_far_too_much(self, nbytes: int) -> None:
        # Nothing could help, so nothing is tried, and only the failure is counted.
        before = self.pool.stats()
        self._acquire(nbytes)
        assert _but_failures(self.pool.stats()) == _but_failures(before)

    @rule(
        target=leases,
        nbytes=st.sampled_from([100, 70 * KIB, MIB, 5 * MIB]),
        failures=st.integers(1, 12),
        error=st.sampled_from([MemoryError, OSError]),
    )
    def acquire_from_a_failing_backend(self, nbytes: int, failures: int, error: type[Exception]) -> Lease:
        self.backend.fail_next(failures, error)
        try:
            return self._acquire(nbytes)
        finally:
            self.backend.fail_no_more()

    @rule(lease=leases)
    def export(self, lease: Lease) -> None:
        if lease.open:
            lease.views.append(memoryview(lease.buf))

    @rule(lease=leases)
    def pin(self, lease: Lease) -> None:
        if lease.open:
            lease.pins.append(lease.buf.pin())

    @rule(lease=leases)
    def drop_a_view(self, lease: Lease) -> None:
        if lease.views:
            lease.views.pop().release()

    @rule(lease=leases)
    def unpin(self, lease: Lease) -> None:
        if lease.pins:
            lease.pins.pop().release()

    @rule(lease=leases)
    def signal(self, lease: Lease) -> None:
        for fence in lease.fences:
            fence.set()
        lease.fences.clear()

    @rule(lease=leases)
    def release(self, lease: Lease) -> None:
        if lease.buf is not None:
            lease.buf.release()

    @rule(lease=leases)
    def release_strictly(self, lease: Lease) -> None:
        if lease.open and lease.held:
            with pytest.raises(BufferError):
                lease.buf.release(strict=True)
            assert lease.open
        elif lease.buf is not None:
            lease.buf.release(strict=True)

    @rule(lease=leases, fd=st.booleans())
    def release_after_a_fence(self, lease: Lease, fd: bool) -> None:
        if not lease.open:
            return
        fence = Signal() if fd else zcpool.Fence()
        lease.buf.release(after=fence.fd if isinstance(fence, Signal) else fence)
        lease.fences.append(fence)

    @rule(lease=consumes(leases))
    def forget(self, lease: Lease) -> None:
        for fence in lease.fences:
            fence.set()
        for pin in lease.pins:
            pin.release()
        self.living.remove(lease)
        # The bundle still has the lease.
        lease.views.clear()
        lease.pins.clear()
        lease.buf = None

    @rule(nbytes=st.sampled_from([100, 5000, 64 * KIB, MIB, 4 * MIB]), count=st.integers(0, 5))
    def reserve(self, nbytes: int, count: int) -> None:
        try:
            self.pool.reserve(nbytes, count)
        except (zcpool.OutOfMemory, zcpool.BackendError):
            self.failed += 1

    @rule(keep=st.sampled_from([0, 0, 1, 100 * KIB, 3 * MIB, 1 << 40]))
    def trim(self, keep: int) -> None:
        before = self.pool.stats().reserved_bytes
        given = self.pool.trim(keep)
        stats = self.pool.stats()
        assert before - given == stats.reserved_bytes
        assert self.pool.frozen or stats.cached_bytes <= keep

    @rule()
    def freeze(self) -> None:
        self.pool.freeze()

    @rule()
    def thaw(self) -> None:
        self.pool.thaw()

    @invariant()
    def the_books_are_right(self) -> None:
        if not hasattr(self, "pool"):
            return
        in_use = [lease.buf for lease in self.living if lease.open]
        stats = balanced(self.pool, held=in_use, backend=self.backend)
        for books in stats.buckets:
            retired = [lease.capacity for lease in self.living if lease.retired and lease.bucket == books.name]
            assert (books.retired_blocks, books.retired_bytes) == (len(retired), sum(retired))
        assert (stats.acquires, stats.failures) == (self.acquired, self.failed)
        assert self.max_bytes is None or stats.reserved_bytes <= self.max_bytes
        assert self.max_handles is None or stats.handles <= self.max_handles

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for lease in self.living:
            for fence in lease.fences:
                fence.set()
            for pin in lease.pins:
                pin.release()
        self.living.clear()
        self.pool.close()

    def _acquire(self, nbytes: int, **options: Any) -> Lease:
        calls = self.backend.calls
        buf = None
        try:
            buf = self.pool.acquire(nbytes, **options)
            self.acquired += 1
        except (zcpool.OutOfMemory, zcpool.BackendError):
            self.failed += 1
        assert not self.pool.frozen or self.backend.calls == calls
        self.living.append(Lease(buf))
        return self.living[-1]


def _but_failures(stats: zcpool.BucketStats) -> dict[str, Any]:
    books = copy.deepcopy(stats.to_dict())
    for part in (books, *books.get("buckets", ())):
        del part["failures"]
    return books


TestHistory = History.TestCase
TestHistory.settings = settings(max_examples=100, stateful_step_count=40)


def test_twenty_thousand_random_steps_leave_the_books_balanced(make_pool: MakePool) -> None:
    backend = CountingBackend(memory=60 * MIB)
    pool = make_pool(backend, max_bytes=50 * MIB)
    dice = random.Random(20)
    held: list[zcpool.Buffer] = []
    for step in range(20_000):
        if dice.random() < 0.5 and held:
            held.pop(dice.randrange(len(held))).release()
        else:
            if dice.random() < 0.02:
                backend.fail_next(dice.randrange(1, 4))
            try:
                held.append(pool.acquire(int(2 ** dice.uniform(0, 23)), exclusive=dice.random() < 0.1))
            except zcpool.OutOfMemory:
                pass
        if dice.random() < 0.01:
            pool.trim(dice.choice([0, MIB, 10 * MIB]))
        if step % 20 == 0:
            balanced(pool, held=held, backend=backend)
    held.clear()
    assert balanced(pool, held=[], backend=backend).failures > 0


# Failures


@pytest.mark.parametrize("error", [MemoryError, OSError])
@pytest.mark.parametrize("nbytes", [1000, 100 * KIB, 2 * MIB, 20 * MIB])
def test_an_acquire_that_the_backend_fails_changes_only_the_failures(
    make_pool: MakePool, counting: CountingBackend, nbytes: int, error: type[Exception]
) -> None:
    pool = make_pool(counting)
    held = [pool.acquire(n, exclusive=True) for n in (100, 5 * MIB)]
    counting.fail_next(1000, error)
    before = pool.stats()
    for _ in range(3):
        with pytest.raises(zcpool.PoolError):
            pool.acquire(nbytes)
    counting.fail_no_more()
    after = balanced(pool, held=held, backend=counting)
    assert after.failures == before.failures + 3
    assert _but_failures(after) == _but_failures(before)


@pytest.mark.parametrize("nbytes", [1000, 100 * KIB, 2 * MIB])
@pytest.mark.parametrize("options", [{"max_bytes": 8 * MIB}, {"max_handles": 2}])
def test_an_acquire_beyond_a_limit_changes_only_the_failures(
    make_pool: MakePool, nbytes: int, options: dict[str, int]
) -> None:
    pool = make_pool(**options)
    held = [pool.acquire(4 * MIB), pool.acquire(4 * MIB)]
    before = pool.stats()
    with pytest.raises(zcpool.OutOfMemory):
        pool.acquire(nbytes)
    after = balanced(pool, held=held)
    assert after.failures == before.failures + 1
    assert _but_failures(after) == _but_failures(before)


def test_a_failure_is_counted_in_the_bucket_that_was_asked(make_pool: MakePool) -> None:
    pool = make_pool(max_bytes=64)
    for nbytes in (1000, 2 * MIB, 2 * MIB, 5 * MIB, 20 * MIB):
        with pytest.raises(zcpool.OutOfMemory):
            pool.acquire(nbytes)
    assert [books.failures for books in pool.stats().buckets] == [1, 2, 1, 1]


def test_wrong_arguments_are_no_failures(pool: zcpool.Pool) -> None:
    for wrong in (-1, "x", 1.5, None):
        with pytest.raises((ValueError, TypeError)):
            pool.acquire(wrong)  # type: ignore[arg-type, unused-ignore]
    assert pool.stats().failures == 0


# What is counted


def test_bytes_are_counted_where_they_are(pool: zcpool.Pool) -> None:
    buf = pool.acquire(3 * MIB + 1)
    assert _medium(pool) == (buf.capacity, 0, 0)
    view = memoryview(buf)
    capacity = buf.capacity
    buf.release()
    assert _medium(pool) == (0, 0, capacity)
    view.release()
    assert _medium(pool) == (0, capacity, 0)
    pool.trim()
    assert _medium(pool) == (0, 0, 0)


def _medium(pool: zcpool.Pool) -> tuple[int, int, int]:
    books = pool.stats().buckets[1]
    return books.in_use_bytes, books.cached_bytes, books.retired_bytes


def test_rounding_is_the_difference_between_in_use_and_requested(pool: zcpool.Pool) -> None:
    held = [pool.acquire(n) for n in (1, 65, 1000, MIB + 1)]
    stats = balanced(pool, held=held)
    assert stats.requested_bytes == 1 + 65 + 1000 + MIB + 1
    assert stats.in_use_bytes == sum(buf.capacity for buf in held)


def test_bytes_of_arenas_that_nobody_has_are_slack_of_the_small_bucket(pool: zcpool.Pool) -> None:
    buf = pool.acquire(100)
    small = pool.stats().buckets[0]
    assert small.slack_bytes == small.reserved_bytes - buf.capacity
    assert small.slack_bytes > 0


def test_a_release_is_counted_when_it_is_called_and_not_when_the_block_goes_home(pool: zcpool.Pool) -> None:
    buf = pool.acquire(100)
    view = memoryview(buf)
    buf.release()
    assert pool.stats().releases == 1
    view.release()
    assert pool.stats().releases == 1


def test_acquires_of_several_threads_are_all_counted(make_pool: MakePool) -> None:
    pool = make_pool()

    def work(i: int) -> None:
        for n in range(1000):
            pool.acquire((100, 5000, 2 * MIB)[n % 3]).release()

    in_threads(4, work)
    stats = balanced(pool, held=[])
    assert (stats.acquires, stats.releases) == (4000, 4000)
    assert [books.acquires for books in stats.buckets] == [2668, 1332, 0, 0]


def test_the_peak_is_the_most_that_was_in_use_at_once(pool: zcpool.Pool) -> None:
    held = [pool.acquire(5 * MIB) for _ in range(3)]
    del held
    pool.acquire(MIB).release()
    stats = balanced(pool, held=[])
    assert stats.peak_in_use_bytes == 15 * MIB
    assert [books.peak_in_use_bytes for books in stats.buckets] == [0, MIB, 15 * MIB, 0]


def test_the_peak_of_reserved_bytes_stays_after_trim(pool: zcpool.Pool) -> None:
    held = [pool.acquire(5 * MIB) for _ in range(3)]
    del held
    pool.trim()
    stats = balanced(pool, held=[])
    assert (stats.reserved_bytes, stats.peak_reserved_bytes) == (0, 15 * MIB)


def test_the_peak_of_small_blocks_is_right_within_the_bound_of_the_caches(pool: zcpool.Pool) -> None:
    held = [pool.acquire(1024) for _ in range(20_000)]
    in_use = sum(buf.capacity for buf in held)
    del held
    assert in_use <= balanced(pool, held=[]).peak_in_use_bytes <= in_use + 4 * MIB


def test_handles_are_the_regions_held(make_pool: MakePool, counting: CountingBackend) -> None:
    pool = make_pool(counting)
    held = [pool.acquire(n) for n in (100, 100, MIB, MIB, 5 * MIB)]
    stats = balanced(pool, held=held, backend=counting)
    assert stats.handles == 4
    assert [books.handles for books in stats.buckets] == [1, 2, 1, 0]


# The form of it


def test_the_books_are_frozen(pool: zcpool.Pool) -> None:
    stats = pool.stats()
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.acquires = 5  # type: ignore[misc]
    assert stats == pool.stats()


def test_the_books_can_be_written_as_json(make_pool: MakePool) -> None:
    pool = make_pool(name="camera")
    held = [pool.acquire(n) for n in (100, MIB)]
    stats = pool.stats()
    read = json.loads(json.dumps(stats.to_dict()))
    assert read["name"] == "camera"
    assert [books["name"] for books in read["buckets"]] == ["small", "medium", "large", "huge"]
    assert read["in_use_blocks"] == 2
    assert all(isinstance(value, int) for key, value in read.items() if key not in ("name", "buckets"))
    assert set(read["buckets"][0]) == set(read) - {"buckets"}
    assert stats.buckets[0].to_dict() == read["buckets"][0]
    del held


def test_looking_changes_nothing(make_pool: MakePool, counting: CountingBackend) -> None:
    pool = make_pool(counting)
    held = [pool.acquire(n) for n in (100, MIB)]
    assert [pool.stats() for _ in range(5)] == [pool.stats()] * 5
    del held


# Levels that must not rise for ever


def test_reserved_bytes_level_off_on_a_trace_of_shifting_sizes(make_pool: MakePool, counting: CountingBackend) -> None:
    # A window of frames whose size moves on, over and over: what was cached for sizes of long ago must go.
    pool = make_pool(counting)
    sizes = [int(1.5 * MIB * 1.02**i) for i in range(60)]
    live = max(sum(sizes[i : i + 4]) for i in range(57))
    levels = []
    for _ in range(1000):
        window: list[zcpool.Buffer] = []
        for nbytes in sizes:
            window.append(pool.acquire(nbytes))
            if len(window) == 4:
                window.pop(0).release()
        window.clear()
        levels.append(pool.stats().reserved_bytes)
    assert max(levels[500:]) <= max(levels[:50])
    assert max(levels) <= live * 2 + 4 * 64 * MIB
    balanced(pool, held=[], backend=counting)


def test_small_sizes_that_shift_level_off(make_pool: MakePool, counting: CountingBackend) -> None:
    pool = make_pool(counting)
    dice = random.Random(8)
    levels = []
    for round_ in range(1000):
        base = 100 + (round_ * 37) % 4000
        held = [pool.acquire(base + dice.randrange(64)) for _ in range(50)]
        del held
        levels.append(pool.stats().reserved_bytes)
    assert levels[-1] == max(levels[100:])
    assert max(levels) <= 4 * MIB
    balanced(pool, held=[], backend=counting)


def test_a_limit_is_enough_for_a_trace_of_shifting_sizes_that_fits(make_pool: MakePool) -> None:
    pool = make_pool(max_bytes=32 * MIB)
    for round_ in range(1000):
        held = [pool.acquire((1 + (round_ + i) % 9) * 700 * KIB) for i in range(4)]
        del held
    assert pool.stats().failures == 0
