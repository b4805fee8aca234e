"""Fences: what a released block may wait for, who owns the fds, and that no fence delays another."""

from __future__ import annotations

import copy
import gc
import inspect
import os
import pickle
import select
import socket
import threading
import time
import warnings
import weakref
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from harness import MIB, Pages, open_fds, readable, settle
from helpers import eventually

import zcpool

needs_eventfd = pytest.mark.skipif(not hasattr(select, "epoll"), reason="Fence.fileno() needs Linux's eventfd")


@pytest.fixture
def pool():
    with zcpool.Pool() as pool:
        yield pool


class Pipe:
    """A pipe whose reader is a fence: it is signalled by a byte."""

    def __init__(self):
        self.reader, self.writer = os.pipe()

    def signal(self):
        os.write(self.writer, b"x")

    def hang_up(self):
        os.close(self.writer)
        self.writer = -1

    def fileno(self):
        return self.reader

    def close(self):
        for fd in (self.reader, self.writer):
            try:
                os.close(fd)
            except OSError:
                pass


@pytest.fixture
def pipe():
    pipe = Pipe()
    yield pipe
    if pipe.writer >= 0:
        os.close(pipe.writer)
    try:
        os.close(pipe.reader)
    except OSError:
        pass  # the pool took it over


def is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def waiting(pool):
    return pool.stats().retired_blocks


# ---- what a fence does ---------------------------------------------------------------------------------------


def test_release_after_a_fence_closes_the_buffer_at_once(pool):
    b = pool.acquire(1000)
    fence = zcpool.Fence()
    b.release(after=fence)
    assert b.released
    with pytest.raises(BufferError, match="released"):
        memoryview(b)
    fence.set()


def test_a_block_that_waits_for_a_fence_is_not_handed_out(pool):
    b = pool.acquire(1000)
    address = b.address
    fence = zcpool.Fence()
    b.release(after=fence)
    assert address not in {h.address for h in [pool.acquire(1000) for _ in range(50)]}
    fence.set()
    assert address in {h.address for h in [pool.acquire(1000) for _ in range(50)]}


def test_waiting_blocks_are_counted_as_retired(pool):
    fence = zcpool.Fence()
    capacity = 0
    for nbytes in (100, 5000, 2 * MIB):
        b = pool.acquire(nbytes)
        capacity += b.capacity
        b.release(after=fence)
    s = pool.stats()
    assert (s.retired_blocks, s.retired_bytes, s.in_use_blocks) == (3, capacity, 0)
    assert s.reserved_bytes == s.in_use_bytes + s.cached_bytes + s.retired_bytes + s.slack_bytes
    fence.set()
    s = pool.stats()
    assert (s.retired_blocks, s.retired_bytes) == (0, 0)
    assert s.cached_bytes >= capacity


def test_a_block_waits_for_its_views_and_its_fence(pool):
    for first in ("view", "fence"):
        b = pool.acquire(1000)
        view = memoryview(b)
        fence = zcpool.Fence()
        b.release(after=fence)
        if first == "view":
            view.release()
        else:
            fence.set()
        assert waiting(pool) == 1
        view.release()
        fence.set()
        assert waiting(pool) == 0


def test_one_fence_lets_many_blocks_go(pool):
    fence = zcpool.Fence()
    for _ in range(1000):
        pool.acquire(1000).release(after=fence)
    assert waiting(pool) == 1000
    fence.set()
    assert waiting(pool) == 0


def test_one_fence_serves_several_pools():
    fence = zcpool.Fence()
    with zcpool.Pool() as one, zcpool.Pool() as two:
        one.acquire(1000).release(after=fence)
        two.acquire(1000).release(after=fence)
        fence.set()
        assert waiting(one) == waiting(two) == 0


def test_release_again_does_not_wait_for_another_fence(pool, pipe):
    b = pool.acquire(1000)
    b.release()
    b.release(after=pipe)
    b.release(after=zcpool.Fence())
    assert waiting(pool) == 0
    assert pool.stats().cached_blocks >= 1


def test_strict_release_with_a_fence_and_a_view_raises_and_takes_nothing_over(pool, pipe):
    b = pool.acquire(1000)
    view = memoryview(b)
    with pytest.raises(BufferError):
        b.release(pipe.reader, strict=True)
    assert not b.released
    assert is_open(pipe.reader)
    view.release()
    pipe.signal()
    b.release(pipe.reader, strict=True)
    assert waiting(pool) == 0


