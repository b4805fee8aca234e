"""Backends: what one written in Python may do, how they are found by name, and the alignment of posix memory."""

from __future__ import annotations

import ctypes
import errno
import importlib.metadata
import itertools
import mmap
import signal
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from books import balanced
from doubles.memory import CountingBackend
from helpers import MakePool, eventually, in_threads

import zcpool
from zcpool import _registry

KIB, MIB = 1 << 10, 1 << 20


class Giving(zcpool.PythonBackend):
    """A backend whose regions come from a function, and which remembers what it got back."""

    def __init__(self, give: Callable[[int, int], Any], **options: Any) -> None:
        super().__init__("giving", **options)
        self.give = give
        self.back: list[Any] = []

    def allocate(self, nbytes: int, alignment: int) -> Any:
        return self.give(nbytes, alignment)

    def free(self, memory: Any) -> None:
        self.back.append(memory)


def aligned(nbytes: int, alignment: int, off: int = 0) -> np.ndarray[Any, Any]:
    """Return bytes whose address is `off` more than a multiple of the alignment."""
    raw = np.zeros(nbytes + 2 * alignment + off, np.uint8)
    start = -raw.ctypes.data % alignment + off
    return raw[start : start + nbytes]


# Regions


@pytest.mark.parametrize(
    "give",
    [
        lambda nbytes, alignment: mmap.mmap(-1, nbytes),
        lambda nbytes, alignment: aligned(nbytes, alignment),
        lambda nbytes, alignment: aligned(nbytes, alignment).view(np.float64),
        lambda nbytes, alignment: aligned(nbytes, alignment).reshape(-1, 64),
        lambda nbytes, alignment: memoryview(aligned(nbytes, alignment)),
        lambda nbytes, alignment: mmap.mmap(-1, nbytes + 4096),
        lambda nbytes, alignment: (ctypes.c_char * nbytes).from_buffer(mmap.mmap(-1, nbytes)),
    ],
    ids=["mmap", "array", "doubles", "matrix", "memoryview", "larger", "ctypes"],
)
def test_a_region_may_be_any_writable_contiguous_buffer(make_pool: MakePool, give: Callable[[int, int], Any]) -> None:
    pool = make_pool(Giving(give))
    held = [pool.acquire(n) for n in (100, 5000, 2 * MIB)]
    for i, buf in enumerate(held):
        buf.array(buf.nbytes)[:] = i
    assert all((buf.array(buf.nbytes) == i).all() for i, buf in enumerate(held))
    balanced(pool, held=held)
    held.clear()


@pytest.mark.parametrize(
    "give",
    [
        lambda nbytes, alignment: mmap.mmap(-1, nbytes),
        aligned,
        lambda nbytes, alignment: memoryview(aligned(nbytes, alignment)),
    ],
    ids=["mmap", "array", "memoryview"],
)
def test_free_gets_what_allocate_returned(make_pool: MakePool, give: Callable[[int, int], Any]) -> None:
    given: list[Any] = []

    def remember(nbytes: int, alignment: int) -> Any:
        given.append(give(nbytes, alignment))
        return given[-1]

    backend = Giving(remember)
    pool = make_pool(backend)
    for n in (100, 2 * MIB):
        pool.acquire(n).release()
    pool.trim()
    assert sorted(map(id, backend.back)) == sorted(map(id, given))


@pytest.mark.parametrize(
    "give",
    [
        lambda nbytes, alignment: aligned(nbytes - 1, alignment),
        lambda nbytes, alignment: aligned(0, alignment),
        lambda nbytes, alignment: aligned(nbytes, alignment, off=8),
        lambda nbytes, alignment: bytes(nbytes),
        lambda nbytes, alignment: memoryview(aligned(nbytes, alignment)).toreadonly(),
        lambda nbytes, alignment: memoryview(aligned(2 * nbytes, alignment))[::2],
        lambda nbytes, alignment: None,
        lambda nbytes, alignment: 140_000_000,
        lambda nbytes, alignment: "memory",
        lambda nbytes, alignment: [0] * 10,
    ],
    ids=["short", "empty", "misaligned", "bytes", "read-only", "strided", "None", "int", "str", "list"],
)
@pytest.mark.parametrize("nbytes", [100, 2 * MIB])
def test_a_region_that_cannot_be_used_is_a_backend_error(
    make_pool: MakePool, give: Callable[[int, int], Any], nbytes: int
) -> None:
    pool = make_pool(Giving(give))
    for _ in range(3):
        with pytest.raises(zcpool.BackendError) as caught:
            pool.acquire(nbytes)
        assert isinstance(caught.value.__cause__, (TypeError, ValueError, BufferError))
    assert balanced(pool, held=[]).reserved_bytes == 0


