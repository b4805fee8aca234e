"""ZCPOOL_DEBUG and zero_on_release: what they find, that they find nothing where there is nothing, and zeros."""

from __future__ import annotations

import ctypes
import gc
import inspect
import random
import threading
import warnings

import numpy as np
import pytest
from harness import MIB, Pages, run_python, settle

import zcpool

FAULT = "zcpool: memory fault"


@pytest.fixture
def debug(monkeypatch):
    monkeypatch.setenv("ZCPOOL_DEBUG", "1")


@pytest.fixture
def quiet(capfd):
    """Fail when a fault is reported: on stderr, or as a warning (which the test settings make an error)."""
    yield
    assert FAULT not in capfd.readouterr().err


class Dirty(Pages):
    """Memory that holds neither zeros nor any pattern when it comes."""

    def allocate(self, nbytes, alignment):
        memory = super().allocate(nbytes, alignment)
        memory[:] = b"\x5a" * nbytes
        return memory


def poke(address, byte=1):
    """Write where one should not."""
    ctypes.memset(address, byte, 1)


def peek(address, nbytes):
    return ctypes.string_at(address, nbytes)


def acquire_address(pool, nbytes, address, tries=100):
    """Acquire until the block at an address comes; everything else is released at the end."""
    others = []
    for _ in range(tries):
        b = pool.acquire(nbytes)
        if b.address == address:
            return b
        others.append(b)
    pytest.fail("the block was not handed out again")


# ---- writing past the end ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("debug")
@pytest.mark.parametrize("nbytes", [1, 100, 5000, 2 * MIB + 1])
@pytest.mark.parametrize("where", ["first", "last"])
def test_a_write_past_the_end_is_printed_at_release(capfd, nbytes, where):
    with zcpool.Pool() as pool:
        b = pool.acquire(nbytes)
        assert b.capacity > nbytes
        at = nbytes if where == "first" else b.capacity - 1
        poke(b.address + at)
        assert capfd.readouterr().err == ""
        address = b.address
        b.release()
        err = capfd.readouterr().err
        with pytest.warns(RuntimeWarning):
            pool.acquire(1)
    assert FAULT in err
    assert f"block of {nbytes} bytes at {address:#x}" in err
    assert "past its end" in err
    assert f"at byte {at}" in err


@pytest.mark.usefixtures("debug")
def test_a_write_past_the_end_is_a_runtime_warning_at_the_next_acquire(capfd):
    with zcpool.Pool(name="frames") as pool:
        b = pool.acquire(100)
        poke(b.address + 100)
        b.release()
        with pytest.warns(RuntimeWarning, match=r"pool 'frames'.*block of 100 bytes.*past its end"):
            pool.acquire(5000)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pool.acquire(5000)  # said once
    assert capfd.readouterr().err.count(FAULT) == 1


@pytest.mark.usefixtures("debug", "capfd")
def test_the_warning_names_the_line_that_acquired_next():
    with zcpool.Pool() as pool:
        b = pool.acquire(100)
        poke(b.address + 100)
        b.release()
        line = inspect.currentframe().f_lineno + 2
        with pytest.warns(RuntimeWarning) as caught:
            pool.acquire(5000)
    assert (caught[0].filename, caught[0].lineno) == (__file__, line)


@pytest.mark.usefixtures("debug", "capfd")
def test_a_write_past_the_end_is_a_runtime_warning_at_the_latest_when_the_pool_ends():
    pool = zcpool.Pool(name="frames")
    b = pool.acquire(100)
    poke(b.address + 100)
    del b
    with pytest.warns(RuntimeWarning, match="pool 'frames'.*past its end"):
        del pool


@pytest.mark.usefixtures("debug", "capfd")
def test_a_write_past_the_end_is_noticed_when_the_last_view_dies():
    with zcpool.Pool() as pool:
        b = pool.acquire(100)
        view = memoryview(b)
        poke(b.address + 100)
        b.release()
        pool.acquire(5000)  # nothing to say yet
        view.release()
        with pytest.warns(RuntimeWarning, match="past its end"):
            pool.acquire(5000)


@pytest.mark.usefixtures("debug")
def test_a_warning_made_an_error_loses_no_memory(capfd):
    with zcpool.Pool() as pool:
        b = pool.acquire(100)
        poke(b.address + 100)
        b.release()
        with pytest.raises(RuntimeWarning):
            pool.acquire(100)
        gc.collect()
        s = pool.stats()
        assert s.in_use_blocks == 0
        assert s.reserved_bytes == s.cached_bytes + s.slack_bytes