# ---- an fd ---------------------------------------------------------------------------------------------------


def test_an_fd_lets_the_block_go_when_it_becomes_readable(pool, pipe):
    pool.acquire(1000).release(after=pipe.reader)
    assert waiting(pool) == 1
    pipe.signal()
    assert waiting(pool) == 0


def test_an_fd_is_taken_over_and_closed_when_it_has_signalled(pool, pipe):
    pool.acquire(1000).release(after=pipe.reader)
    assert is_open(pipe.reader)
    pipe.signal()
    assert waiting(pool) == 0
    assert not is_open(pipe.reader)


def test_an_fd_that_has_signalled_already_delays_nothing(pool, pipe):
    pipe.signal()
    b = pool.acquire(2 * MIB)
    address = b.address
    b.release(after=pipe.reader)
    assert pool.acquire(2 * MIB).address == address
    assert not is_open(pipe.reader)


def test_an_acquire_looks_at_the_fences_before_it_asks_the_backend(pool, pipe):
    b = pool.acquire(2 * MIB)
    b.release(after=pipe.reader)
    pipe.signal()
    held = pool.acquire(2 * MIB)
    assert pool.stats().backend_allocations == 1
    held.release()


def test_trim_gives_back_what_a_signalled_fence_let_go(pool, pipe):
    pool.acquire(2 * MIB).release(after=pipe.reader)
    assert pool.trim() == 0
    pipe.signal()
    assert pool.trim() == 2 * MIB


def test_a_pipe_whose_writer_closes_counts_as_signalled(pool, pipe):
    pool.acquire(1000).release(after=pipe.reader)
    assert waiting(pool) == 1
    pipe.hang_up()
    assert waiting(pool) == 0
    assert not is_open(pipe.reader)


@pytest.mark.skipif(not hasattr(os, "eventfd"), reason="os.eventfd came with Python 3.10")
def test_an_eventfd_is_a_fence(pool):
    fd = os.eventfd(0)
    keep = os.dup(fd)
    pool.acquire(1000).release(after=fd)
    assert waiting(pool) == 1
    os.eventfd_write(keep, 1)
    assert waiting(pool) == 0
    os.close(keep)


def test_an_fd_somebody_else_closed_keeps_the_block_retired(pool, pipe):
    # Nobody can know any more when the device is done.
    b = pool.acquire(2 * MIB)
    address = b.address
    b.release(after=pipe.reader)
    os.close(pipe.reader)
    assert waiting(pool) == 1
    assert pool.acquire(2 * MIB).address != address
    pool.trim()
    assert waiting(pool) == 1


def test_an_empty_buffer_takes_the_fd_over_as_well(pool, pipe):
    # Whoever gave the fd away cannot know that there was nothing to wait for.
    pipe.signal()
    b = pool.acquire(0)
    b.release(after=pipe.reader)
    assert b.released
    pool.stats()
    assert not is_open(pipe.reader)


# ---- an object with fileno() ---------------------------------------------------------------------------------


def test_the_fd_of_an_object_is_duplicated_and_the_original_stays_open(pool, pipe):
    before = open_fds()
    pool.acquire(1000).release(after=pipe)
    assert open_fds() == before + 1
    pipe.signal()
    assert waiting(pool) == 0
    assert open_fds() == before
    assert is_open(pipe.reader)


def test_an_object_may_be_closed_and_dropped_while_its_fence_is_pending(pool):
    one, two = socket.socketpair()
    pool.acquire(1000).release(after=one)
    one.close()
    del one
    assert waiting(pool) == 1
    two.send(b"x")
    assert waiting(pool) == 0
    two.close()


@pytest.mark.parametrize("fd", [-1, 2**40, "3", None, 1.5])
def test_an_object_with_a_useless_fileno_is_refused(pool, fd):
    class Useless:
        def fileno(self):
            return fd

    b = pool.acquire(1000)
    with pytest.raises((ValueError, TypeError)):
        b.release(after=Useless())
    assert not b.released
    b.release(strict=True)


def test_an_object_whose_fileno_raises_passes_the_exception_on(pool, tmp_path):
    b = pool.acquire(1000)
    file = (tmp_path / "file").open("w")
    file.close()
    with pytest.raises(ValueError, match="closed file"):
        b.release(after=file)
    assert not b.released
    b.release(strict=True)


