"""Lifetimes: owners end in any order, the interpreter with everything alive, and each region is freed once."""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
from harness import MIB, Journal, Pages, run_python, run_quietly, settle
from helpers import eventually

import zcpool

OWNERS = ("pool", "backend", "buffer", "view", "array", "tensor", "pin")


class Owners:
    """One of each that keeps something alive."""

    def __init__(self, nbytes):
        self.journal = Journal()
        self.backend = Pages(self.journal)
        self.pool = zcpool.Pool(self.backend)
        self.buffer = self.pool.acquire(nbytes)
        self.view = memoryview(self.buffer)
        self.array = self.buffer.array(nbytes)
        self.tensor = np.from_dlpack(self.buffer)
        self.pin = self.buffer.pin()
        self.array[:] = 42
        self.left = set(OWNERS)

    def drop(self, name):
        if name == "pin":
            self.pin.release()
        delattr(self, name)
        self.left.discard(name)

    def check(self):
        """Whoever still reaches the memory sees it unharmed; nobody does, and it has gone back."""
        for name in ("view", "array", "tensor", "buffer"):
            if name in self.left:
                seen = memoryview(getattr(self, name))
                assert (seen[0], seen[-1]) == (42, 42)
        assert self.journal.faults == []
        if self.left & {"buffer", "view", "array", "tensor", "pin"}:
            assert len(self.journal.live) == 1
            assert self.journal.freed == []

    def check_gone(self, kept):
        settle()
        assert self.journal.live == {}
        assert self.journal.freed == [0]
        assert self.journal.faults == []
        assert [name for name, ref in kept.items() if ref() is not None] == []


# ---- every order of dropping ---------------------------------------------------------------------------------


@pytest.mark.parametrize("first", OWNERS)
def test_owners_may_be_dropped_in_any_order(first):
    for rest in itertools.permutations([name for name in OWNERS if name != first]):
        owners = Owners(1000)
        kept = {name: weakref.ref(getattr(owners, name)) for name in OWNERS}
        for name in (first, *rest):
            owners.drop(name)
            owners.check()
        owners.check_gone(kept)


def test_owners_of_a_region_of_its_own_may_be_dropped_in_any_order():
    orders = list(itertools.permutations(OWNERS))
    for order in orders[::17]:
        owners = Owners(MIB)
        kept = {name: weakref.ref(getattr(owners, name)) for name in OWNERS}
        for name in order:
            owners.drop(name)
            owners.check()
        owners.check_gone(kept)


@pytest.mark.parametrize("closed_at", range(4))
def test_owners_of_a_closed_pool_may_be_dropped_in_any_order(closed_at):
    orders = list(itertools.permutations(name for name in OWNERS if name != "pool"))
    for order in orders[::7]:
        owners = Owners(1000)
        kept = {name: weakref.ref(getattr(owners, name)) for name in OWNERS}
        for step, name in enumerate(order):
            if step == closed_at:
                owners.pool.close()
            owners.drop(name)
            owners.check()
        settle()
        assert owners.journal.live == {}, "a closed pool caches nothing"
        assert owners.pool.stats().reserved_bytes == 0
        owners.drop("pool")
        owners.check_gone(kept)


def test_owners_in_one_cycle_are_collected():
    owners = Owners(1000)
    owners.pin.release()
    journal = owners.journal
    kept = {name: weakref.ref(getattr(owners, name)) for name in OWNERS}
    owners.me = owners
    del owners
    gc.collect()
    settle()
    assert [name for name, ref in kept.items() if ref() is not None] == []
    assert journal.live == {}
    assert journal.freed == [0]
    assert journal.faults == []


def test_owners_may_be_dropped_in_any_order_under_the_strictest_interpreter():
    run_quietly(
        """
        import itertools, weakref
        from harness import settle
        from test_lifetime import OWNERS, Owners
        for order in list(itertools.permutations(OWNERS))[::31]:
            owners = Owners(1000)
            kept = {name: weakref.ref(getattr(owners, name)) for name in OWNERS}
            for name in order:
                owners.drop(name)
                owners.check()
            owners.check_gone(kept)
        """,
        "-X",
        "dev",
        "-W",
        "error",
    )


def test_the_backend_goes_when_pool_and_memory_are_gone():
    backend = Pages()
    ref = weakref.ref(backend)
    pool = zcpool.Pool(backend)
    view = memoryview(pool.acquire(1000))
    del backend, pool
    assert ref() is not None
    del view
    settle()
    assert ref() is None