def test_a_refused_region_is_let_go_of(make_pool: MakePool) -> None:
    refused: list[weakref.ref[Any]] = []

    def give(nbytes: int, alignment: int) -> Any:
        array = aligned(nbytes - 64, alignment)
        refused.append(weakref.ref(array))
        return array

    pool = make_pool(Giving(give))
    with pytest.raises(zcpool.BackendError):
        pool.acquire(2 * MIB)
    assert refused
    assert all(ref() is None for ref in refused)


# Errors


def test_a_memory_error_of_the_backend_becomes_out_of_memory(make_pool: MakePool, counting: CountingBackend) -> None:
    pool = make_pool(counting)
    counting.fail_next(100, MemoryError("no more"))
    with pytest.raises(zcpool.OutOfMemory, match="no more"):
        pool.acquire(100)


@pytest.mark.parametrize("error", [OSError(5, "I/O error"), RuntimeError("no"), KeyError("x"), ValueError()])
def test_another_error_of_the_backend_becomes_a_backend_error_with_its_cause(
    make_pool: MakePool, counting: CountingBackend, error: Exception
) -> None:
    pool = make_pool(counting)
    counting.fail_next(100, error)
    with pytest.raises(zcpool.BackendError) as caught:
        pool.acquire(2 * MIB)
    assert caught.value.__cause__ is error
    assert caught.value.call == "allocate"
    assert type(error).__name__ in caught.value.meaning
    assert not isinstance(caught.value, MemoryError)
    counting.fail_no_more()
    assert pool.acquire(2 * MIB).nbytes == 2 * MIB


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_in_the_backend_goes_through_at_once(
    make_pool: MakePool, counting: CountingBackend, error: type[BaseException]
) -> None:
    pool = make_pool(counting)
    pool.acquire(MIB).release()
    counting.fail_next(1, error)
    calls = counting.calls
    with pytest.raises(error):
        pool.acquire(50 * MIB, timeout=10)
    assert counting.calls == calls + 1
    balanced(pool, held=[], backend=counting)


@pytest.mark.parametrize("base", [MemoryError, OSError])
@pytest.mark.parametrize("failures", [1, 2, 3, 100])
@pytest.mark.parametrize("nbytes", [100, 2 * MIB])
def test_errors_of_the_backend_are_not_kept(
    make_pool: MakePool, base: type[Exception], failures: int, nbytes: int
) -> None:
    class Transient(base):  # type: ignore[misc, valid-type]
        pass

    living: weakref.WeakSet[Transient] = weakref.WeakSet()
    left = itertools.count(failures, -1)

    def noted(error: Transient) -> Transient:
        living.add(error)
        return error

    def give(count: int, alignment: int) -> Any:
        if next(left) > 0:
            raise noted(Transient("not yet"))  # no name for it here: that would be a cycle with its traceback
        return aligned(count, alignment)

    pool = make_pool(Giving(give))
    for _ in range(10):
        try:
            pool.acquire(nbytes)
        except zcpool.PoolError:
            pass
        try:
            pool.reserve(nbytes, 2)
        except zcpool.PoolError:
            pass
    assert not living


def test_an_error_of_the_backend_is_not_kept_when_the_waiting_for_memory_is_interrupted(make_pool: MakePool) -> None:
    class Full(MemoryError):
        pass

    living: weakref.WeakSet[Full] = weakref.WeakSet()

    def noted(error: Full) -> Full:
        living.add(error)
        return error

    def give(count: int, alignment: int) -> Any:
        raise noted(Full("for good"))

    def interrupt(number: int, frame: Any) -> None:
        raise InterruptedError

    pool = make_pool(Giving(give))
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        with pytest.raises(InterruptedError):
            pool.acquire(2 * MIB, timeout=50)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not living


def test_an_error_in_free_is_reported_and_the_books_balance(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clumsy(CountingBackend):
        def free(self, memory: memoryview) -> None:
            super().free(memory)
            raise RuntimeError("dropped it")

    reported: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda report: reported.append(str(report.exc_value)))
    backend = Clumsy()
    pool = make_pool(backend)
    for n in (100, 2 * MIB):
        pool.acquire(n).release()
    pool.trim()
    pool.close()
    monkeypatch.undo()
    assert reported == ["dropped it"] * 2
    assert balanced(pool, held=[], backend=backend).reserved_bytes == 0


def test_a_backend_that_defines_nothing_says_what_is_missing(make_pool: MakePool) -> None:
    class Empty(zcpool.PythonBackend):
        pass

    with pytest.raises(zcpool.BackendError, match="Empty must define allocate"):
        make_pool(Empty()).acquire(100)