# ---- a Future ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["result", "exception", "cancel"])
def test_a_future_lets_the_block_go_however_it_ends(pool, end):
    future = Future()
    pool.acquire(1000).release(after=future)
    assert waiting(pool) == 1
    if end == "result":
        future.set_result(None)
    elif end == "exception":
        future.set_exception(KeyError())
    else:
        assert future.cancel()
    assert waiting(pool) == 0


@pytest.mark.parametrize("end", ["result", "exception", "cancel"])
def test_a_future_that_is_done_already_delays_nothing(pool, end):
    future = Future()
    if end == "result":
        future.set_result(None)
    elif end == "exception":
        future.set_exception(KeyError())
    else:
        future.cancel()
    b = pool.acquire(1000)
    b.release(after=future)
    assert b.released
    assert waiting(pool) == 0


def test_a_future_of_an_executor_lets_the_block_go(pool):
    go = threading.Event()
    with ThreadPoolExecutor(1) as executor:
        pool.acquire(1000).release(after=executor.submit(go.wait))
        assert waiting(pool) == 1
        go.set()
    assert waiting(pool) == 0


def test_the_future_of_an_event_loop_lets_the_block_go(pool):
    import asyncio

    async def main():
        future = asyncio.get_running_loop().create_future()
        pool.acquire(1000).release(after=future)
        assert waiting(pool) == 1
        future.set_result(None)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert waiting(pool) == 0

    asyncio.run(main())


def test_a_future_that_refuses_a_callback_changes_nothing(pool):
    class Refusing:
        def add_done_callback(self, callback):
            raise RuntimeError("no")

    b = pool.acquire(1000)
    with pytest.raises(RuntimeError, match="no"):
        b.release(after=Refusing())
    assert not b.released
    b.array(10)[:] = 1
    b.release(strict=True)
    assert waiting(pool) == 0


def test_a_future_that_is_dropped_without_an_end_keeps_the_block(pool):
    future = Future()
    pool.acquire(1000).release(after=future)
    with pytest.warns(ResourceWarning, match=r"dropped without having been set; 1 block"):
        del future
    assert waiting(pool) == 1


# ---- Fence ---------------------------------------------------------------------------------------------------


def test_a_fence_says_whether_it_is_set():
    fence = zcpool.Fence()
    assert not fence.is_set()
    assert "not set" in repr(fence)
    fence.set()
    assert fence.is_set()
    assert repr(fence) == "<zcpool.Fence set>"


def test_a_fence_can_be_set_again():
    fence = zcpool.Fence()
    for _ in range(3):
        fence.set()
    assert fence.is_set()


def test_a_fence_that_is_set_already_delays_nothing(pool):
    fence = zcpool.Fence()
    fence.set()
    b = pool.acquire(1000)
    b.release(after=fence)
    assert b.released
    assert waiting(pool) == 0
    assert pool.stats().cached_blocks >= 1


def test_a_fence_can_be_referenced_weakly():
    fence = zcpool.Fence()
    ref = weakref.ref(fence)
    del fence
    assert ref() is None


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"])
def test_fences_cannot_be_copied_or_pickled(duplicate):
    # A copy would own the same list of blocks, and the same fd.
    with pytest.raises(TypeError):
        duplicate(zcpool.Fence())


def test_a_fence_dropped_unset_warns_and_its_blocks_stay_retired(pool):
    fence = zcpool.Fence()
    b = pool.acquire(2 * MIB)
    address = b.address
    b.release(after=fence)
    pool.acquire(1000).release(after=fence)
    with pytest.warns(ResourceWarning, match=r"dropped without having been set; 2 block"):
        del fence
    assert waiting(pool) == 2
    assert pool.acquire(2 * MIB).address != address
    pool.trim()
    assert waiting(pool) == 2


def test_the_warning_about_a_dropped_fence_names_the_line_that_dropped_it(pool):
    fence = zcpool.Fence()
    pool.acquire(1000).release(after=fence)
    line = inspect.currentframe().f_lineno + 2
    with pytest.warns(ResourceWarning) as caught:
        del fence
    assert (caught[0].filename, caught[0].lineno) == (__file__, line)


def test_a_fence_dropped_unset_without_blocks_is_silent():
    fence = zcpool.Fence()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del fence


def test_a_fence_dropped_after_set_is_silent(pool):
    fence = zcpool.Fence()
    pool.acquire(1000).release(after=fence)
    fence.set()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del fence
    assert waiting(pool) == 0


