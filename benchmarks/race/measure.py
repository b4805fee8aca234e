"""Turns: every contender runs for a moment, then the next, several hundred times."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from . import native
from .patterns import Case, Pattern
from .peers import ARITHMETIC, Contender

MOST = 200_000  # repetitions in a turn
TWO_CORES = 1.95  # times one thread's rate: how arithmetic scales on cores of their own
TRIES = 5


@dataclass(frozen=True)
class Contest:
    """What came of a case: for each contender a figure of every round."""

    pattern: str
    label: str
    nbytes: int  # of a block; 0 where they differ
    samples: dict[str, list[float]]  # in the pattern's unit


@dataclass(frozen=True)
class Effort:
    """How long to look: the rounds at most and at least, and the seconds after which fewer will do."""

    rounds: int = 400
    least_rounds: int = 15
    seconds: float = 1.0
    turn_ns: float = 50_000


def hold(
    library: ctypes.CDLL, pattern: Pattern, case: Case, contenders: Sequence[Contender], effort: Effort
) -> Contest:
    """Hold a contest.

    The two CPUs of a virtual machine may be two cores of the host at one time and two threads of one core at another.
    So of two threads' rates those rounds count in which arithmetic, which shares nothing but a core, scales.
    """
    effort = replace(effort, turn_ns=pattern.turn_ns)
    samples: dict[str, list[float]] = {c.name: [] for c in contenders}
    for _ in range(TRIES):
        new = run(library, pattern.turn, contenders, [case.make_job() for _ in contenders], effort)
        keep = [n for n, rate in enumerate(new[ARITHMETIC]) if rate >= TWO_CORES] if pattern.scaling else None
        for name, values in new.items():
            samples[name] += values if keep is None else [values[n] for n in keep]
        if len(samples[contenders[0].name]) >= effort.least_rounds:
            break
    return Contest(pattern.name, case.label, case.nbytes, samples)


def run(
    library: ctypes.CDLL,
    turn: str,
    contenders: Sequence[Contender],
    jobs: Sequence[native.CJob],
    effort: Effort,
) -> dict[str, list[float]]:
    """Let the contenders take turns at their jobs; the slots of the jobs are empty again afterwards."""
    count = len(contenders)
    structs = (native.CContender * count)(*(c.struct for c in contenders))
    each = (native.CJob * count)(*jobs)
    function = native.address(getattr(library, turn))

    def turns(numbers: list[int], rounds: int) -> list[float]:
        values = (ctypes.c_double * (rounds * count))()
        library.race_run(function, structs, each, (ctypes.c_size_t * count)(*numbers), count, rounds, values)
        return list(values)

    fits = [fitting_number(library, function, struct, job, effort.turn_ns) for struct, job in zip(structs, each)]
    numbers = (ctypes.c_size_t * count)(*(number for number, _ in fits))
    seconds = sum(ns for _, ns in fits) / 1e9
    rounds = max(effort.least_rounds, min(effort.rounds, int(effort.seconds / seconds)))
    values = (ctypes.c_double * (rounds * count))()
    library.race_run(function, structs, each, numbers, count, rounds, values)
    for struct, job in zip(structs, each):
        library.race_clear(ctypes.byref(struct), ctypes.byref(job))
    return {c.name: values[who::count] for who, c in enumerate(contenders)}


def fitting_number(
    library: ctypes.CDLL, turn: int, struct: native.CContender, job: native.CJob, turn_ns: float
) -> tuple[int, float]:
    """Return how many repetitions take about a turn, and the nanoseconds they take; warms up, too."""

    def took(number: int) -> float:
        start = time.perf_counter_ns()
        library.race_run(
            turn, ctypes.byref(struct), ctypes.byref(job), ctypes.byref(ctypes.c_size_t(number)), 1, 1, value
        )
        return time.perf_counter_ns() - start

    value = ctypes.byref(ctypes.c_double())
    number = 1
    while (ns := min(took(number) for _ in range(3))) < turn_ns / 4 and number < MOST:
        number *= 4
    fitting = max(1, min(MOST, round(number * turn_ns / ns)))
    return fitting, ns * fitting / number


@contextmanager
def two_cpus(library: ctypes.CDLL) -> Iterator[bool]:
    """Keep this thread on one CPU and the library's second one on another; says whether there are two."""
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        yield False
        return
    first, second = sorted(allowed)[:2]
    if not getattr(library, "helper_started", False):
        if library.race_start_helper(first, second):
            raise RuntimeError("cannot start a thread")
        library.helper_started = True
    os.sched_setaffinity(0, {first})
    try:
        yield True
    finally:
        os.sched_setaffinity(0, allowed)