def test_the_base_of_all_backends_gives_no_memory_and_does_not_crash(make_pool: MakePool) -> None:
    with pytest.raises(zcpool.BackendError) as caught:
        make_pool(zcpool.Backend()).acquire(100)
    assert caught.value.code == errno.EINVAL


def test_a_backend_that_forgot_to_initialise_its_base_works_or_says_so(make_pool: MakePool) -> None:
    class Forgetful(zcpool.PythonBackend):
        def __init__(self) -> None:
            pass

        def allocate(self, nbytes: int, alignment: int) -> Any:
            return mmap.mmap(-1, nbytes)

    pool = make_pool(Forgetful())
    held = [pool.acquire(n) for n in (100, 2 * MIB)]
    pool.close()
    in_threads(1, lambda i: held.clear())
    assert pool.stats().reserved_bytes == 0


@pytest.mark.parametrize("option", ["granularity", "alignment", "max_alignment"])
@pytest.mark.parametrize("bad", [0, -64, 3, 96])
def test_a_granularity_or_alignment_is_a_power_of_two(option: str, bad: int) -> None:
    with pytest.raises(ValueError, match=option):
        zcpool.PythonBackend(**{option: bad})


# What is asked of a backend


def test_a_backend_is_asked_for_its_granule_and_alignment(make_pool: MakePool) -> None:
    backend = CountingBackend(granularity=4096, alignment=8192, largest_region=8 * MIB)
    pool = make_pool(backend)
    held = [pool.acquire(n, exclusive=e) for n in (1, 5000, 300_000, MIB, 7 * MIB) for e in (False, True)]
    assert all(nbytes % 4096 == 0 and alignment >= 8192 for nbytes, alignment in backend.asked)
    assert all(buf.offset % 4096 == 0 for buf in held)
    held.clear()


def test_sync_reaches_the_backend_with_the_piece_of_the_region(make_pool: MakePool) -> None:
    backend = CountingBackend(needs_sync=True)
    pool = make_pool(backend)
    held = [pool.acquire(1000) for _ in range(3)]
    buf = max(held, key=lambda buf: buf.offset)
    buf.sync("to_device")
    buf.sync("from_device")
    assert backend.synced == [(buf.offset, 1000, "to_device"), (buf.offset, 1000, "from_device")]
    held.clear()


def test_map_syncs_what_its_mode_asks_for(make_pool: MakePool) -> None:
    backend = CountingBackend(needs_sync=True)
    buf = make_pool(backend).acquire(1000)
    directions = []
    for mode in ("r", "w", "rw"):
        with buf.map(mode) as view:
            assert view.readonly == (mode == "r")
        directions.append([direction for _, _, direction in backend.synced])
        backend.synced.clear()
    assert directions == [["from_device"], ["to_device"], ["from_device", "to_device"]]


def test_coherent_memory_is_never_synced(make_pool: MakePool, counting: CountingBackend) -> None:
    buf = make_pool(counting).acquire(1000)
    buf.sync("to_device")
    with buf.map("rw"):
        pass
    assert counting.synced == []


def test_an_error_in_sync_is_a_backend_error(make_pool: MakePool) -> None:
    class Broken(CountingBackend):
        def sync(self, memory: memoryview, offset: int, nbytes: int, direction: str) -> None:
            raise OSError("cache controller")

    buf = make_pool(Broken(needs_sync=True)).acquire(1000)
    with pytest.raises(zcpool.BackendError, match="cache controller") as caught:
        buf.sync("to_device")
    assert caught.value.call == "sync"


def test_a_backend_may_use_its_pool(make_pool: MakePool) -> None:
    class Curious(CountingBackend):
        pool: zcpool.Pool | None = None

        def use(self) -> None:
            if self.pool is not None:
                self.pool.acquire(100).release()
                self.pool.stats()

        def allocate(self, nbytes: int, alignment: int) -> memoryview:
            self.use()
            return super().allocate(nbytes, alignment)

        def free(self, memory: memoryview) -> None:
            self.use()
            super().free(memory)

    backend = Curious()
    pool = make_pool(backend)
    kept = pool.acquire(100)
    pool.acquire(100).release()
    backend.pool = pool
    for _ in range(20):
        pool.acquire(5 * MIB).release()
        pool.trim()
    backend.pool = None
    kept.release()