def test_wait_tells_at_once_when_the_fence_is_set():
    fence = zcpool.Fence()
    fence.set()
    assert fence.wait() is True
    assert fence.wait(0) is True


@pytest.mark.parametrize("timeout", [0, 0.01, -1, 1e-9])
def test_wait_gives_up_after_its_timeout(timeout):
    assert zcpool.Fence().wait(timeout) is False


@pytest.mark.parametrize("timeout", [float("inf"), 1e300, 2**70])
def test_wait_takes_a_timeout_of_any_size(timeout):
    fence = zcpool.Fence()
    threading.Timer(0.05, fence.set).start()
    assert fence.wait(timeout) is True


@pytest.mark.parametrize("timeout", ["soon", object()])
def test_wait_refuses_what_is_no_number(timeout):
    with pytest.raises((TypeError, ValueError)):
        zcpool.Fence().wait(timeout)


def test_wait_refuses_a_timeout_that_is_no_number_of_seconds():
    with pytest.raises(ValueError):
        zcpool.Fence().wait(float("nan"))


def test_wait_returns_when_another_thread_sets_the_fence():
    fence = zcpool.Fence()
    results = []
    threads = [threading.Thread(target=lambda: results.append(fence.wait(30))) for _ in range(4)]
    for t in threads:
        t.start()
    time.sleep(0.02)
    assert results == []
    fence.set()
    for t in threads:
        t.join(30)
    assert results == [True] * 4


def test_wait_lets_signal_handlers_run():
    import signal

    class Interrupted(Exception):
        pass

    def interrupt(number, frame):
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        threading.Timer(0.05, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)).start()
        with pytest.raises(Interrupted):
            zcpool.Fence().wait(30)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_set_from_four_threads_at_once_lets_each_block_go_once(pool):
    for i in range(200):
        fence = zcpool.Fence()
        addresses = set()
        for _ in range(5):
            b = pool.acquire(1000)
            addresses.add(b.address)
            b.release(after=fence)
        barrier = threading.Barrier(4)

        def setter(fence=fence, barrier=barrier):
            barrier.wait()
            fence.set()

        threads = [threading.Thread(target=setter) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert waiting(pool) == 0
        if i % 50 == 0:
            held = [pool.acquire(1000) for _ in range(20)]
            assert len({h.address for h in held}) == 20
            del held
    s = pool.stats()
    assert s.reserved_bytes == s.cached_bytes + s.slack_bytes


def test_releases_race_with_set_and_no_block_is_lost(pool):
    for _ in range(100):
        fence = zcpool.Fence()
        buffers = [pool.acquire(1000) for _ in range(40)]
        barrier = threading.Barrier(3)

        def releaser(part, fence=fence, barrier=barrier):
            barrier.wait()
            for b in part:
                b.release(after=fence)

        def setter(fence=fence, barrier=barrier):
            barrier.wait()
            fence.set()

        threads = [threading.Thread(target=releaser, args=(buffers[i::2],)) for i in range(2)]
        threads.append(threading.Thread(target=setter))
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        s = pool.stats()
        assert s.retired_blocks == s.in_use_blocks == 0


@needs_eventfd
def test_fileno_becomes_readable_when_the_fence_is_set():
    fence = zcpool.Fence()
    assert not readable(fence)
    threading.Timer(0.05, fence.set).start()
    assert readable(fence, 30)


@needs_eventfd
def test_fileno_of_a_set_fence_is_readable_and_stays_so():
    fence = zcpool.Fence()
    fence.set()
    for _ in range(3):
        assert readable(fence)


@needs_eventfd
def test_fileno_is_one_fd_that_ends_with_the_fence():
    before = open_fds()
    fence = zcpool.Fence()
    assert open_fds() == before, "made on demand"
    assert fence.fileno() == fence.fileno()
    assert open_fds() == before + 1
    del fence
    assert open_fds() == before


@needs_eventfd
def test_fileno_is_made_once_by_threads_that_race_for_it():
    before = open_fds()
    for _ in range(100):
        fence = zcpool.Fence()
        barrier = threading.Barrier(4)
        fds = set()

        def ask(fence=fence, barrier=barrier, fds=fds):
            barrier.wait()
            fds.add(fence.fileno())

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert len(fds) == 1
    del fence, ask
    assert open_fds() == before


@needs_eventfd
def test_a_fence_is_waited_for_as_itself_and_not_through_its_fd(pool):
    before = open_fds()
    fence = zcpool.Fence()
    pool.acquire(1000).release(after=fence)
    assert open_fds() == before
    fence.set()
    assert waiting(pool) == 0


# ---- what is refused -----------------------------------------------------------------------------------------


def wrong(what, tmp_path):
    """Return something that is no fence."""
    if what == "closed":
        fd, other = os.pipe()
        os.close(fd)
        os.close(other)
        return fd
    if what == "file":
        return os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    if what == "directory":
        return os.open(tmp_path, os.O_RDONLY)
    return what


@pytest.mark.parametrize(
    "what",
    ["closed", "file", "directory", -1, -2, 2**31, 2**32 + 1, 2**40, 2**63, 2**64, 2**100, -(2**100)],
)
def test_an_fd_that_is_no_fence_is_a_value_error_and_nothing_happens(pool, tmp_path, what):
    after = wrong(what, tmp_path)
    b = pool.acquire(1000)
    before = pool.stats(), open_fds()
    with pytest.raises(ValueError, match=r"nothing has been released"):
        b.release(after=after)
    assert (pool.stats(), open_fds()) == before
    assert not b.released
    b.array(1000)[:] = 1
    b.release(strict=True)
    if what in ("file", "directory"):
        os.close(after)


def test_an_open_regular_file_is_a_value_error_and_nothing_happens(pool, tmp_path):
    b = pool.acquire(1000)
    before = open_fds()
    with (tmp_path / "file").open("w") as file:
        with pytest.raises(ValueError, match="always readable"):
            b.release(after=file)
    assert open_fds() == before
    assert not b.released
    b.release(strict=True)


@pytest.mark.parametrize("after", [True, False, 1.0, "3", b"3", object(), [], (1,), threading.Event()], ids=repr)
def test_what_is_no_fence_is_a_type_error_and_nothing_happens(pool, after):
    b = pool.acquire(1000)
    before = pool.stats()
    with pytest.raises(TypeError, match=r"Future or a zcpool\.Fence"):
        b.release(after=after)
    assert pool.stats() == before
    assert not b.released
    b.array(1000)[:] = 1
    b.release(strict=True)


@pytest.mark.parametrize("after", [True, "3", object()], ids=repr)
def test_what_is_no_fence_is_a_type_error_for_an_empty_buffer_too(pool, after):
    b = pool.acquire(0)
    with pytest.raises(TypeError):
        b.release(after=after)
    assert not b.released


def test_an_fd_that_cannot_be_duplicated_is_an_os_error_and_nothing_happens(pool, pipe):
    import resource

    b = pool.acquire(1000)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(pipe.reader, pipe.writer) + 20, limits[1]))
    try:
        while True:
            try:
                spare.append(os.dup(pipe.reader))
            except OSError:
                break
        with pytest.raises(OSError, match="open files"):
            b.release(after=pipe)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in spare:
            os.close(fd)
    assert not b.released
    b.release(strict=True)


