"""Pools from the outside: acquire, release, reuse, names, closing, and who may be dropped when."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from typing import Any

import numpy as np
import pytest
from books import at_home, balanced
from doubles.memory import CountingBackend
from helpers import MakePool, eventually, in_threads

import zcpool

KIB, MIB = 1 << 10, 1 << 20
SIZES = [100, 4096, 100 * KIB, MIB, 6 * MIB, 20 * MIB]

# Acquire and release


@pytest.mark.parametrize("nbytes", SIZES)
def test_memory_keeps_what_is_written_until_release(pool: zcpool.Pool, nbytes: int) -> None:
    with pool.acquire(nbytes) as buf:
        view = memoryview(buf)
        view[0], view[-1] = 17, 34
        assert (view[0], view[-1]) == (17, 34)
        view.release()


@pytest.mark.parametrize("nbytes", SIZES)
def test_a_released_block_is_handed_out_again(pool: zcpool.Pool, nbytes: int) -> None:
    buf = pool.acquire(nbytes)
    address = buf.address
    buf.release()
    assert pool.acquire(nbytes).address == address


@pytest.mark.parametrize("nbytes", SIZES)
def test_the_block_released_last_is_handed_out_first(pool: zcpool.Pool, nbytes: int) -> None:
    held = [pool.acquire(nbytes) for _ in range(4)]
    addresses = [buf.address for buf in held]
    for buf in held:
        buf.release()
    again = [pool.acquire(nbytes) for _ in range(4)]
    assert [buf.address for buf in again] == addresses[::-1]


@pytest.mark.parametrize("nbytes", SIZES)
def test_dropping_a_buffer_releases_its_block(pool: zcpool.Pool, nbytes: int) -> None:
    buf = pool.acquire(nbytes)
    assert pool.stats().in_use_blocks == 1
    del buf
    assert balanced(pool, held=[]).cached_blocks >= 1


def test_with_releases_the_buffer(pool: zcpool.Pool) -> None:
    with pool.acquire(100) as buf:
        assert not buf.released
    assert buf.released
    balanced(pool, held=[])


def test_with_releases_the_buffer_when_its_body_raises(pool: zcpool.Pool) -> None:
    with pytest.raises(ZeroDivisionError):
        with pool.acquire(100) as buf:
            raise ZeroDivisionError
    assert buf.released


def test_releasing_again_does_nothing(pool: zcpool.Pool) -> None:
    buf = pool.acquire(100)
    for _ in range(3):
        buf.release()
    other = pool.acquire(100)
    buf.release()
    assert not other.released
    balanced(pool, held=[other])


@pytest.mark.parametrize("attribute", ["address", "bucket", "fd", "offset"])
def test_a_released_buffer_refuses_to_say_where_it_was(pool: zcpool.Pool, attribute: str) -> None:
    buf = pool.acquire(100)
    buf.release()
    with pytest.raises(BufferError):
        getattr(buf, attribute)


@pytest.mark.parametrize("nbytes", SIZES)
def test_a_steady_loop_calls_no_backend(make_pool: MakePool, counting: CountingBackend, nbytes: int) -> None:
    pool = make_pool(counting)
    pool.acquire(nbytes).release()
    calls = counting.calls
    for _ in range(1000):
        pool.acquire(nbytes).release()
    assert counting.calls == calls


@pytest.mark.parametrize("misses", [0, 100, 1000])
def test_a_steady_loop_of_several_sizes_calls_no_backend_however_old_the_pool_is(
    make_pool: MakePool, counting: CountingBackend, misses: int
) -> None:
    pool = make_pool(counting)
    for _ in range(misses):
        pool.acquire(4096, exclusive=True).release()
        pool.trim()
    for _ in range(2):
        calls = counting.calls
        for _ in range(100):
            pool.acquire(20 * MIB).release()
            pool.acquire(50 * MIB).release()
            pool.acquire(2 * MIB).release()
    assert counting.calls == calls


@pytest.mark.parametrize("nbytes", SIZES)
def test_reuse_is_counted_as_a_hit_and_the_first_acquire_as_a_miss(pool: zcpool.Pool, nbytes: int) -> None:
    for _ in range(5):
        pool.acquire(nbytes).release()
    stats = balanced(pool, held=[])
    assert (stats.acquires, stats.hits, stats.misses, stats.releases) == (5, 4, 1, 5)


@pytest.mark.parametrize("keywords", [{}, {"timeout": 1}, {"timeout": None, "exclusive": False}, {"alignment": 4096}])
def test_reuse_is_a_hit_however_acquire_is_called(pool: zcpool.Pool, keywords: dict[str, Any]) -> None:
    pool.acquire(10000, **keywords).release()
    pool.acquire(nbytes=10000, **keywords).release()
    assert (pool.stats().hits, pool.stats().misses) == (1, 1)


@pytest.mark.parametrize("arguments", [(), (1, 2, 3, 4, 5, 6)])
def test_acquire_refuses_too_few_and_too_many_arguments(pool: zcpool.Pool, arguments: tuple[int, ...]) -> None:
    with pytest.raises(TypeError, match="acquire"):
        pool.acquire(*arguments)


def test_buffers_come_from_pools_only() -> None:
    with pytest.raises(TypeError, match="acquire"):
        zcpool.Buffer()


def test_memory_is_zero_when_it_comes_back_to_a_zeroing_pool(make_pool: MakePool) -> None:
    pool = make_pool(zero_on_release=True)
    for nbytes in (100, 100 * KIB, 2 * MIB):
        buf = pool.acquire(nbytes)
        address = buf.address
        buf.array(nbytes)[:] = 0xAB
        buf.release()
        again = pool.acquire(nbytes)
        assert again.address == address
        assert not again.array(nbytes).any()


def test_an_exclusive_block_has_a_region_of_its_own(make_pool: MakePool, counting: CountingBackend) -> None:
    pool = make_pool(counting)
    held = [pool.acquire(4096, exclusive=True) for _ in range(3)]
    assert [buf.offset for buf in held] == [0, 0, 0]
    assert counting.live_regions == 3


def test_exclusive_blocks_are_reused_by_exclusive_requests_alone(pool: zcpool.Pool) -> None:
    exclusive = pool.acquire(4096, exclusive=True)
    address = exclusive.address
    exclusive.release()
    carved = pool.acquire(4096)
    again = pool.acquire(4096, exclusive=True)
    assert carved.address != address
    assert again.address == address


def test_small_blocks_share_regions(make_pool: MakePool, counting: CountingBackend) -> None:
    pool = make_pool(counting)
    held = [pool.acquire(1000) for _ in range(5000)]
    assert counting.live_regions <= 6
    assert len({buf.address for buf in held}) == 5000


@pytest.mark.parametrize(
    ("arena_buckets", "carved"),
    [("none", 0), ("small", 1), ("medium", 2), ("large", 3), ("all", 4)],
)
def test_arenas_serve_the_buckets_that_were_asked_for(make_pool: MakePool, arena_buckets: str, carved: int) -> None:
    pool = make_pool(arena_buckets=arena_buckets, arena_bytes="64MiB")
    shared = []
    for nbytes in (64 * KIB, 2 * MIB, 5 * MIB, 17 * MIB):
        held = [pool.acquire(nbytes) for _ in range(8)]
        shared.append(pool.stats().handles < len(held))
        del held
        pool.trim()
    assert shared == [True] * carved + [False] * (4 - carved)


# Sizes


class Index:
    def __index__(self) -> int:
        return 100


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [("4096", 4096), ("1.5MiB", 3 * MIB // 2), ("64 kB", 64000), (np.int32(7), 7), (np.uint64(9), 9), (Index(), 100)],
)
def test_a_size_is_an_integer_or_a_string(pool: zcpool.Pool, size: Any, nbytes: int) -> None:
    assert pool.acquire(size).nbytes == nbytes


@pytest.mark.parametrize("size", [-1, -(1 << 63), -(1 << 64), "-1", "-4KiB", "four", "", "4 XiB", "0.3"])
def test_a_negative_or_malformed_size_is_a_value_error(pool: zcpool.Pool, size: Any) -> None:
    with pytest.raises(ValueError):
        pool.acquire(size)
    assert balanced(pool, held=[]).acquires == 0


@pytest.mark.parametrize("size", [1.0, None, b"4096", [1], 4096j])
def test_a_size_of_another_type_is_a_type_error(pool: zcpool.Pool, size: Any) -> None:
    with pytest.raises(TypeError):
        pool.acquire(size)


@pytest.mark.parametrize("timeout", [-1, -0.001, float("nan"), float("-inf")])
def test_a_timeout_that_is_not_a_duration_is_a_value_error(pool: zcpool.Pool, timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout"):
        pool.acquire(0, timeout=timeout)
    with pytest.raises(ValueError, match="timeout"):
        pool.acquire(100, timeout=timeout)


@pytest.mark.parametrize("size", [0, "0", "0 MiB", Index.__index__(Index()) - 100])
@pytest.mark.parametrize("options", [{}, {"alignment": 4096}, {"exclusive": True}, {"timeout": 1}, {"timeout": None}])
def test_zero_bytes_are_an_empty_buffer_that_never_reaches_the_backend(
    make_pool: MakePool, counting: CountingBackend, size: Any, options: dict[str, Any]
) -> None:
    pool = make_pool(counting)
    with pool.acquire(size, **options) as buf:
        assert (buf.nbytes, buf.capacity, len(buf), buf.bucket, buf.fd, buf.offset) == (0, 0, 0, "small", None, 0)
        assert buf.pool is pool
        assert bytes(buf) == b""
        assert buf.array(0).shape == (0,)
        assert buf.array((3, 0, 2), "float32").shape == (3, 0, 2)
    assert buf.released
    assert counting.calls == 0
    assert balanced(pool, held=[]).reserved_bytes == 0


def test_an_empty_buffer_takes_part_in_everything_a_buffer_does(pool: zcpool.Pool) -> None:
    buf = pool.acquire(0)
    with buf.pin(), buf.map("rw") as view:
        assert len(view) == 0
    buf.sync("to_device")
    buf.sync("from_device")
    signal = zcpool.Fence()
    view = memoryview(buf)
    buf.release(after=signal)
    assert buf.released
    assert view.nbytes == 0
    with pytest.raises(BufferError):
        memoryview(buf)


def test_zero_bytes_from_eight_threads(make_pool: MakePool, counting: CountingBackend) -> None:
    pool = make_pool(counting)

    def work(i: int) -> None:
        for _ in range(2000):
            buf = pool.acquire(0)
            assert buf.address != 0
            assert len(memoryview(buf)) == 0
            buf.release()

    in_threads(8, work)
    assert counting.calls == 0
    balanced(pool, held=[])


# Arrays


def test_an_array_of_a_pool_has_the_shape_and_dtype_asked_for(pool: zcpool.Pool) -> None:
    array = pool.array((3, 5), "float32")
    array[:] = 2.5
    assert (array.shape, array.dtype, float(array.sum())) == ((3, 5), np.dtype("float32"), 37.5)
    assert pool.array(7).shape == (7,)
    assert pool.array((0, 5), "int64").shape == (0, 5)
    assert pool.array((), "int64").shape == ()


def test_the_block_of_an_array_stays_as_long_as_any_view_of_it(pool: zcpool.Pool) -> None:
    array = pool.array(1000, "int32")
    part = array[10:20]
    del array
    stats = balanced(pool)
    assert stats.in_use_blocks + stats.retired_blocks == 1
    del part
    assert balanced(pool, held=[]).retired_blocks == 0


def test_a_negative_dimension_is_a_value_error(pool: zcpool.Pool) -> None:
    with pytest.raises(ValueError, match="negative"):
        pool.array((2, -3))


# Names and properties


def test_the_name_is_the_one_given(make_pool: MakePool) -> None:
    pool = make_pool(name="camera")
    assert pool.name == "camera"
    assert pool.stats().name == "camera"


def test_names_made_up_are_different(make_pool: MakePool) -> None:
    assert len({make_pool().name for _ in range(3)}) == 3


def test_the_properties_say_what_the_pool_was_made_with(make_pool: MakePool) -> None:
    backend = CountingBackend()
    pool = make_pool(backend, alignment=256, max_bytes="1MiB", max_handles=3)
    assert (pool.backend, pool.alignment, pool.max_bytes, pool.max_handles) == (backend, 256, MIB, 3)
    assert (make_pool(backend).max_bytes, make_pool(backend).max_handles) == (None, None)


def test_the_repr_of_a_pool_says_its_name_use_and_state(make_pool: MakePool) -> None:
    pool = make_pool(name="camera")
    buf = pool.acquire(MIB)
    assert "camera" in repr(pool)
    assert "1 block(s) in use (1 MiB)" in repr(pool)
    pool.freeze()
    assert "frozen" in repr(pool)
    pool.close()
    assert "closed" in repr(pool)
    buf.release()


def test_the_repr_of_a_buffer_says_its_size_and_state(pool: zcpool.Pool) -> None:
    buf = pool.acquire(100)
    assert "100 B" in repr(buf)
    view = memoryview(buf)
    assert "1 view(s)" in repr(buf)
    view.release()
    with buf.pin():
        assert "1 pin(s)" in repr(buf)
    buf.release()
    assert "released" in repr(buf)
    assert "empty" in repr(pool.acquire(0))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"arena_buckets": "tiny"}, ValueError),
        ({"max_bytes": 0}, ValueError),
        ({"max_bytes": -1}, ValueError),
        ({"max_bytes": 1.5}, TypeError),
        ({"max_handles": 0}, ValueError),
        ({"arena_bytes": 0}, ValueError),
        ({"arena_bytes": "x"}, ValueError),
        ({"on_pressure": 3}, TypeError),
        ({"no_such_option": 1}, TypeError),
    ],
)
def test_an_argument_out_of_its_range_is_refused(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        zcpool.Pool("posix", **options)


def test_an_alignment_beyond_the_backend_is_refused(counting: CountingBackend) -> None:
    backend = CountingBackend(max_alignment=256)
    with pytest.raises(ValueError, match="256"):
        zcpool.Pool(backend, alignment=512)
    with zcpool.Pool(backend) as pool:
        with pytest.raises(ValueError, match="256"):
            pool.acquire(100, alignment=512)
        assert pool.acquire(100, alignment=256).address % 256 == 0


def test_a_pool_that_was_never_initialised_says_so() -> None:
    pool = zcpool.Pool.__new__(zcpool.Pool)
    for use in (
        lambda: pool.acquire(10),
        lambda: pool.acquire(0),
        lambda: pool.reserve(10),
        pool.trim,
        pool.close,
        pool.stats,
        pool.freeze,
        lambda: pool.name,
        lambda: pool.closed,
    ):
        with pytest.raises(zcpool.PoolError, match="initialised"):
            use()
    assert "not initialised" in repr(pool)


def test_a_pool_is_initialised_once(pool: zcpool.Pool) -> None:
    with pytest.raises(zcpool.PoolError, match="already"):
        pool.__init__()  # type: ignore[misc]
    pool.acquire(100).release()


def test_a_subclass_of_a_pool_is_a_pool(backend_name: str) -> None:
    class Named(zcpool.Pool):
        def __init__(self) -> None:
            super().__init__(backend_name, name="of a subclass")

    with Named() as pool, pool.acquire(100) as buf:
        assert buf.pool is pool
        assert pool.name == "of a subclass"


# Closing


def test_leaving_with_closes_the_pool(backend_name: str) -> None:
    with zcpool.Pool(backend_name) as pool:
        assert not pool.closed
    assert pool.closed


def test_a_closed_pool_refuses_acquires_and_reserves(pool: zcpool.Pool) -> None:
    pool.close()
    for use in (lambda: pool.acquire(100), lambda: pool.acquire(0), lambda: pool.reserve(100), lambda: pool.array(3)):
        with pytest.raises(zcpool.PoolError, match="closed") as caught:
            use()
        assert not isinstance(caught.value, MemoryError)


def test_closing_again_does_nothing(pool: zcpool.Pool) -> None:
    for _ in range(3):
        pool.close()
    assert pool.trim() == 0


def test_closing_gives_back_cached_memory_at_once(make_pool: MakePool, counting: CountingBackend) -> None:
    pool = make_pool(counting)
    for nbytes in SIZES:
        pool.acquire(nbytes).release()
    pool.close()
    counting.check_empty()
    assert balanced(pool, held=[], backend=counting).reserved_bytes == 0


@pytest.mark.parametrize("nbytes", SIZES)
def test_a_live_buffer_stays_valid_when_its_pool_is_closed(
    make_pool: MakePool, counting: CountingBackend, nbytes: int
) -> None:
    pool = make_pool(counting)
    buf = pool.acquire(nbytes)
    view = memoryview(buf)
    view[-1] = 7
    pool.close()
    assert view[-1] == 7
    assert memoryview(buf)[-1] == 7
    view.release()
    buf.release()
    balanced(pool, held=[], backend=counting)
    counting.check_empty()


def test_a_closed_pool_gets_its_blocks_from_other_threads(make_pool: MakePool, counting: CountingBackend) -> None:
    pool = make_pool(counting)
    held = [pool.acquire(n) for n in SIZES * 4]
    pool.close()

    def work(i: int) -> None:
        for buf in held[i::4]:
            buf.release()

    in_threads(4, work)
    balanced(pool, held=[], backend=counting)
    counting.check_empty()


def acquire_for_ever(pool: zcpool.Pool, nbytes: int) -> None:
    while True:
        pool.acquire(nbytes).release()


def test_a_pool_can_be_closed_while_others_acquire(make_pool: MakePool, counting: CountingBackend) -> None:
    for _ in range(20):
        pool = make_pool(counting)
        started = threading.Barrier(4)

        def work(i: int, pool: zcpool.Pool = pool, started: threading.Barrier = started) -> None:
            started.wait()
            if i == 0:
                pool.close()
                return
            with pytest.raises(zcpool.PoolError, match="closed"):
                acquire_for_ever(pool, SIZES[i])

        in_threads(4, work)
        balanced(pool, held=[])
    counting.check_empty()


# Who may be dropped when

OWNERS = ("pool", "backend", "buffer", "view", "array")


@pytest.mark.parametrize("nbytes", [1000, 2 * MIB])
def test_pool_backend_buffer_and_views_can_be_dropped_in_any_order(nbytes: int) -> None:
    for order in itertools.permutations(OWNERS):
        owners: dict[str, Any] = {"backend": CountingBackend()}
        double = weakref.ref(owners["backend"])
        out = owners["backend"]._regions  # what is out, known also when the backend is gone
        owners["pool"] = zcpool.Pool(owners["backend"])
        owners["buffer"] = owners["pool"].acquire(nbytes)
        owners["view"] = memoryview(owners["buffer"])
        owners["array"] = owners["buffer"].array(nbytes // 4, "int32")
        owners["array"][:] = 0x01020304
        for last in order:
            if "view" in owners:
                assert owners["view"][0] == 4, order
            if "array" in owners:
                assert owners["array"][-1] == 0x01020304, order
            del owners[last]
        assert eventually(lambda: not out), order  # noqa: B023
        assert eventually(lambda: double() is None), order  # noqa: B023


def test_a_buffer_keeps_its_pool_and_the_pool_its_backend() -> None:
    pool = zcpool.Pool(CountingBackend(name="kept"))
    buf = pool.acquire(100)
    del pool
    gc.collect()
    assert buf.pool.backend.name == "kept"
    assert buf.pool.acquire(100).nbytes == 100


def test_buffers_pools_and_views_in_one_cycle_are_collected() -> None:
    backend = CountingBackend()
    for _ in range(50):
        knot: list[Any] = []
        pool = zcpool.Pool(backend, on_pressure=lambda pool, nbytes, knot=knot: None)
        knot += [knot, pool, pool.acquire(1000), memoryview(pool.acquire(2 * MIB))]
        del knot, pool
    gc.collect()
    assert eventually(lambda: not backend.live_regions)
    backend.check_empty()


def test_a_released_buffer_can_be_kept_after_its_pool_is_gone(backend_name: str) -> None:
    pool = zcpool.Pool(backend_name)
    buf = pool.acquire(100)
    buf.release()
    del pool
    gc.collect()
    buf.release()
    assert "released" in repr(buf)


def test_pools_that_come_and_go_leave_nothing_behind() -> None:
    backend = CountingBackend()
    for i in range(300):
        pool = zcpool.Pool(backend)
        kept = [pool.acquire(n) for n in SIZES[: 1 + i % 4]]
        del pool, kept
    assert eventually(lambda: not backend.live_regions)
    backend.check_empty()


def test_a_new_pool_starts_with_empty_books(backend_name: str) -> None:
    for _ in range(3):
        pool = zcpool.Pool(backend_name)
        fresh = balanced(pool, held=[])
        assert {getattr(fresh, name) for name in fresh.to_dict() if name not in ("name", "buckets")} == {0}
        kept = [pool.acquire(n) for n in SIZES]
        with pytest.raises(zcpool.OutOfMemory):
            pool.acquire(1 << 62)
        del kept
        assert at_home(pool)


def test_a_control_block_taken_over_does_not_keep_the_limits_of_the_last_pool(backend_name: str) -> None:
    pool = zcpool.Pool(backend_name, max_bytes=4096, max_handles=1)
    pool.freeze()
    del pool
    with zcpool.Pool(backend_name) as fresh:
        assert (fresh.max_bytes, fresh.max_handles, fresh.frozen, fresh.closed) == (None, None, False, False)
        held = [fresh.acquire(n) for n in SIZES]
        del held


def test_the_same_history_takes_the_same_backend_calls_in_every_pool() -> None:
    calls = []
    for _ in range(50):
        backend = CountingBackend()
        with zcpool.Pool(backend) as pool:
            for nbytes in [*SIZES, 3 * MIB, 9 * MIB, *SIZES]:
                pool.acquire(nbytes).release()
        calls.append(backend.asked)
    assert calls == [calls[0]] * 50
    assert len(calls[0]) == 6  # an arena, and one region for each size from 1 MiB on


def test_two_models_of_many_large_tensors_in_turn_call_no_backend(
    make_pool: MakePool, counting: CountingBackend
) -> None:
    # More sizes, and far more bytes, than a pool keeps without knowing that they recur.
    pool = make_pool(counting)
    models = [[(6 + i) * MIB // 2 for i in range(20)], [(6 + i) * MIB * 5 // 8 for i in range(20)]]
    calls = []
    for _ in range(10):
        for model in models:
            held = [pool.acquire(nbytes) for nbytes in model]
            del held
        calls.append(counting.calls)
    assert calls[-1] == calls[-5]