# ---- writing after release -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("debug")
@pytest.mark.parametrize("nbytes", [1, 100, 5000, 2 * MIB])
@pytest.mark.parametrize("where", ["first", "last"])
def test_a_write_after_release_is_reported_when_the_block_is_handed_out_again(capfd, nbytes, where):
    with zcpool.Pool() as pool:
        b = pool.acquire(nbytes)
        address = b.address
        at = 0 if where == "first" else b.capacity - 1
        b.release()
        poke(address + at)
        with pytest.warns(RuntimeWarning, match="written after its release"):
            acquire_address(pool, nbytes, address)
    err = capfd.readouterr().err
    assert err.count(FAULT) == 1
    assert f"at {address:#x}" in err
    assert f"at byte {at}" in err


@pytest.mark.usefixtures("debug", "capfd")
def test_a_write_through_an_address_kept_from_a_dead_array_is_reported():
    with zcpool.Pool() as pool:
        a = pool.array(1000)
        address = a.ctypes.data
        del a
        poke(address + 500)
        with pytest.warns(RuntimeWarning, match="after its release, at byte 500"):
            acquire_address(pool, 1000, address)


@pytest.mark.usefixtures("debug")
def test_released_memory_does_not_show_what_was_in_it():
    with zcpool.Pool() as pool:
        b = pool.acquire(1000)
        address, capacity = b.address, b.capacity
        b.array(1000)[:] = 42
        b.release()
        assert peek(address, capacity) == bytes([peek(address, 1)[0]]) * capacity
        assert 42 not in peek(address, capacity)
        assert set(peek(address, capacity)) != {0}, "zeros would look like something"


# ---- when it is on -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, "", "0"])
def test_without_it_nothing_is_checked(monkeypatch, quiet, value):
    if value is None:
        monkeypatch.delenv("ZCPOOL_DEBUG", raising=False)
    else:
        monkeypatch.setenv("ZCPOOL_DEBUG", value)
    with zcpool.Pool() as pool:
        b = pool.acquire(100)
        poke(b.address + 100)
        b.release()
        poke(pool.acquire(100).address)
        pool.acquire(100)


def test_it_is_read_when_a_pool_is_made(monkeypatch, capfd):
    monkeypatch.delenv("ZCPOOL_DEBUG", raising=False)
    plain = zcpool.Pool()
    monkeypatch.setenv("ZCPOOL_DEBUG", "1")
    strict = zcpool.Pool()
    monkeypatch.delenv("ZCPOOL_DEBUG")
    for pool in (plain, strict):
        b = pool.acquire(100)
        poke(b.address + 100)
        b.release()
    with pytest.warns(RuntimeWarning):
        strict.acquire(100)
    plain.acquire(100)
    assert capfd.readouterr().err.count(FAULT) == 1


@pytest.mark.usefixtures("debug", "quiet")
def test_the_books_are_the_same_with_it():
    with zcpool.Pool() as pool:
        held = [pool.acquire(n) for n in (100, 5000, 2 * MIB)]
        s = pool.stats()
        assert (s.in_use_blocks, s.acquires, s.requested_bytes) == (3, 3, 5100 + 2 * MIB)
        held.clear()
        pool.acquire(100).release()
        s = pool.stats()
        assert (s.in_use_blocks, s.acquires, s.releases) == (0, 4, 4)
        assert s.reserved_bytes == s.cached_bytes + s.slack_bytes


@pytest.mark.usefixtures("debug", "quiet")
def test_a_fixed_pool_can_be_debugged():
    with zcpool.FixedPool(5000, 2) as pool:
        for _ in range(5):
            with pool.acquire() as b:
                b.array(5000)[:] = 1


# ---- the user's memory is not touched ------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["debug", "zero", "both"])
def test_retired_memory_is_not_wiped_under_its_views(monkeypatch, quiet, mode):
    if mode != "zero":
        monkeypatch.setenv("ZCPOOL_DEBUG", "1")
    with zcpool.Pool(zero_on_release=mode != "debug") as pool:
        b = pool.acquire(1000)
        a, tensor = b.array(1000), np.from_dlpack(b)
        a[:] = 42
        b.release()
        assert (a == 42).all()
        a[:] = 43
        del a
        assert (tensor == 43).all()
        pin = pool.acquire(1000)
        address = pin.address
        pin.array(1000)[:] = 44
        held = pin.pin()
        pin.release()
        assert peek(address, 1000) == bytes([44]) * 1000
        held.release()
        assert 44 not in peek(address, 1000)


@pytest.mark.usefixtures("debug", "quiet")
def test_writing_to_retired_memory_through_a_view_is_no_fault():
    with zcpool.Pool() as pool:
        for _ in range(10):
            with pool.acquire(1000) as b:
                a = b.array(1000)
            a[:] = 7
            del a