# ---- stuck fences --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["fd", "object", "fence", "future"])
def test_one_stuck_fence_delays_no_other_release(pool, pipe, kind):
    stuck = {"fd": lambda: pipe.reader, "object": lambda: pipe, "fence": zcpool.Fence, "future": Future}[kind]()
    pool.acquire(5000).release(after=stuck)
    reader, writer = os.pipe()
    os.write(writer, b"x")
    for i in range(10_000):
        pool.acquire(5000).release(after=os.dup(reader) if i % 10 == 0 else None)
    assert waiting(pool) == 1
    s = pool.stats()
    assert s.backend_allocations == 1
    assert s.cached_bytes < 64 * 5000
    for fd in (reader, writer):
        os.close(fd)
    # Let it go, so that the next test starts clean.
    if kind in ("fd", "object"):
        pipe.signal()
    elif kind == "fence":
        stuck.set()
    else:
        stuck.set_result(None)
    assert waiting(pool) == 0


def test_a_fence_behind_many_stuck_ones_is_noticed(pool):
    stuck, good = Pipe(), Pipe()
    for i in range(300):
        pool.acquire(1000).release(after=os.dup(stuck.reader))
        if i == 20:
            b = pool.acquire(2 * MIB)
            b.release(after=os.dup(good.reader))
    good.signal()
    assert eventually(lambda: pool.stats().retired_bytes < MIB)
    stuck.signal()
    assert eventually(lambda: waiting(pool) == 0)
    stuck.close()
    good.close()