def test_a_handle_says_where_the_block_is(make_pool: MakePool) -> None:
    pool = make_pool("posix")
    for buf in [pool.acquire(1000) for _ in range(3)] + [pool.acquire(2 * MIB)]:
        handle = buf.handle()
        assert (handle.pointer, handle.fd, handle.offset) == (buf.address, None, buf.offset)
        assert handle.nbytes in (buf.nbytes, buf.capacity)
        assert handle.owner is buf
        assert f"{handle.pointer:#x}" in repr(handle)


# By name


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A registry of the test's own, and a function that plants entry points in it."""
    monkeypatch.setattr(_registry, "_factories", {})

    class Point:
        def __init__(self, name: str, load: Callable[[], Any]) -> None:
            self.name, self.load = name, load

    class Points(list):  # type: ignore[type-arg]
        def select(self, group: str) -> list[Any]:
            return list(self) if group == "zcpool.backends" else []

        def get(self, group: str, default: Any = ()) -> Any:
            return self.select(group) or default

    def plant(**loaders: Callable[[], Any]) -> None:
        points = Points(Point(name, load) for name, load in loaders.items())
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda: points)

    return plant


def test_an_unknown_name_is_a_value_error_that_names_the_known(registry: Any) -> None:
    registry(acme=lambda: CountingBackend)
    with pytest.raises(ValueError, match=r"unknown backend 'npu'.*'acme'.*'posix'"):
        zcpool.Pool("npu")


@pytest.mark.parametrize("bad", [None, 3, b"posix", object(), CountingBackend, ["posix"]])
def test_what_is_neither_a_name_nor_a_backend_is_a_type_error(bad: Any) -> None:
    with pytest.raises(TypeError, match="backend"):
        zcpool.Pool(bad)


def test_a_registered_backend_is_made_with_the_options(registry: Any) -> None:
    zcpool.backends.register("acme", lambda **options: CountingBackend("acme", **options))
    with zcpool.Pool("acme", granularity=4096) as pool:
        assert (pool.backend.name, pool.backend.granularity) == ("acme", 4096)
        assert pool.acquire(1).capacity == 4096
    assert "acme" in zcpool.backends.names()
    assert "acme" in zcpool.backends.available()


def test_a_name_registered_again_means_the_last_one(registry: Any) -> None:
    zcpool.backends.register("acme", lambda: CountingBackend("old"))
    zcpool.backends.register("acme", lambda: CountingBackend("new"))
    with zcpool.Pool("acme") as pool:
        assert pool.backend.name == "new"


def test_only_a_callable_can_be_registered(registry: Any) -> None:
    with pytest.raises(TypeError, match="callable"):
        zcpool.backends.register("acme", CountingBackend())  # type: ignore[arg-type, unused-ignore]


def test_a_factory_that_makes_something_else_is_unavailable(registry: Any) -> None:
    zcpool.backends.register("acme", lambda: "a string")  # type: ignore[arg-type, return-value, unused-ignore]
    with pytest.raises(zcpool.BackendUnavailable, match="a string"):
        zcpool.Pool("acme")


def test_a_backend_that_cannot_work_here_says_why(registry: Any) -> None:
    def missing() -> zcpool.Backend:
        raise zcpool.BackendUnavailable("dlopen", 0, "libacme.so is not installed")

    zcpool.backends.register("acme", missing)
    assert "acme" in zcpool.backends.names()
    assert "acme" not in zcpool.backends.available()
    assert "libacme.so is not installed" in zcpool.backends.unavailable()["acme"]
    with pytest.raises(zcpool.BackendUnavailable, match=r"libacme\.so is not installed"):
        zcpool.Pool("acme")


def test_packages_add_backends_by_entry_points(registry: Any) -> None:
    registry(acme=lambda: CountingBackend)
    assert zcpool.backends.names() == ["acme", "posix"]
    with zcpool.Pool("acme", granularity=128) as pool:
        assert pool.acquire(1).capacity == 128


def test_an_entry_point_is_not_loaded_before_it_is_used(registry: Any) -> None:
    loaded = []
    registry(acme=lambda: loaded.append(1))
    zcpool.backends.names()
    zcpool.Pool("posix").close()
    assert loaded == []


def test_a_broken_entry_point_spoils_no_other(registry: Any) -> None:
    def broken() -> Any:
        raise ImportError("no module named acme")

    registry(acme=broken, fine=lambda: CountingBackend)
    assert zcpool.backends.available() == ["fine", "posix"]
    assert zcpool.backends.unavailable() == {"acme": "no module named acme"}
    with pytest.raises(ImportError, match="acme"):
        zcpool.Pool("acme")


def test_an_entry_point_does_not_take_the_name_of_a_backend_that_comes_with_zcpool(registry: Any) -> None:
    registry(posix=lambda: CountingBackend)
    assert zcpool.backends.names() == ["posix"]
    with zcpool.Pool() as pool:
        assert not isinstance(pool.backend, CountingBackend)


