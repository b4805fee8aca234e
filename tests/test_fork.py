"""Fork: a child has empty pools of its own, leaves its parent's memory alone, and never hangs."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import select
import signal
import sys
import threading
import time
import warnings

import numpy as np
import pytest
from harness import MIB, Pages, fork_child, in_child, join_child, readable, run_quietly, settle
from helpers import eventually

import zcpool
from zcpool import _registry

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),  # Python 3.12: it is the point
]


@pytest.fixture
def pool():
    with zcpool.Pool() as pool:
        yield pool


def use(pool, rounds=50):
    """Do a bit of everything."""
    for i in range(rounds):
        with pool.acquire(1 + 997 * i) as b:
            a = b.array(b.nbytes)
            a[:] = i % 251
            assert (a == i % 251).all()
        held = [pool.acquire(n) for n in (10, 1000, 100_000, 2 * MIB)]
        assert len({h.address for h in held}) == 4
        del held, a
    pool.reserve(5000, 3)
    pool.trim()
    s = pool.stats()
    assert s.reserved_bytes == s.in_use_bytes + s.cached_bytes + s.retired_bytes + s.slack_bytes


# ---- the child's books ---------------------------------------------------------------------------------------


def test_a_childs_books_start_at_zero(pool):
    held = [pool.acquire(n) for n in (100, 5000, 2 * MIB)]
    view = memoryview(held[0])
    pool.acquire(1000).release()

    def child():
        books = pool.stats().to_dict()
        buckets = books.pop("buckets")
        for fields in (books, *buckets):
            del fields["name"]
            assert set(fields.values()) == {0}, fields

    in_child(child)
    assert pool.stats().in_use_blocks == 3
    del view


def test_a_childs_books_balance_after_use(pool):
    held = [pool.acquire(n) for n in (100, 5000, 2 * MIB)]

    def child():
        use(pool)
        s = pool.stats()
        assert s.in_use_blocks == 0
        assert s.acquires == s.releases == 250

    in_child(child)
    assert pool.stats().in_use_blocks == len(held)


def test_a_child_is_not_bound_by_what_its_parent_holds():
    with zcpool.Pool(max_bytes=4 * MIB, max_handles=4) as pool:
        held = [pool.acquire(MIB) for _ in range(4)]

        def child():
            mine = [pool.acquire(MIB) for _ in range(4)]
            with pytest.raises(zcpool.OutOfMemory):
                pool.acquire(MIB)
            del mine

        in_child(child)
        with pytest.raises(zcpool.OutOfMemory):
            pool.acquire(MIB)
        del held


def test_a_child_can_make_close_and_drop_pools(pool):
    def child():
        for _ in range(20):
            with zcpool.Pool() as another:
                use(another, 2)
        pool.close()
        with pytest.raises(zcpool.PoolError, match="closed"):
            pool.acquire(1)

    in_child(child)
    assert not pool.closed
    use(pool)


def test_a_frozen_pool_is_frozen_in_the_child(pool):
    pool.freeze()

    def child():
        assert pool.frozen
        with pytest.raises(zcpool.OutOfMemory, match="frozen"):
            pool.acquire(1000)
        pool.thaw()
        use(pool)

    in_child(child)
    assert pool.frozen


def test_a_fixed_pool_has_blocks_of_its_own_in_the_child():
    with zcpool.FixedPool(5000, 2) as pool:
        held = pool.acquire()
        parents = {held.address}
        with pool.acquire() as other:
            parents.add(other.address)

        def child():
            mine = [pool.acquire(), pool.acquire()]
            assert not parents & {m.address for m in mine}
            with pytest.raises(zcpool.Exhausted):
                pool.acquire()
            held.release()
            with pytest.raises(zcpool.Exhausted):
                pool.acquire()
            mine.pop().release()
            pool.acquire()

        in_child(child)
        with pool.acquire() as other:
            assert other.address in parents - {held.address}
        held.release()


def test_a_fixed_pool_stays_fixed_for_threads_that_race_in_the_child():
    class Slow(Pages):
        def allocate(self, nbytes, alignment):
            time.sleep(0.02)
            return super().allocate(nbytes, alignment)

    with zcpool.FixedPool(MIB, 2, backend=Slow()) as pool:

        def child():
            held, exhausted = [], []
            barrier = threading.Barrier(5)

            def work():
                barrier.wait()
                try:
                    held.append(pool.acquire(timeout=0.5))
                except zcpool.Exhausted as error:
                    exhausted.append(error)

            threads = [threading.Thread(target=work) for _ in range(5)]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
            assert (len(held), len(exhausted)) == (2, 3)

        in_child(child)


def test_a_fixed_pool_that_was_closed_is_closed_in_the_child():
    pool = zcpool.FixedPool(5000, 2)
    pool.close()

    def child():
        with pytest.raises(zcpool.PoolError, match="closed"):
            pool.acquire()

    in_child(child)


def test_grandchildren_start_empty_too(pool):
    held = pool.acquire(5000)

    def grandchild(of_child):
        assert pool.stats().in_use_blocks == 0
        use(pool, 5)
        of_child.release()
        held.release()
        assert pool.stats().in_use_blocks == 0

    def child():
        of_child = pool.acquire(5000)
        of_child.array(5000)[:] = 1
        in_child(grandchild, of_child)
        assert pool.stats().in_use_blocks == 1
        assert (of_child.array(5000) == 1).all()

    in_child(child)
    assert pool.stats().in_use_blocks == 1


def test_the_parent_is_unaffected_by_what_its_child_does(pool):
    held = [pool.acquire(n) for n in (100, 5000, 2 * MIB)]
    for i, b in enumerate(held):
        b.array(b.nbytes)[:] = i
    books = pool.stats()

    def child():
        for b in held:
            b.array(b.nbytes)[:] = 99
            b.release()
        held.clear()
        use(pool)
        pool.trim()
        pool.close()

    in_child(child)
    assert pool.stats() == books
    for i, b in enumerate(held):
        assert (b.array(b.nbytes) == i).all(), "memory of the host is copied on write"
    use(pool)


# ---- inherited buffers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [100, 5000, 2 * MIB])
def test_a_posix_buffer_is_readable_in_the_child(pool, nbytes):
    b = pool.acquire(nbytes)
    b.array(nbytes)[:] = 7
    view = memoryview(b)

    def child():
        assert not b.released
        assert bytes(view) == b"\7" * nbytes
        assert (b.array(nbytes) == 7).all()
        assert (np.from_dlpack(b) == 7).all()
        with b.map("r") as mapped:
            assert mapped[0] == 7
        assert b.handle().pointer == b.address

    in_child(child)


def test_an_inherited_buffer_is_written_in_a_copy(pool):
    b = pool.acquire(5000)
    b.array(5000)[:] = 7

    def child():
        b.array(5000)[:] = 8
        assert (b.array(5000) == 8).all()

    in_child(child)
    assert (b.array(5000) == 7).all()


@pytest.mark.parametrize("how", ["release", "drop", "with", "strict"])
def test_giving_up_an_inherited_buffer_changes_nothing_in_the_childs_pool(pool, how):
    held = [pool.acquire(n) for n in (100, 5000, 2 * MIB)]
    addresses = {b.address for b in held}

    def child():
        before = pool.stats()
        while held:
            b = held.pop()
            if how == "release":
                b.release()
                assert b.released
            elif how == "strict":
                b.release(strict=True)
            elif how == "with":
                with b:
                    pass
            del b
        assert pool.stats() == before
        mine = [pool.acquire(n) for n in (100, 5000, 2 * MIB) for _ in range(20)]
        assert not addresses & {m.address for m in mine}, "the parent's memory is not handed out"

    in_child(child)
    assert len(held) == 3


def test_what_the_parent_has_cached_is_not_handed_out_in_the_child(pool):
    held = [pool.acquire(n) for n in (100, 5000, 2 * MIB) for _ in range(10)]
    addresses = {b.address for b in held}
    del held

    def child():
        mine = [pool.acquire(n) for n in (100, 5000, 2 * MIB) for _ in range(10)]
        assert not addresses & {m.address for m in mine}

    in_child(child)


def test_views_of_an_inherited_buffer_end_quietly_in_the_child(pool):
    b = pool.acquire(5000)
    kept = [memoryview(b), b.array(100), np.from_dlpack(b), b.__dlpack__()]
    b.release()

    def child():
        kept.clear()
        gc.collect()
        assert pool.stats().cached_blocks == 0
        use(pool)

    in_child(child)
    assert pool.stats().retired_blocks == 1
    kept.clear()
    assert pool.stats().retired_blocks == 0


def test_repr_says_that_a_buffer_is_inherited(pool):
    b = pool.acquire(5000)

    def child():
        assert "inherited through fork" in repr(b)
        assert "inherited" not in repr(pool.acquire(5000))

    in_child(child)
    assert "inherited" not in repr(b)


def test_an_inherited_pin_may_be_released_in_the_child():
    pool = zcpool.Pool()
    b = pool.acquire(5000)
    pin = b.pin()

    def child():
        nonlocal pool, pin, b
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            pin.release()
            del pin, b
            gc.collect()
            del pool
            gc.collect()
        assert [str(w.message) for w in caught] == []

    try:
        in_child(child)
        assert "1 pin(s)" in repr(b)
    finally:
        pin.release()
    b.release(strict=True)


def test_a_pin_of_the_parent_does_not_count_as_a_leak_of_the_child():
    pool = zcpool.Pool()
    pin = pool.acquire(5000).pin()

    def child():
        nonlocal pool
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with pool.acquire(100).pin():
                pass
            del pool
        assert caught == []

    try:
        in_child(child)
    finally:
        pin.release()


USES = {
    "memoryview": memoryview,
    "array": lambda b: b.array(1),
    "map": lambda b: b.map("r"),
    "pin": lambda b: b.pin().release(),
    "sync": lambda b: b.sync("to_device"),
    "handle": lambda b: b.handle(),
    "address": lambda b: b.address,
    "fd": lambda b: b.fd,
    "offset": lambda b: b.offset,
    "dlpack": lambda b: b.__dlpack__(),
}


@pytest.mark.parametrize("use_of", USES)
def test_memory_that_does_not_survive_fork_is_refused_in_the_child(use_of):
    backend = Pages(survives_fork=False)
    with zcpool.Pool(backend) as pool, pool.acquire(5000) as b:

        def child():
            with pytest.raises(BufferError, match=r"parent.*acquire a new one"):
                USES[use_of](b)
            use(pool, 3)

        in_child(child)
        USES[use_of](b)


def test_memory_that_does_not_survive_fork_is_refused_by_a_mapping_made_before():
    with zcpool.Pool(Pages(survives_fork=False)) as pool, pool.acquire(5000) as b:
        mapping = b.map("r")

        def child():
            with pytest.raises(BufferError, match="parent"):
                mapping.__enter__()

        in_child(child)


def test_a_map_left_in_the_child_syncs_nothing_of_its_parents():
    backend = Pages(survives_fork=False, needs_sync=True)
    journal = backend.journal
    with zcpool.Pool(backend) as pool, pool.acquire(5000) as b:
        mapping = b.map("w")
        mapping.__enter__()

        def child():
            try:
                mapping.__exit__(None, None, None)
            except BufferError:
                pass
            assert journal.synced == []

        in_child(child)
        mapping.__exit__(None, None, None)
        assert [direction for *_, direction in journal.synced] == ["to_device"]


def test_memory_that_does_not_survive_fork_can_be_given_up_in_the_child():
    with zcpool.Pool(Pages(survives_fork=False)) as pool:
        buffers = [pool.acquire(5000) for _ in range(3)]

        def child():
            buffers[0].release()
            with buffers[1]:
                pass
            buffers.clear()
            assert pool.stats().reserved_bytes == 0

        in_child(child)
        assert pool.stats().in_use_blocks == 3
        buffers.clear()


def test_a_released_buffer_is_released_in_the_child_too(pool):
    b = pool.acquire(100)
    b.release()

    def child():
        assert b.released
        with pytest.raises(BufferError, match="released"):
            memoryview(b)

    in_child(child)


# ---- the parent's regions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("survives", [True, False])
def test_a_child_never_frees_its_parents_regions(survives):
    backend = Pages(survives_fork=survives)
    journal = backend.journal
    pool = zcpool.Pool(backend)
    held = [pool.acquire(n) for n in (100, 5000, 2 * MIB, 3 * MIB)]
    view = memoryview(held[0])
    pool.acquire(5 * MIB).release()
    regions = set(journal.live)

    def child():
        nonlocal pool, view
        for b in held:
            b.release()
        held.clear()
        view = None
        pool.trim()
        use(pool, 3)
        pool.close()
        pool = None
        gc.collect()
        settle()
        assert regions <= set(journal.live), "what the parent had is there"
        assert len(journal.freed) == journal.allocated - len(regions), "what the child had is gone"
        assert journal.faults == []

    in_child(child)
    assert journal.freed == []
    held.clear()
    view = None
    pool.close()
    settle()
    assert journal.live == {}
    assert journal.faults == []
    del pool


def test_a_child_of_a_closed_pool_frees_nothing():
    backend = Pages()
    journal = backend.journal
    pool = zcpool.Pool(backend)
    b = pool.acquire(2 * MIB)
    pool.close()

    def child():
        nonlocal b, pool
        b.release()
        b = pool = None
        gc.collect()
        settle()
        assert journal.freed == []

    in_child(child)
    b.release()
    settle()
    assert len(journal.freed) == 1
    assert journal.faults == []


def test_a_child_after_the_pool_is_gone_frees_nothing():
    backend = Pages()
    journal = backend.journal
    view = memoryview(zcpool.Pool(backend).acquire(2 * MIB))

    def child():
        nonlocal view
        view = None
        zcpool.Pool().close()
        settle()
        assert journal.freed == []

    in_child(child)
    view = None
    settle()
    assert len(journal.freed) == 1


# ---- what is pending at the fork -----------------------------------------------------------------------------


def test_a_fence_pending_at_the_fork_stays_the_parents(pool):
    fence = zcpool.Fence()
    pool.acquire(5000).release(after=fence)

    def child():
        assert pool.stats().retired_blocks == 0
        fence.set()
        assert fence.is_set()
        assert pool.stats().cached_blocks == 0
        use(pool)

    in_child(child)
    assert not fence.is_set()
    assert pool.stats().retired_blocks == 1
    fence.set()
    assert pool.stats().retired_blocks == 0


@pytest.mark.skipif(not hasattr(select, "epoll"), reason="Fence.fileno() needs Linux's eventfd")
def test_a_fence_set_in_the_child_does_not_signal_the_parents_fd():
    # An fd is shared with the child: what waits for it in the parent would go on under a device that is at work.
    fence = zcpool.Fence()
    fence.fileno()
    in_child(fence.set)
    assert not fence.is_set()
    assert not readable(fence)


def test_an_fd_pending_at_the_fork_stays_the_parents(pool):
    reader, writer = os.pipe()
    pool.acquire(5000).release(after=reader)

    def child():
        os.write(writer, b"x")
        for _ in range(5):
            assert pool.stats().retired_blocks == 0
        use(pool)

    assert pool.stats().retired_blocks == 1
    in_child(child)
    assert pool.stats().retired_blocks == 0, "and there it is seen"
    os.close(writer)


def test_fences_work_in_the_child(pool):

    def child():
        fence = zcpool.Fence()
        pool.acquire(5000).release(after=fence)
        reader, writer = os.pipe()
        pool.acquire(5000).release(after=reader)
        assert pool.stats().retired_blocks == 2
        fence.set()
        os.write(writer, b"x")
        assert pool.stats().retired_blocks == 0

    in_child(child)


def test_a_fence_on_an_inherited_buffer_is_taken_in_the_child(pool):
    b = pool.acquire(5000)

    def child():
        reader, writer = os.pipe()
        b.release(after=reader)
        os.write(writer, b"x")
        pool.stats()
        with pytest.raises(OSError):
            os.fstat(reader)
        use(pool)

    in_child(child)
    assert pool.stats().in_use_blocks == 1


def test_waiters_at_the_fork_go_on_in_the_parent_and_do_not_exist_in_the_child():
    with zcpool.Pool(max_bytes=2 * MIB) as pool:
        held = [pool.acquire(MIB), pool.acquire(MIB)]
        got = []
        threads = [threading.Thread(target=lambda: got.append(pool.acquire(MIB, timeout=60))) for _ in range(2)]
        for t in threads:
            t.start()
        time.sleep(0.05)  # let them wait; if they do not yet, the test is weaker and still right

        def child():
            mine = [pool.acquire(MIB), pool.acquire(MIB)]
            with pytest.raises(zcpool.OutOfMemory):
                pool.acquire(MIB, timeout=0.01)
            threading.Timer(0.05, mine.pop).start()
            assert pool.acquire(MIB, timeout=30).nbytes == MIB

        in_child(child)
        assert got == []
        held.clear()
        for t in threads:
            t.join(60)
        assert len(got) == 2
        got.clear()
        assert pool.stats().in_use_blocks == 0


def test_waking_the_childs_waiter_does_not_disturb_the_parents():
    # The parent's waiter sleeps on an eventfd, which a child inherits.
    with zcpool.Pool(max_bytes=MIB) as pool:
        held = [pool.acquire(MIB)]
        got = []
        t = threading.Thread(target=lambda: got.append(pool.acquire(MIB, timeout=60)))
        t.start()
        time.sleep(0.05)

        def child():
            for _ in range(20):
                mine = [pool.acquire(MIB)]
                threading.Timer(0.001, mine.clear).start()
                pool.acquire(MIB, timeout=30).release()

        in_child(child)
        assert got == []
        held.clear()
        t.join(60)
        assert len(got) == 1
        got.clear()


# ---- fork while others are at work ---------------------------------------------------------------------------


class Churn:
    """Threads that acquire and release without a pause, with everything that takes a lock."""

    def __init__(self, pool, count=4):
        self.stop = False
        self.errors = []
        self.pool = pool
        self.threads = [threading.Thread(target=self.run, args=(i,), daemon=True) for i in range(count)]

    def __enter__(self):
        for t in self.threads:
            t.start()
        return self

    def __exit__(self, *error):
        self.stop = True
        for t in self.threads:
            t.join(60)
        assert self.errors == []

    def run(self, seed):
        chance = random.Random(seed)
        held = []
        try:
            while not self.stop:
                action = chance.random()
                if action < 0.55:
                    held.append(self.pool.acquire(chance.choice([10, 300, 5000, 70_000, MIB, 3 * MIB])))
                elif action < 0.97 and held:
                    held.pop(chance.randrange(len(held))).release()
                elif action < 0.98:
                    self.pool.trim()
                elif action < 0.99:
                    self.pool.stats()
                else:
                    zcpool.Pool().acquire(100)
                if len(held) > 30:
                    held.clear()
        except BaseException as error:
            self.errors.append(error)


def child_of_churn(pool, generations):
    held = []
    for i in range(30):
        held.append(pool.acquire(1 + 9973 * i))
        if i % 3 == 0:
            held.pop(0).release()
    assert len({b.address for b in held}) == len(held)
    pool.trim()
    s = pool.stats()
    assert s.in_use_blocks == len(held)
    assert s.reserved_bytes == s.in_use_bytes + s.cached_bytes + s.retired_bytes + s.slack_bytes
    threads = [threading.Thread(target=use, args=(pool, 2)) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if generations:
        in_child(child_of_churn, pool, generations - 1)
    with zcpool.Pool() as another:
        another.acquire(100)
    del held


def test_children_of_a_busy_process_never_hang(pool):
    with Churn(pool):
        for i in range(40):
            status, complaints = join_child(*fork_child(child_of_churn, pool, i % 3), timeout=30)
            assert (status, complaints) == (0, "")
    assert eventually(lambda: pool.stats().in_use_blocks == 0)
    s = pool.stats()
    assert s.reserved_bytes == s.in_use_bytes + s.cached_bytes + s.retired_bytes + s.slack_bytes


def test_children_forked_by_busy_threads_never_hang(pool):
    results = []

    def forker():
        for _ in range(5):
            results.append(join_child(*fork_child(child_of_churn, pool, 0), timeout=30))

    with Churn(pool, 2):
        threads = [threading.Thread(target=forker) for _ in range(2)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert results == [(0, "")] * 10


def test_children_of_a_process_busy_in_a_python_backend_never_hang():
    backend = Pages()
    with zcpool.Pool(backend) as pool:
        with Churn(pool, 3):
            for _ in range(10):
                status, complaints = join_child(*fork_child(child_of_churn, pool, 0), timeout=30)
                assert (status, complaints) == (0, "")
    assert backend.journal.faults == []
    assert set(backend.journal.processes) <= {os.getpid()}


def test_children_at_the_limit_of_a_busy_pool_never_hang():
    # A reservation in flight at the fork is nobody's in the child: waiting for it would be for ever.
    with zcpool.Pool(max_bytes=8 * MIB) as pool:
        stop = threading.Event()

        def churn():
            while not stop.is_set():
                try:
                    pool.acquire(3 * MIB).release()
                    pool.trim()
                except zcpool.OutOfMemory:
                    pass

        def child():
            held = [pool.acquire(2 * MIB) for _ in range(4)]
            with pytest.raises(zcpool.OutOfMemory):
                pool.acquire(2 * MIB)
            del held

        threads = [threading.Thread(target=churn) for _ in range(4)]
        for t in threads:
            t.start()
        try:
            for _ in range(30):
                status, complaints = join_child(*fork_child(child), timeout=30)
                assert (status, complaints) == (0, "")
        finally:
            stop.set()
            for t in threads:
                t.join()


def test_a_child_may_be_forked_inside_a_backend_call():
    # A backend runs Python in the middle of an acquire; the child then comes back into a pool that is empty.
    children = []

    class Forking(Pages):
        def allocate(self, nbytes, alignment):
            if nbytes > MIB and not children:
                children.append(os.fork())
            return super().allocate(nbytes, alignment)

    parent = os.getpid()
    status = 1
    pool = zcpool.Pool(Forking(), max_bytes=8 * MIB)
    try:
        b = pool.acquire(2 * MIB)
        if os.getpid() != parent:
            signal.alarm(10)  # ends it if it hangs
        b.array(10)[:] = 1
        b.release()
        held = [pool.acquire(2 * MIB) for _ in range(4)]
        with pytest.raises(zcpool.OutOfMemory):
            pool.acquire(2 * MIB)
        del held
        pool.trim()
        assert pool.stats().reserved_bytes == 0
        for _ in range(8):
            pool.acquire(2 * MIB).release()
        status = 0
    finally:
        if os.getpid() != parent:
            os._exit(status)
    _, status = os.waitpid(children[0], 0)
    assert status == 0


# ---- multiprocessing -----------------------------------------------------------------------------------------


def work(pool, b, queue):
    use(pool, 5)
    queue.put((int(b.array(1)[0]), pool.stats().in_use_blocks))


def test_multiprocessing_with_fork_works(pool):
    context = multiprocessing.get_context("fork")
    b = pool.acquire(5000)
    b.array(5000)[:] = 42
    queue = context.SimpleQueue()
    children = [context.Process(target=work, args=(pool, b, queue)) for _ in range(3)]
    for c in children:
        c.start()
    for c in children:
        c.join(60)
    assert [c.exitcode for c in children] == [0, 0, 0]
    assert [queue.get() for _ in children] == [(42, 0)] * 3
    queue.close()
    assert pool.stats().in_use_blocks == 1


def test_a_pool_of_processes_works():
    run_quietly("""
        import multiprocessing
        import zcpool
        pool = zcpool.Pool()
        held = pool.acquire(5000)
        def work(n):
            with pool.acquire(n) as b:
                b.array(n)[:] = 3
                return int(b.array(n).sum())
        if __name__ == "__main__":
            with multiprocessing.get_context("fork").Pool(2) as workers:
                assert workers.map(work, range(1, 200)) == [3 * n for n in range(1, 200)]
    """)


def test_a_child_that_ends_as_a_script_does_is_silent():
    # No os._exit: the child runs the interpreter's whole way out, with its parent's buffers, views and pins.
    run_quietly("""
        import os, sys
        import zcpool
        from harness import Pages, MIB
        backend = Pages()
        pools = [zcpool.Pool(), zcpool.Pool(backend)]
        held = [pool.acquire(n) for pool in pools for n in (100, 5000, 2 * MIB)]
        views = [b.array(10) for b in held]
        views.append(held[0].__dlpack__())
        fence = zcpool.Fence()
        pools[1].acquire(3000).release(after=fence)
        pid = os.fork()
        if pid:
            _, status = os.waitpid(pid, 0)
            fence.set()
            assert backend.journal.freed == []
            sys.exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 99)
        held.append(pools[0].acquire(100))
        fence.set()
    """)


# ---- locks of Python's that another thread may hold ----------------------------------------------------------


def test_children_forked_while_backends_are_looked_up_never_hang():
    stop = threading.Event()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # so that threads are caught in the midst of it

    def make():
        while not stop.is_set():
            _registry.create("posix", {})

    threads = [threading.Thread(target=make) for _ in range(3)]
    for t in threads:
        t.start()
    try:
        for _ in range(200):
            in_child(lambda: zcpool.Pool().acquire(100), timeout=10)
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        for t in threads:
            t.join()


def test_a_child_forked_while_copies_are_counted_never_hangs():
    counting = sys.modules["zcpool.copies"]
    with counting._lock:
        in_child(lambda: zcpool.copies(), timeout=10)