@pytest.mark.parametrize("position", [0, 100, 250, 499])
def test_an_acquire_at_the_limit_finds_the_one_fence_of_many_that_has_signalled(position):
    # It must succeed inside one call: an OutOfMemory that succeeds when it is repeated is a wrong one.
    stuck, good = Pipe(), Pipe()
    with zcpool.Pool(max_bytes=500 * 4096, arena_bytes=500 * 4096) as pool:
        buffers = []
        while len(buffers) < 500:
            buffers.append(pool.acquire(4096))
        for i, b in enumerate(buffers):
            b.release(after=os.dup(good.reader if i == position else stuck.reader))
        assert waiting(pool) == 500
        good.signal()
        try:
            pool.acquire(4096).release()
        finally:  # a thousand open fds would upset later tests
            stuck.signal()
            assert eventually(lambda: waiting(pool) == 0)
            stuck.close()
            good.close()


# ---- fds are neither leaked nor hoarded ----------------------------------------------------------------------


def test_ten_thousand_fenced_releases_leak_no_fd(pool):
    signalled = Pipe()
    signalled.signal()
    pool.acquire(1000).release(after=signalled)
    pool.stats()
    gc.collect()  # what earlier tests left behind may hold fds
    before = open_fds()
    for i in range(10_000):
        pool.acquire(1000).release(after=signalled if i % 2 else os.dup(signalled.reader))
        if i % 100 == 0:
            assert open_fds() <= before + 200
    assert eventually(lambda: waiting(pool) == 0)
    assert open_fds() <= before
    signalled.close()


def test_ten_thousand_refused_fences_leak_no_fd(pool, tmp_path):
    file = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    b = pool.acquire(1000)
    before = open_fds()
    for _ in range(10_000):
        with pytest.raises(ValueError):
            b.release(after=file)
    assert open_fds() == before
    os.close(file)
    b.release(strict=True)


def test_a_hundred_thousand_cycles_leave_the_fds_flat(pool):
    pool.acquire(1000).release()
    before = open_fds()
    for i in range(100_000):
        pool.acquire(1 + i % 3000).release()
        if i % 10_000 == 0:
            assert open_fds() == before
    assert open_fds() == before


def test_a_thousand_fences_leave_the_fds_flat(pool):
    before = open_fds()
    for _ in range(1000):
        fence = zcpool.Fence()
        pool.acquire(1000).release(after=fence)
        fence.fileno()
        fence.set()
        del fence
    assert open_fds() == before


# ---- fences that outlive the pool ----------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["close", "drop"])
@pytest.mark.parametrize("nbytes", [1000, 2 * MIB])
def test_a_fence_set_after_the_pool_has_ended_gives_the_memory_back(end, nbytes):
    backend = Pages()
    journal = backend.journal
    pool = zcpool.Pool(backend)
    fence = zcpool.Fence()
    pool.acquire(nbytes).release(after=fence)
    if end == "close":
        pool.close()
    else:
        del pool
    settle()
    assert len(journal.live) == 1
    fence.set()
    settle()
    assert journal.live == {}
    assert journal.faults == []


def test_a_fence_set_by_another_thread_after_the_pool_is_gone_gives_the_memory_back():
    backend = Pages()
    journal, ref = backend.journal, weakref.ref(backend)
    pool = zcpool.Pool(backend)
    fence = zcpool.Fence()
    for _ in range(10):
        pool.acquire(2 * MIB).release(after=fence)
    del pool, backend
    t = threading.Thread(target=fence.set)
    t.start()
    t.join()
    assert eventually(lambda: journal.live == {})
    assert eventually(lambda: ref() is None), "and the backend goes with it"
    assert journal.faults == []


@pytest.mark.parametrize("look", ["stats", "trim", "acquire", "close"])
def test_an_fd_signalled_after_close_gives_the_memory_back_at_the_next_look(pipe, look):
    backend = Pages()
    journal = backend.journal
    pool = zcpool.Pool(backend)
    pool.acquire(2 * MIB).release(after=pipe.reader)
    pool.close()
    assert len(journal.live) == 1
    pipe.signal()
    if look == "acquire":
        with pytest.raises(zcpool.PoolError):
            pool.acquire(1000)
    else:
        getattr(pool, look)()
    settle()
    assert journal.live == {}
    assert not is_open(pipe.reader)
    assert journal.faults == []