def test_pools_share_a_backend():
    backend = Pages()
    journal, ref = backend.journal, weakref.ref(backend)
    one, two = zcpool.Pool(backend), zcpool.Pool(backend)
    held = [one.acquire(MIB), two.acquire(MIB)]
    del backend, one
    held.pop(0)
    settle()
    assert journal.freed == [0]
    del two, held
    settle()
    assert journal.freed == [0, 1]
    assert ref() is None


# ---- closed pools --------------------------------------------------------------------------------------------


def test_live_buffers_of_a_closed_pool_stay_valid_and_go_home():
    backend = Pages()
    journal = backend.journal
    pool = zcpool.Pool(backend)
    held = [pool.acquire(n) for n in (100, 5000, 2 * MIB, 3 * MIB)]
    pool.close()
    settle()
    for i, b in enumerate(held):
        b.array(b.nbytes)[:] = i
        with b.map("rw") as view:
            assert view[-1] == i
        assert np.from_dlpack(b)[0] == i
        with b.pin():
            assert memoryview(b)[0] == i
    while held:
        before = pool.stats().in_use_blocks
        held.pop().release()
        assert pool.stats().in_use_blocks == before - 1
    settle()
    assert pool.stats().reserved_bytes == 0
    assert journal.live == {}
    assert journal.faults == []


def test_close_gives_back_what_is_cached_at_once():
    backend = Pages()
    pool = zcpool.Pool(backend)
    for n in (100, 5000, 100_000, 2 * MIB):
        pool.acquire(n).release()
    b = pool.acquire(3 * MIB)
    pool.close()
    assert len(backend.journal.live) == 1
    b.release()
    settle()
    assert backend.journal.live == {}