@pytest.mark.usefixtures("debug", "quiet")
@pytest.mark.parametrize("nbytes", [1, 63, 64, 100, 128, 5000, MIB - 1, MIB, 3 * MIB + 5])
def test_every_byte_asked_for_may_be_written(nbytes):
    with zcpool.Pool() as pool:
        for _ in range(3):
            with pool.acquire(nbytes) as b:
                b.array(nbytes)[:] = 0xFF
        for smaller in (nbytes // 2 or 1, nbytes):
            with pool.acquire(smaller) as b:
                b.array(smaller)[:] = 0xFF
        pool.trim()


# ---- no false alarms -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("debug", "quiet")
@pytest.mark.parametrize("zero", [False, True], ids=["pattern", "zeros"])
def test_a_block_cut_from_joined_ones_is_no_fault(zero):
    # Two small blocks, one of them used, are joined and cut again as a larger one.
    with zcpool.Pool(Dirty(), zero_on_release=zero) as pool:
        keep = pool.acquire(64)
        for size in (128, 1024, 4096):
            b = pool.acquire(size)
            b.array(size)[:] = 9
            b.release()
            pool.trim()
            with pool.acquire(2 * size) as larger:
                larger.array(2 * size)[:] = 9
            pool.trim()
            with pool.acquire(size // 2) as smaller:
                smaller.array(size // 2)[:] = 9
        del keep


@pytest.mark.usefixtures("debug", "quiet")
@pytest.mark.parametrize("zero", [False, True], ids=["pattern", "zeros"])
@pytest.mark.parametrize("buckets", ["small", "all", "none"])
def test_random_traffic_is_no_fault(zero, buckets):
    chance = random.Random(7)
    with zcpool.Pool(Dirty(), zero_on_release=zero, arena_buckets=buckets, arena_bytes="2MiB") as pool:
        held = []
        for _ in range(6000):
            action = chance.random()
            if action < 0.5:
                b = pool.acquire(int(2 ** chance.uniform(0, 17)), alignment=chance.choice([None, None, 256, 2048]))
                if chance.random() < 0.5:
                    b.array(b.nbytes)[:] = 0xA5
                held.append(b)
                if chance.random() < 0.1:
                    held.append(memoryview(b))
            elif held:
                held.pop(chance.randrange(len(held)))
            if action > 0.98:
                pool.trim(chance.choice([0, 100_000]))
            if len(held) > 60:
                del held[::2]
        held.clear()
        b = None
        s = pool.stats()
        assert s.in_use_blocks == s.retired_blocks == 0


@pytest.mark.usefixtures("debug", "quiet")
def test_random_traffic_of_threads_is_no_fault():
    errors = []

    def work(seed):
        chance = random.Random(seed)
        try:
            for _ in range(1500):
                n = int(2 ** chance.uniform(0, 16))
                held.append(pool.acquire(n))
                held[-1].array(n)[:] = seed
                if len(held) > 30:
                    held.pop(chance.randrange(20))
                if chance.random() < 0.01:
                    pool.trim()
        except BaseException as error:
            errors.append(error)

    with zcpool.Pool(Dirty(), zero_on_release=True) as pool:
        held = []
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        held.clear()
    assert errors == []


@pytest.mark.usefixtures("debug", "quiet")
def test_memory_that_goes_back_to_the_backend_and_comes_again_is_no_fault():
    backend = Pages()
    with zcpool.Pool(backend) as pool:
        for i in range(50):
            with pool.acquire(2 * MIB - i * 1000) as b:
                b.array(100)[:] = 1
            if i % 3 == 0:
                pool.trim()
    settle()
    assert backend.journal.live == {}


# ---- zero_on_release -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1, 100, 5000, MIB, 3 * MIB + 5])
@pytest.mark.parametrize("debugging", [False, True])
def test_zero_on_release_overwrites_the_whole_block(monkeypatch, quiet, nbytes, debugging):
    monkeypatch.setenv("ZCPOOL_DEBUG", "1" if debugging else "0")
    with zcpool.Pool(zero_on_release=True) as pool:
        b = pool.acquire(nbytes)
        address, capacity = b.address, b.capacity
        b.array(nbytes)[:] = 42
        b.release()
        assert peek(address, capacity) == bytes(capacity)
        with acquire_address(pool, nbytes, address) as again:
            assert bytes(again) == bytes(nbytes)


def test_zero_on_release_overwrites_when_the_last_view_dies():
    with zcpool.Pool(zero_on_release=True) as pool:
        with pool.acquire(1000) as b:
            a = b.array(1000)
            address = b.address
        a[:] = 42
        del a
        assert peek(address, 1000) == bytes(1000)


def test_zero_on_release_overwrites_when_the_fence_is_set():
    with zcpool.Pool(zero_on_release=True) as pool:
        b = pool.acquire(1000)
        address = b.address
        b.array(1000)[:] = 42
        fence = zcpool.Fence()
        b.release(after=fence)
        assert peek(address, 1000) == bytes([42]) * 1000, "the device may still read it"
        fence.set()
        assert peek(address, 1000) == bytes(1000)


def test_zero_on_release_overwrites_before_memory_goes_back_to_the_backend():
    class Looking(Pages):
        seen: list

        def free(self, memory):
            self.seen.append(memory[:])
            super().free(memory)

    backend = Looking()
    backend.seen = []
    with zcpool.Pool(backend, zero_on_release=True) as pool:
        b = pool.acquire(2 * MIB)
        b.array(2 * MIB)[:] = 42
        pool.close()
        b.release()
    settle()
    assert backend.seen == [bytes(2 * MIB)]


def test_without_zero_on_release_memory_is_left_as_it_is(monkeypatch):
    monkeypatch.setenv("ZCPOOL_DEBUG", "0")
    with zcpool.Pool() as pool:
        b = pool.acquire(1000)
        address = b.address
        b.array(1000)[:] = 42
        b.release()
        assert peek(address, 1000) == bytes([42]) * 1000


@pytest.mark.usefixtures("debug")
def test_faults_are_found_with_zero_on_release_too(capfd):
    with zcpool.Pool(zero_on_release=True) as pool:
        b = pool.acquire(100)
        address = b.address
        poke(address + 100)
        b.release()
        with pytest.warns(RuntimeWarning, match="past its end"):
            pool.acquire(5000)
        poke(address + 50)
        with pytest.warns(RuntimeWarning, match="after its release, at byte 50"):
            acquire_address(pool, 100, address)
    assert capfd.readouterr().err.count(FAULT) == 2


# ---- which line acquired what is still held ------------------------------------------------------------------


@pytest.mark.usefixtures("debug")
def test_a_pool_that_ends_with_pins_names_the_lines_that_acquired():
    pool = zcpool.Pool(name="frames")
    pool.acquire(1000).release()
    first = pool.acquire(1000).pin()
    here = inspect.currentframe().f_lineno
    second = pool.acquire(2 * MIB).pin()
    with pytest.warns(ResourceWarning, match="dropped without"):
        del first, second
    with pytest.warns(ResourceWarning, match="pool 'frames' ends while 2 block") as caught:
        del pool
    text = next(str(w.message) for w in caught if "ends while" in str(w.message))
    assert f"{__file__}:{here - 1}" in text
    assert f"{__file__}:{here + 1}" in text
    assert f"{__file__}:{here - 2}" not in text, "that block went home"
    assert "ZCPOOL_DEBUG" not in text


@pytest.mark.usefixtures("debug")
def test_a_line_that_acquired_an_array_is_named_too():
    pool = zcpool.Pool()
    b = pool.array(1000).base
    here = inspect.currentframe().f_lineno - 1
    while not isinstance(b, zcpool.Buffer):
        b = getattr(b, "base", None) if isinstance(b, np.ndarray) else b.obj
    pin = b.pin()
    with pytest.warns(ResourceWarning, match="dropped without"):
        del pin, b
    with pytest.warns(ResourceWarning, match=f"{__file__}:{here}"):
        del pool


def test_without_debug_the_warning_says_how_to_get_lines(monkeypatch):
    monkeypatch.delenv("ZCPOOL_DEBUG", raising=False)
    pool = zcpool.Pool()
    pin = pool.acquire(1000).pin()
    with pytest.warns(ResourceWarning):
        del pin
    with pytest.warns(ResourceWarning, match="set ZCPOOL_DEBUG=1"):
        del pool


def test_lines_are_named_at_exit():
    done = run_python(
        "import zcpool\npool = zcpool.Pool(name='frames')\nb = pool.acquire(1000)\npin = b.pin()\n",
        "-W",
        "always::ResourceWarning",
        env={"ZCPOOL_DEBUG": "1"},
    )
    assert done.returncode == 0
    assert "pool 'frames' ends while 1 block(s)" in done.stderr
    assert "acquired at <string>:3" in done.stderr


@pytest.mark.usefixtures("debug", "quiet")
def test_the_lines_of_a_long_run_take_no_more_room_than_its_blocks():
    import tracemalloc

    with zcpool.Pool() as pool:
        for _ in range(500):
            pool.acquire(1000).release()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            for _ in range(20_000):
                pool.acquire(1000).release()
            grown = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
    assert grown < 10_000