@pytest.mark.parametrize("look", ["stats", "trim", "acquire", "make", "drop"])
def test_an_fd_signalled_after_the_pool_is_gone_gives_the_memory_back_in_the_end(pipe, look):
    # Nobody can look at the fence but other pools: whatever they do on a slow path must do.
    backend = Pages()
    journal, ref = backend.journal, weakref.ref(backend)
    other = zcpool.Pool()
    pool = zcpool.Pool(backend)
    pool.acquire(2 * MIB).release(after=pipe.reader)
    del pool, backend
    settle()
    assert len(journal.live) == 1
    pipe.signal()
    if look == "stats":
        other.stats()
    elif look == "trim":
        other.trim()
    elif look == "acquire":
        other.acquire(2 * MIB)
    elif look == "make":
        zcpool.Pool()
    del other
    settle()
    assert journal.live == {}, "at the latest when another pool ends"
    assert journal.faults == []
    assert ref() is None
    assert not is_open(pipe.reader)


@pytest.mark.parametrize("look", ["stats", "trim", "acquire"])
def test_a_pool_that_lives_on_gives_back_what_a_dead_pools_fence_let_go(pipe, look):
    backend = Pages()
    journal = backend.journal
    pool = zcpool.Pool(backend)
    pool.acquire(2 * MIB).release(after=pipe.reader)
    del pool
    pipe.signal()
    with zcpool.Pool() as other:
        for _ in range(3):
            {"stats": other.stats, "trim": other.trim, "acquire": lambda: other.acquire(2 * MIB)}[look]()
        settle()
        assert journal.live == {}
    assert journal.faults == []


def test_a_stuck_fence_of_a_dead_pool_delays_no_free_of_another(pipe):
    dead = zcpool.Pool()
    dead.acquire(1000).release(after=pipe.reader)
    del dead
    backend = Pages()
    journal = backend.journal
    for end in ("close", "drop"):
        pool = zcpool.Pool(backend)
        view = memoryview(pool.acquire(2 * MIB))
        if end == "close":
            pool.close()
        else:
            del pool
        settle()
        assert len(journal.live) == 1
        view.release()
        settle()
        assert journal.live == {}
    pipe.signal()
    zcpool.Pool().close()


def test_many_fds_signalled_after_the_pool_is_gone_give_all_memory_back():
    backend = Pages()
    journal = backend.journal
    pipe = Pipe()
    pool = zcpool.Pool(backend)
    held = [pool.acquire(MIB) for _ in range(200)]
    for b in held:
        b.release(after=os.dup(pipe.reader))
    del pool, held, b
    pipe.signal()
    for _ in range(10):
        zcpool.Pool().close()
    settle()
    assert journal.live == {}
    assert sorted(journal.freed) == list(range(200))
    pipe.close()


def test_a_posix_pool_gives_back_what_waited_when_it_is_gone():
    fence = zcpool.Fence()
    pool = zcpool.Pool()
    pool.acquire(2 * MIB).release(after=fence)
    ref = weakref.ref(pool)
    del pool
    assert ref() is None
    fence.set()
    settle()
    with zcpool.Pool() as another:
        assert another.stats().reserved_bytes == 0


def test_a_waiter_is_woken_by_a_fence():
    fence = zcpool.Fence()
    with zcpool.Pool(max_bytes=MIB) as pool:
        pool.acquire(MIB).release(after=fence)
        threading.Timer(0.05, fence.set).start()
        assert pool.acquire(MIB, timeout=30).nbytes == MIB


def test_a_waiter_is_woken_by_an_fd(pipe):
    with zcpool.Pool(max_bytes=MIB) as pool:
        pool.acquire(MIB).release(after=pipe.reader)
        threading.Timer(0.05, pipe.signal).start()
        assert pool.acquire(MIB, timeout=30).nbytes == MIB


def test_a_waiter_is_woken_by_one_fence_of_more_than_it_can_sleep_on():
    stuck, good = Pipe(), Pipe()
    with zcpool.Pool(max_bytes=200 * MIB) as pool:
        held = [pool.acquire(MIB) for _ in range(200)]
        for i, b in enumerate(held):
            b.release(after=os.dup(good.reader if i == 150 else stuck.reader))
        threading.Timer(0.05, good.signal).start()
        try:
            assert pool.acquire(MIB, timeout=30).nbytes == MIB
        finally:
            stuck.signal()
            assert eventually(lambda: waiting(pool) == 0)
            stuck.close()
            good.close()
