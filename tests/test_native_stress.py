"""Native threads hammer pools through the C door: see tests/native/stress.c for what may not happen.

ZCPOOL_STRESS_SECONDS is how long all of it takes together, about; ZCPOOL_STRESS_OPS is the size of a thread's life.
"""

from __future__ import annotations

import gc
import itertools
import random
import threading

import pytest
from books import balanced
from harness import fork_child, join_child, open_fds, run_python
from helpers import MakePool, eventually
from native.hammer import FOUND, MIB, SECONDS, Hammer

import zcpool

SHARE = SECONDS / 10  # there are ten runs

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
    pytest.mark.watchdog(120 + 10 * SECONDS),
]

ways = pytest.mark.parametrize("fast", [False, True], ids=["table", "inlined"])


@pytest.fixture(scope="session")
def hammer(tmp_path_factory: pytest.TempPathFactory) -> Hammer:
    return Hammer(tmp_path_factory.mktemp("stress"))


def empty(pool: zcpool.Pool) -> bool:
    """Trim, and say whether nothing is left: a block that was lost keeps its region."""
    pool.trim()
    return pool.stats().reserved_bytes == 0


IMPATIENT = """
import tempfile, time, zcpool
from pathlib import Path
from native.hammer import Hammer
with tempfile.TemporaryDirectory() as folder:
    hammer = Hammer(Path(folder))
hammer.patience(1)
"""


def test_a_hammer_that_hangs_ends_as_one_that_has_found_something() -> None:
    done = run_python(IMPATIENT + "time.sleep(30)")
    assert done.returncode == FOUND
    assert "out of patience" in done.stderr


def test_a_hammer_that_hangs_after_a_run_does_so_too() -> None:
    done = run_python(IMPATIENT + "assert hammer.run([zcpool.Pool()], 0, fast=True, ops=100) == []; time.sleep(30)")
    assert done.returncode == FOUND


def test_a_hammer_whose_threads_get_on_has_all_the_time_it_needs() -> None:
    done = run_python(
        IMPATIENT
        + """
pool, ops, took = zcpool.Pool(), 10_000, 0
hammer.patience(3)
while took < 4:  # a round of more than its patience, however fast the machine is
    start = time.monotonic()
    assert hammer.run([pool], 0, fast=True, threads=2, ops=ops, largest=4096, trims=0) == []
    took, ops = time.monotonic() - start, 2 * ops
"""
    )
    assert done.returncode == 0, done.stderr


@ways
@pytest.mark.parametrize("limit", [None, 24 * MIB], ids=["no limit", "limit"])
def test_threads_that_come_and_go(hammer: Hammer, make_pool: MakePool, fast: bool, limit: int | None) -> None:
    pool = make_pool(max_bytes=limit)
    fds = open_fds()
    assert hammer.run([pool], SHARE, fast=fast) == []
    stats = balanced(pool)
    assert limit is None or stats.peak_reserved_bytes <= limit
    assert limit is None or stats.failures > 0
    assert open_fds() <= fds + 8  # the waiters' eventfds are kept
    assert empty(pool)


@ways
def test_several_pools_and_python_threads(hammer: Hammer, make_pool: MakePool, fast: bool) -> None:
    pools = [make_pool(), make_pool(alignment=512), make_pool(max_bytes=32 * MIB), make_pool(arena_buckets="all")]
    rng = random.Random(1)
    kept: list[zcpool.Buffer] = []

    def python() -> None:
        pool = rng.choice(pools)
        for _ in range(20):
            try:
                kept.append(pool.acquire(rng.choice([100, 256, 5000, MIB])))
            except zcpool.OutOfMemory:
                break
        for buf in kept[::2]:
            view = memoryview(buf)
            view[0] = view[-1] = 7
            del view
        rng.shuffle(kept)
        del kept[:15]
        assert balanced(pool, at_rest=False)
        if len(kept) > 50:
            kept.clear()

    errors: list[BaseException] = []
    stop = threading.Event()

    def another() -> None:
        mine = random.Random(2)
        try:
            while not stop.is_set():
                pool = mine.choice(pools)
                with pool.acquire(mine.choice([100, 256, 1000])) as buf, buf.pin():
                    buf.array(10)[:] = 1
                if mine.random() < 0.05:
                    pool.trim()
        except zcpool.OutOfMemory:
            pass
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=another)
    thread.start()
    calls = itertools.count()

    def meanwhile() -> None:
        if next(calls) < max(20, SHARE * 100):
            python()
        else:
            kept.clear()  # the run ends when nothing is out any more
            stop.set()

    try:
        assert hammer.run(pools, SHARE, fast=fast, meanwhile=meanwhile) == []
    finally:
        stop.set()
        thread.join()
        kept.clear()
    assert errors == []
    gc.collect()
    for pool in pools:
        assert empty(pool)


@ways
def test_a_pool_that_is_closed_in_the_middle(hammer: Hammer, make_pool: MakePool, fast: bool) -> None:
    pools = [make_pool(), make_pool(max_bytes=16 * MIB)]
    calls = itertools.count()

    def meanwhile() -> None:
        if next(calls) == 30:
            for pool in pools:
                pool.close()
            hammer.closed(True)

    try:
        found = hammer.run(pools, max(SHARE, 0.2), fast=fast, meanwhile=meanwhile)
    finally:
        hammer.closed(False)
    assert found == []
    for pool in pools:
        pool.close()
        # Whoever was in the middle of giving back has done so.
        assert eventually(lambda pool=pool: pool.stats().reserved_bytes == 0)


@ways
def test_a_fork_in_the_middle(hammer: Hammer, make_pool: MakePool, fast: bool) -> None:
    pools = [make_pool(), make_pool(max_bytes=32 * MIB)]
    children: list[int] = []

    def child(use: bool) -> None:
        for pool in pools:
            assert pool.stats().reserved_bytes == 0
            if not use:
                continue
            held = [pool.acquire(n) for n in (10, 256, 512, 1000, 3 * MIB)]
            for buf in held:
                buf.array(buf.nbytes)[:] = 1
            assert len({buf.address for buf in held}) == 5
            del held, buf
            gc.collect()
            pool.close()
            assert pool.stats().reserved_bytes == 0

    def meanwhile() -> None:
        if len(children) < max(4, SHARE * 10):
            status, complaints = join_child(*fork_child(child, len(children) % 2 == 0))
            assert (status, complaints) == (0, "")
            children.append(status)

    assert hammer.run(pools, max(SHARE, 0.2), fast=fast, meanwhile=meanwhile) == []
    assert children
    for pool in pools:
        assert empty(pool)


def test_a_child_may_hammer_as_well(hammer: Hammer, make_pool: MakePool) -> None:
    pool = make_pool()
    assert hammer.run([pool], 0, fast=True, ops=2000) == []

    def child() -> None:
        assert hammer.run([pool], 0, fast=True, ops=2000) == []
        assert empty(pool)

    status, complaints = join_child(*fork_child(child))
    assert (status, complaints) == (0, "")
    assert empty(pool)