def test_an_arena_goes_back_with_its_last_block():
    backend = Pages()
    pool = zcpool.Pool(backend)
    held = [pool.acquire(100) for _ in range(50)]
    pool.close()
    while len(held) > 1:
        held.pop(len(held) // 2).release()
    settle()
    assert len(backend.journal.live) == 1
    held.pop().release()
    settle()
    assert backend.journal.live == {}
    assert backend.journal.freed == [0]


# ---- PythonBackend.free --------------------------------------------------------------------------------------


def test_every_region_is_freed_once_whatever_happens():
    backend = Pages()
    journal = backend.journal

    def traffic(seed):
        import random

        chance = random.Random(seed)
        held = []
        for _ in range(400):
            if chance.random() < 0.6:
                held.append(pool.acquire(chance.choice([100, 5000, 70_000, MIB, 3 * MIB])))
                if chance.random() < 0.3:
                    held.append(memoryview(held[-1]))
            elif held:
                held.pop(chance.randrange(len(held)))
            if chance.random() < 0.02:
                pool.trim()
            if len(held) > 20:
                held.clear()

    with zcpool.Pool(backend) as pool:
        threads = [threading.Thread(target=traffic, args=(i,)) for i in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    settle()
    assert journal.live == {}
    assert sorted(journal.freed) == list(range(journal.allocated))
    assert journal.faults == []


def test_a_release_on_a_closed_pool_frees_from_a_python_thread():
    backend = Pages()
    pool = zcpool.Pool(backend)
    held = [pool.acquire(MIB) for _ in range(40)]
    pool.close()
    threads = [threading.Thread(target=lambda part: part.clear(), args=(held[i::4],)) for i in range(4)]
    known = {threading.get_ident()}
    held.clear()
    for t in threads:
        t.start()
        known.add(t.ident)
    for t in threads:
        t.join()
    assert eventually(lambda: backend.journal.live == {})
    assert set(backend.journal.threads) <= known
    assert sorted(backend.journal.freed) == list(range(40))
    assert backend.journal.faults == []


def test_a_free_that_raises_is_reported_and_leaves_the_books_right(monkeypatch):
    class Failing(Pages):
        def free(self, memory):
            super().free(memory)
            raise OSError("no")

    reported = []
    monkeypatch.setattr(sys, "unraisablehook", lambda u: reported.append(u.exc_type))
    backend = Failing()
    with zcpool.Pool(backend) as pool:
        pool.acquire(2 * MIB).release()
        pool.trim()
        assert pool.stats().reserved_bytes == 0
        assert reported == [OSError]
        pool.acquire(2 * MIB).release()
    assert reported == [OSError] * 2


def test_a_free_that_uses_the_pool_does_no_harm():
    class Reentrant(Pages):
        pool = None

        def free(self, memory):
            super().free(memory)
            if self.pool is not None and not self.pool.closed:
                self.pool.acquire(100).release()
                self.pool.stats()

    backend = Reentrant()
    pool = zcpool.Pool(backend)
    backend.pool = pool
    for _ in range(20):
        pool.acquire(2 * MIB).release()
        pool.trim()
    pool.close()
    backend.pool = None
    settle()
    assert backend.journal.live == {}
    assert backend.journal.faults == []


# ---- leaks are told ------------------------------------------------------------------------------------------


def test_a_pool_that_ends_without_leaks_is_silent():
    run_quietly(
        """
        import zcpool
        pool = zcpool.Pool()
        with pool.acquire(1000) as b, b.pin():
            a = b.array(10)
        view = memoryview(pool.acquire(5000))
        del pool
        """,
        "-X",
        "dev",
        "-W",
        "error",
    )


def test_a_pool_that_ends_with_a_dropped_pin_warns():
    pool = zcpool.Pool(name="frames")
    pin = pool.acquire(1000).pin()
    with pytest.warns(ResourceWarning, match="dropped without"):
        del pin
    with pytest.warns(ResourceWarning, match=r"pool 'frames' ends while 1 block\(s\) are held.*ZCPOOL_DEBUG=1"):
        del pool


def test_every_pinned_block_is_counted():
    pool = zcpool.Pool()
    pins = [pool.acquire(1000).pin() for _ in range(3)]
    with pytest.warns(ResourceWarning):
        pins.clear()
    with pytest.warns(ResourceWarning, match=r"ends while 3 block\(s\) are held"):
        del pool


def test_a_pin_that_is_held_at_exit_is_told():
    done = run_python(
        """
        import zcpool
        pool = zcpool.Pool(name="frames")
        pin = pool.acquire(1000).pin()
        """,
        "-W",
        "always::ResourceWarning",
    )
    assert done.returncode == 0
    assert "pool 'frames' ends while 1 block(s) are held" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Error" not in done.stderr


def test_every_pool_with_a_pin_at_exit_is_told_also_when_warnings_are_errors():
    done = run_python(
        """
        import zcpool
        pools = [zcpool.Pool(name=f"pool{i}") for i in range(3)]
        pins = [pool.acquire(1000).pin() for pool in pools]
        """,
        "-W",
        "error::ResourceWarning",
    )
    assert done.returncode == 0
    assert all(f"'pool{i}' ends while 1 block(s)" in done.stderr for i in range(3)), done.stderr


def test_a_leak_is_told_once_and_with_its_true_number_when_a_pin_ends_late():
    # The function registered first runs last: after the leaks have been told.
    done = run_python(
        """
        import atexit
        pins = []
        atexit.register(lambda: [pin.release() for pin in pins])
        import zcpool
        pool = zcpool.Pool(name="frames")
        pins.append(pool.acquire(1000).pin())
        """,
        "-W",
        "always::ResourceWarning",
    )
    assert done.returncode == 0
    assert done.stderr.count("ends while") == 1, done.stderr
    assert "while 1 block(s)" in done.stderr


# ---- the end of the interpreter ------------------------------------------------------------------------------


ALIVE = """
    import threading
    import numpy, zcpool
    from harness import Pages, MIB
    pools = [zcpool.Pool(), zcpool.Pool(Pages()), zcpool.FixedPool(5000, 3), zcpool.Pool(arena_buckets="all")]
    held = [p.acquire(n) for p in (pools[0], pools[1], pools[3]) for n in (0, 100, 5000, 2 * MIB)]
    held.append(pools[2].acquire())
    views = [memoryview(b) for b in held]
    arrays = [b.array(b.nbytes) for b in held]
    tensors = [numpy.from_dlpack(b) for b in held]
    capsules = [b.__dlpack__() for b in held]
    for b in held:
        with b.pin():
            pass
    fence = zcpool.Fence()
    pools[0].acquire(3000).release(after=fence)
    fence.set()
    mapping = held[1].map("rw")
    mapped = mapping.__enter__()
"""


LATE = """
    class Late:
        def __del__(self):
            self.view[0] = 1
            self.buffer.release()
    late = Late()
    late.view, late.buffer, late.me = views[1], held[1], late
"""


@pytest.mark.parametrize("flags", [(), ("-X", "dev", "-W", "error")], ids=["plain", "dev"])
def test_exit_with_everything_alive_is_silent(flags):
    run_quietly(ALIVE, *flags)


@pytest.mark.parametrize(
    "last",
    [
        "del pools",
        "del held, views, arrays",
        "[p.close() for p in pools]",
        "[p.close() for p in pools]; del pools, held",
        "import sys; sys.keep = (pools, held, views, tensors, capsules)",
        "import builtins; builtins.keep = tensors; del pools, held, views, arrays",
        "cycle = [pools, held, views]; cycle.append(cycle); del pools, held, views",
        LATE,
        "import atexit; atexit.register(lambda: [b.release() for b in held])",
        "import threading; threading.Thread(target=lambda: pools[1].acquire(777)).start()",
        "raise SystemExit(0)",
    ],
)
def test_exit_is_silent_whatever_is_left(last):
    run_quietly(ALIVE + (last if last == LATE else f"    {last}\n"), "-X", "dev", "-W", "error")


@pytest.mark.parametrize("backend", ["'posix'", "Pages()"])
def test_exit_under_daemon_threads_that_go_on_acquiring_is_silent(backend):
    for i in range(2):
        run_quietly(f"""
            import threading, time
            import zcpool
            from harness import Pages, MIB
            pool = zcpool.Pool({backend})
            def churn(seed):
                n = seed
                while True:
                    n = n * 1103515245 % 2147483647
                    b = pool.acquire(1 + n % 5000 if n % 50 else MIB + n % MIB)
                    if n % 3:
                        a = b.array(1)
                    if n % 5:
                        b.release()
                    if n % 97 == 0:
                        pool.trim()
            threads = [threading.Thread(target=churn, args=(i + 1,), daemon=True) for i in range(4)]
            for t in threads:
                t.start()
            time.sleep(0.05 + {i} * 0.03)
        """)


def test_exit_under_daemon_threads_that_wait_for_memory_is_silent():
    run_quietly("""
        import threading, time
        import zcpool
        pool = zcpool.Pool(max_bytes="1MiB")
        held = pool.acquire("1MiB")
        fence = zcpool.Fence()
        def wait():
            pool.acquire("1MiB", timeout=None)
        for target in (wait, wait, fence.wait):
            threading.Thread(target=target, daemon=True).start()
        time.sleep(0.1)
    """)


@pytest.mark.parametrize(
    "left",
    [
        "pin = pool.acquire(1000).pin()",
        "fence = zcpool.Fence(); pool.acquire(1000).release(after=fence)",
        "import concurrent.futures as c; future = c.Future(); pool.acquire(1000).release(after=future)",
        "import os; pool.acquire(1000).release(after=os.pipe()[0])",
        "import sys; sys.keep = pool.acquire(1000).pin(); sys.fence = f = zcpool.Fence(); pool.acquire(9).release(f)",
    ],
)
def test_exit_with_something_pending_is_silent_unless_resource_warnings_are_wanted(left):
    code = f"import zcpool\npool = zcpool.Pool()\n{left}\n"
    run_quietly(code)
    done = run_python(code, "-W", "always::ResourceWarning")
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_an_interpreter_that_only_imports_ends_quietly():
    run_quietly("import zcpool", "-X", "dev", "-W", "error")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is of Linux")
def test_threads_that_end_give_back_what_they_cached():
    tasks = Path("/proc/self/task")
    with zcpool.Pool() as pool:

        def work():
            held = [pool.acquire(1000) for _ in range(20)]
            held.clear()

        for _ in range(50):
            t = threading.Thread(target=work)
            t.start()
            t.join()
            # Python's thread is over before the system's is, whose end gives back the cache.
            assert eventually(lambda t=t: not (tasks / str(t.native_id)).exists())
        s = pool.stats()
        assert s.in_use_blocks == 0
        assert s.cached_blocks <= 64, "later threads use what earlier ones left"
        assert s.backend_allocations == 1


# ---- subinterpreters -----------------------------------------------------------------------------------------


INTERPRETERS = """
    try:
        import _interpreters
    except ImportError:
        import _xxsubinterpreters as _interpreters
    def run(code):
        i = _interpreters.create()
        try:
            return (getattr(_interpreters, "exec", None) or _interpreters.run_string)(i, code)
        finally:
            _interpreters.destroy(i)
    import sys
    code = "\\n".join([
        f"import sys; sys.path[:] = {sys.path!r}",
        "try:",
        "    import zcpool",
        "    print('imported', flush=True)",
        "except ImportError:",
        "    print('refused', flush=True)",
    ])
"""


def run_with_interpreters(code):
    return run_python(INTERPRETERS + code)


@pytest.fixture(scope="session")
def subinterpreters():
    done = run_python("try:\n import _interpreters\nexcept ImportError:\n import _xxsubinterpreters")
    if done.returncode:
        pytest.skip("this Python has no module to make subinterpreters with")


@pytest.mark.usefixtures("subinterpreters")
def test_a_subinterpreter_may_not_import_zcpool():
    done = run_with_interpreters("""
    import zcpool
    b = zcpool.Pool().acquire(1000)
    b.array(1000)[:] = 3
    for _ in range(3):
        run(code)
    assert (b.array(1000) == 3).all()
    zcpool.Pool().acquire(5000)
    """)
    assert (done.returncode, done.stdout, done.stderr) == (0, "refused\n" * 3, "")


@pytest.mark.usefixtures("subinterpreters")
def test_an_import_in_a_subinterpreter_first_does_not_crash():
    done = run_with_interpreters("""
    run(code)
    try:
        import zcpool
        zcpool.Pool().acquire(1000)
    except ImportError:
        pass
    """)
    assert done.returncode == 0, done.stderr


# ---- many pools ----------------------------------------------------------------------------------------------


def test_pools_can_be_made_and_dropped_for_ever():
    # There are 4,096 control blocks in a process: those of pools that have ended serve again.
    for i in range(5000):
        pool = zcpool.Pool()
        b = pool.acquire(1000 if i % 2 else 2 * MIB)
        assert pool.stats().acquires == 1, "a new pool knows nothing of the one before it"
        if i % 3 == 0:
            pool.close()
        if i % 5 == 0:
            del pool
            b.release()
        else:
            b.release()
            del pool
        del b


def test_pools_that_end_with_views_serve_again_when_the_views_have_gone():
    views = []
    for _ in range(5000):
        pool = zcpool.Pool()
        views.append(memoryview(pool.acquire(100)))
        del pool
        if len(views) > 100:
            views.pop(0)
    assert len(views) == 100


def test_a_dropped_pools_backend_is_let_go_of_every_time():
    journal = Journal()
    refs = []
    for _ in range(300):
        backend = Pages(journal)
        refs.append(weakref.ref(backend))
        pool = zcpool.Pool(backend)
        pool.acquire(1000)
        del pool, backend
    settle()
    assert [ref for ref in refs if ref() is not None] == []
    assert journal.live == {}


def test_many_pools_live_at_once():
    pools = [zcpool.Pool(arena_bytes="256KiB", name=f"pool {i}") for i in range(300)]
    held = [(pool, pool.acquire(1000)) for pool in pools]
    for i, (_, b) in enumerate(held):
        b.array(1000)[:] = i % 251
    for i, (pool, b) in enumerate(held):
        assert b.pool is pool
        assert (b.array(1000) == i % 251).all()
        assert pool.stats().in_use_blocks == 1
    assert len({b.address for _, b in held}) == 300
    for pool in pools[::2]:
        pool.close()
    for i, (_, b) in enumerate(held):
        assert (b.array(1000) == i % 251).all()
    held.clear()
    del b
    assert [pool.stats().in_use_blocks for pool in pools] == [0] * 300


def test_more_pools_than_there_is_room_for_is_a_memory_error_that_passes():
    run_quietly("""
        import zcpool
        pools = []
        try:
            for _ in range(5000):
                pools.append(zcpool.Pool())
        except MemoryError as error:
            assert "4096" in str(error), error
        else:
            raise AssertionError("no limit was met")
        assert len(pools) == 4096
        pools[-1].acquire(1000)
        del pools[100]
        pools.append(zcpool.Pool())
        pools[-1].acquire(1000)
    """)


def test_a_thread_uses_many_pools():
    pools = [zcpool.Pool(arena_bytes="256KiB") for _ in range(100)]

    def work(seed):
        for i in range(2000):
            pool = pools[(i * 7 + seed) % 100]
            with pool.acquire(1 + i % 3000) as b:
                assert b.pool is pool

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert [pool.stats().in_use_blocks for pool in pools] == [0] * 100
