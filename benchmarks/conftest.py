"""Fixtures of the benchmarks: a pool on the backend under test, and what it did beside what it took."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import pytest

import zcpool

sys.path.insert(0, str(Path(__file__).parent))

from loops import compile_loop
from machine import describe, parse_options

COUNTS = ("acquires", "hits", "misses", "releases", "failures", "backend_allocations", "backend_frees")


def pytest_addoption(parser: pytest.Parser) -> None:
    with contextlib.suppress(ValueError):  # the tests have it too, where both are run at once
        parser.addoption("--zcpool-backend", default="posix", metavar="NAME", help="the backend of the pools (posix)")
    parser.addoption(
        "--zcpool-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of the backend; may be given several times",
    )


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    machine_info["zcpool"] = {
        **describe(),
        "backend": config.getoption("--zcpool-backend"),
        "options": config.getoption("--zcpool-option"),
    }


@pytest.fixture(scope="session")
def backend(pytestconfig: pytest.Config) -> dict[str, Any]:
    """The backend under test, as arguments of a pool."""
    name: str = pytestconfig.getoption("--zcpool-backend")
    if name not in zcpool.backends.available():
        reason = zcpool.backends.unavailable().get(name, f"known are {', '.join(zcpool.backends.names())}")
        pytest.exit(f"the backend {name!r} does not work here: {reason}", returncode=pytest.ExitCode.USAGE_ERROR)
    try:
        options = parse_options(pytestconfig.getoption("--zcpool-option"))
    except ValueError as error:
        pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)
    return {"backend": name, **options}


@pytest.fixture
def pool(backend: dict[str, Any], benchmark: Any) -> Iterator[zcpool.Pool]:
    """A pool; what it did while the benchmark ran is in the result's ``extra_info``."""
    with zcpool.Pool(**backend) as pool:
        before = pool.stats()
        yield pool
        benchmark.extra_info["pool"] = difference(before, pool.stats())


def difference(before: zcpool.PoolStats, after: zcpool.PoolStats) -> dict[str, Any]:
    """Return the statistics afterwards, of counters what was added since, bucket by bucket too."""
    result = after.to_dict()
    for new, old in zip((result, *result["buckets"]), (before, *before.buckets)):
        for name in COUNTS:
            new[name] -= getattr(old, name)
    return result


@pytest.fixture
def measure(benchmark: Any) -> Callable[..., None]:
    """Measure a statement in a compiled loop of so many turns: a round's time is that of the whole loop."""

    def measure(statement: str, number: int, **names: Any) -> None:
        loop = compile_loop(statement, **names)
        benchmark.extra_info.update(statement=statement, statements=number)
        loop(number)  # what is slow only once
        benchmark(loop, number)

    return measure
