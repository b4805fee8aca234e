"""The fixtures and the strict backend themselves: each must be able to fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from books import balanced
from doubles.memory import CountingBackend
from helpers import MakePool, Workers, in_threads

import zcpool

TESTS = Path(__file__).parent


def run(tmp_path: Path, body: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a test file of its own with the fixtures of this folder."""
    path = tmp_path / "test_of_its_own.py"
    path.write_text("import threading, pytest\nfrom doubles.memory import CountingBackend\n" + body)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider", "-c", os.devnull]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(Path(zcpool.__file__).parents[1])])}
    return subprocess.run(
        [*command, *options, str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env=environment,
        check=False,
    )


def test_a_test_that_keeps_a_block_fails_unless_it_says_so(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
kept = []
def test_keeps(pool): kept.append(pool.acquire(100))
def test_retires(pool):
    buf = pool.acquire(100)
    kept.append(memoryview(buf))
    buf.release()
@pytest.mark.keeps_blocks
def test_says_so(pool): kept.append(pool.acquire(100))
def test_keeps_nothing(pool): pool.acquire(100)
""",
    )
    assert "4 passed, 2 errors" in done.stdout, done.stdout
    assert done.stdout.count("blocks that are not at home") >= 2


def test_a_test_that_misuses_its_backend_fails(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
def test_takes_memory_past_the_pool(make_pool):
    backend = CountingBackend()
    make_pool(backend).acquire(100)
    backend.allocate(64, 64)
""",
    )
    assert "1 error" in done.stdout, done.stdout


def test_the_watchdog_ends_a_test_that_hangs_and_says_where(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
@pytest.mark.watchdog(0.5)
def test_hangs():
    threading.Event().wait(60)
def test_is_never_reached(): pass
""",
    )
    assert done.returncode == 1
    assert "passed" not in done.stdout
    assert "in test_hangs" in done.stderr


def test_the_strict_backend_notices_misuse() -> None:
    backend = CountingBackend(max_alignment=4096)
    memory = backend.allocate(64, 64)
    kept = memory[:1]
    for wrong in (
        lambda: backend.allocate(0, 64),
        lambda: backend.allocate(65, 64),
        lambda: backend.allocate(64, 96),
        lambda: backend.allocate(64, 8192),
        lambda: backend.free(memoryview(bytearray(64))),
        lambda: backend.sync(memory, 32, 64, "to_device"),
        lambda: backend.free(memory),  # a view of it lives
        lambda: backend.free(memory),  # and now it is freed already
    ):
        before = len(backend.misuses)
        with pytest.raises(AssertionError):
            wrong()
        assert len(backend.misuses) == before + 1
    with pytest.raises(AssertionError):
        backend.check()
    kept.release()


def test_the_strict_backend_counts_and_honours_alignments() -> None:
    backend = CountingBackend()
    held = [backend.allocate(4096, alignment) for alignment in (64, 4096, 64 << 10, 2 << 20)]
    assert (backend.live_regions, backend.live_bytes, backend.allocations) == (4, 4 * 4096, 4)
    with pytest.raises(AssertionError):
        backend.check_empty()
    for memory in held:
        memory[0] = memory[4095] = 1
        backend.free(memory)
    assert (backend.frees, backend.peak_bytes) == (4, 4 * 4096)
    backend.check_empty()


def test_the_strict_backend_fails_and_blocks_on_demand(make_pool: MakePool) -> None:
    backend = CountingBackend(memory=4096)
    backend.fail_next(2, OSError("twice"))
    for _ in range(2):
        with pytest.raises(OSError, match="twice"):
            backend.allocate(64, 64)
    with pytest.raises(MemoryError, match="4096"):
        backend.allocate(8192, 64)
    gate = backend.shut()
    with Workers(1, lambda i: backend.free(backend.allocate(64, 64))) as workers:
        assert gate.entered.wait(20)
        assert workers.running
        gate.open()
    assert (backend.calls, backend.failures, backend.frees) == (4, 3, 1)


def test_the_check_of_the_books_notices_what_is_not_in_them(make_pool: MakePool) -> None:
    backend = CountingBackend()
    pool = make_pool(backend)
    buf = pool.acquire(100)
    balanced(pool, held=[buf], backend=backend)
    with pytest.raises(AssertionError):
        balanced(pool, held=[])
    backend.live_bytes += 1
    with pytest.raises(AssertionError):
        balanced(pool, held=[buf], backend=backend)
    backend.live_bytes -= 1


def test_what_fails_in_a_thread_fails_in_the_test() -> None:
    def work(i: int) -> None:
        assert i != 2, "two"

    with pytest.raises(AssertionError, match="two"):
        in_threads(4, work)


def test_the_backend_under_test_must_exist(tmp_path: Path) -> None:
    done = run(tmp_path, "def test_uses(pool): pass\n", "--zcpool-backend=no-such")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "'no-such' does not work here: known are" in done.stdout + done.stderr
