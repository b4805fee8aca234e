"""Fixtures of all tests.

Every pool that comes from `make_pool` or `pool` is looked at when the test is over: its blocks must have gone home,
its books must balance, and its backend must get everything back when it is closed.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import pytest
from books import at_home, balanced
from doubles.memory import CountingBackend
from harness import PATIENCE
from helpers import MakePool
from hypothesis import settings

import zcpool

# An example takes as long as the machine is busy: time is what the watchdog is for.
settings.register_profile("zcpool", deadline=None)
settings.load_profile("zcpool")

_stderr = pytest.StashKey[TextIO]()
_failed = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--zcpool-backend",
        default="posix",
        metavar="NAME",
        help="the backend of the pools under test, where a test does not need another one (default: posix)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "watchdog(seconds): end the run with all tracebacks if the test takes longer")
    config.addinivalue_line("markers", "keeps_blocks: the test may end with blocks still in use")
    # Output is not captured yet: this is where a traceback is seen even if the process ends at once.
    config.stash[_stderr] = os.fdopen(os.dup(2), "w")


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[_stderr].close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    report = yield
    if report.failed:
        item.stash[_failed] = True
    return report


@pytest.fixture(autouse=True)
def watchdog(request: pytest.FixtureRequest) -> Iterator[None]:
    """End the run with the tracebacks of all threads when a test marked `watchdog(seconds)` hangs.

    Not an exception in the test: a deadlock that holds the GIL would never see it.
    """
    marker = request.node.get_closest_marker("watchdog")
    if marker is None:
        yield
        return
    (seconds,) = marker.args
    faulthandler.dump_traceback_later(PATIENCE * seconds, exit=True, file=request.config.stash[_stderr])
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session")
def backend_name(pytestconfig: pytest.Config) -> str:
    """The backend under test."""
    name: str = pytestconfig.getoption("--zcpool-backend")
    if name not in zcpool.backends.available():
        reason = zcpool.backends.unavailable().get(name, f"known are {', '.join(zcpool.backends.names())}")
        pytest.exit(f"the backend {name!r} does not work here: {reason}", returncode=pytest.ExitCode.USAGE_ERROR)
    return name


@pytest.fixture(name="balanced", scope="session")
def balanced_fixture() -> Callable[..., zcpool.PoolStats]:
    """Return `books.balanced`, the check that the books of a pool balance."""
    return balanced


@pytest.fixture
def make_pool(request: pytest.FixtureRequest, backend_name: str) -> Iterator[MakePool]:
    """Return a function that makes a pool, of the backend under test unless another one is given."""
    pools: list[zcpool.Pool] = []

    def make(backend: str | zcpool.Backend = backend_name, **options: Any) -> zcpool.Pool:
        pools.append(zcpool.Pool(backend, **options))
        return pools[-1]

    yield make
    if request.node.stash.get(_failed, False):
        return  # its frames live on in the report, and the buffers in them
    keeps = request.node.get_closest_marker("keeps_blocks") is not None
    for pool in pools:
        balanced(pool)
        assert keeps or at_home(pool), f"the test ends with blocks that are not at home: {pool!r}"
        pool.close()
        assert keeps or balanced(pool).reserved_bytes == 0, (
            f"a closed pool without blocks in use holds memory: {pool!r}"
        )
    for backend in {pool.backend for pool in pools}:
        if isinstance(backend, CountingBackend) and not keeps:
            backend.check_empty()


@pytest.fixture
def pool(make_pool: MakePool) -> zcpool.Pool:
    """A pool with the default options."""
    return make_pool()


@pytest.fixture
def counting() -> CountingBackend:
    """A strict backend in Python; `make_pool` looks at the end whether it was treated well and has all back."""
    return CountingBackend()