def test_options_beside_a_ready_backend_are_a_type_error(counting: CountingBackend) -> None:
    with pytest.raises(TypeError, match="granularity"):
        zcpool.Pool(counting, granularity=64)


def test_a_backend_serves_several_pools(make_pool: MakePool, counting: CountingBackend) -> None:
    pools = [make_pool(counting) for _ in range(3)]
    held = [pool.acquire(MIB) for pool in pools]
    assert counting.live_regions == 3
    pools[0].close()
    held.pop(0).release()
    assert eventually(lambda: counting.live_regions == 2)
    held.clear()


# The alignment of posix memory

ALIGNMENTS = [1 << power for power in range(6, 22)]  # 64 to 2 MiB
SIZES = [1, 100, 5000, 100 * KIB, MIB, 5 * MIB]


@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("arena_buckets", ["small", "none", "all"])
def test_the_alignment_of_a_pool_holds_on_every_path(make_pool: MakePool, alignment: int, arena_buckets: str) -> None:
    pool = make_pool("posix", alignment=alignment, arena_buckets=arena_buckets, arena_bytes="16MiB")
    pool.reserve(5000, 3)
    for _ in range(2):
        held = [pool.acquire(n, exclusive=exclusive) for n in SIZES * 3 for exclusive in (False, True)]
        assert [buf.address % alignment for buf in held] == [0] * len(held)
        for buf in held:
            memoryview(buf)[-1] = 1
        held.clear()


@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("arena_buckets", ["small", "none", "all"])
def test_the_alignment_of_an_acquire_holds_on_every_path(
    make_pool: MakePool, alignment: int, arena_buckets: str
) -> None:
    pool = make_pool("posix", arena_buckets=arena_buckets, arena_bytes="16MiB")
    pool.reserve(5000, 3, alignment=alignment)
    pool.reserve(5000, 3, alignment=alignment, exclusive=True)
    for _ in range(2):
        between = []  # blocks without that alignment, so that the next free byte is not aligned by chance
        held = []
        for nbytes in SIZES * 3:
            between.append(pool.acquire(nbytes))
            for exclusive in (False, True):
                held.append(pool.acquire(nbytes, alignment=alignment, exclusive=exclusive))
        assert [buf.address % alignment for buf in held] == [0] * len(held)
        for buf in held:
            memoryview(buf)[-1] = 1
        balanced(pool, held=held + between)
        held.clear()
        between.clear()


def test_a_smaller_alignment_than_the_pools_gives_the_pools(make_pool: MakePool) -> None:
    pool = make_pool("posix", alignment=4096)
    for alignment in (1, 2, 64, 1024):
        assert pool.acquire(100, alignment=alignment).address % 4096 == 0


def test_an_aligned_block_does_not_serve_as_one_of_a_larger_alignment(make_pool: MakePool) -> None:
    pool = make_pool("posix")
    for _ in range(3):
        held = [pool.acquire(3000, alignment=a) for a in (64, 128, 256, 512, 1024, 2048, 4096) for _ in range(3)]
        assert all(buf.address % a == 0 for buf, a in zip(held[::-1], (4096, 4096, 4096, 2048, 2048, 2048, 1024)))
        for i in (5, 2, 11, 7, 0, 19, 3):
            held[i].release()
        for alignment in (4096, 512, 64, 2048):
            assert pool.acquire(3000, alignment=alignment).address % alignment == 0
        held.clear()


def test_huge_pages_align_large_regions_to_2_mib(make_pool: MakePool) -> None:
    pool = make_pool("posix", huge_pages=True)
    assert pool.backend.huge_pages
    for nbytes in (2 * MIB, 5 * MIB, 20 * MIB):
        buf = pool.acquire(nbytes)
        assert buf.address % (2 * MIB) == 0
        array = buf.array(nbytes)
        array[:: 64 * KIB] = 9
        assert (array[:: 64 * KIB] == 9).all()
    assert pool.acquire(100).nbytes == 100


def test_huge_pages_are_off_unless_asked_for(make_pool: MakePool) -> None:
    assert not make_pool("posix").backend.huge_pages


def test_an_option_the_posix_backend_does_not_know_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="no_such_option"):
        zcpool.Pool("posix", no_such_option=1)


def test_what_the_kernel_refuses_is_out_of_memory_with_its_code(make_pool: MakePool) -> None:
    pool = make_pool("posix")
    with pytest.raises(zcpool.OutOfMemory, match="posix_memalign") as caught:
        pool.acquire(1 << 45)
    assert caught.value.details["code"] == errno.ENOMEM
