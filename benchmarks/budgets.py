"""The budgets of the Python level, measured side by side in one process.

    python benchmarks/budgets.py [--json FILE] [--rounds N] [--sizes 64KiB,8MiB] [--backend NAME] [--option KEY=VALUE]

A machine that does other things too makes times worthless, and ratios good: the contenders take turns, a few dozen
microseconds each, several hundred times; each turn is divided by the yardstick's turn next to it, and the median of
these ratios is held against the budget. Every contender is a statement in the same compiled loop (see loops.py), with
`pool`, `n` and `numpy` in local variables; the loop's own cost is in all of them. The garbage collector is off, as in
timeit.

    acquire + drop       pool.acquire(n)                        the buffer is dropped at once
    acquire + release    buf = pool.acquire(n); buf.release()   and dropped in the next turn
    with                 with pool.acquire(n): pass
    object()             the cheapest object there is
    numpy.empty(n, u1)   numpy.empty(n, "u1"): n bytes, as the pool gives
    numpy.empty(n)       n float64: eight times as many bytes

What `object()` costs, and so every ratio to it, depends on how the interpreter was built: with profile-guided
optimisation (distributions, python.org) it costs less than in a plain build.

Ends with 1 when a budget is broken, or when a loop that should only have hit called the backend.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import sysconfig
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Callable

import numpy
from loops import compile_loop
from machine import describe, parse_options

import zcpool

FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
TURN_NS = 50_000  # nanoseconds a turn takes, about

STATEMENTS = {
    "object()": "object()",
    "numpy.empty(n, u1)": "numpy.empty(n, 'u1')",
    "numpy.empty(n)": "numpy.empty(n)",
    "acquire + drop": "pool.acquire(n)",
    "acquire + release": "buf = pool.acquire(n)\nbuf.release()",
    "with": "with pool.acquire(n):\n    pass",
}

# what, against what, how many times as much at most
BUDGETS = (
    ("acquire + drop", "object()", 2.0 if FREE_THREADED else 1.5),
    ("acquire + drop", "numpy.empty(n, u1)", 1 / 3),
    ("acquire + drop", "numpy.empty(n)", 1 / 3),
    ("acquire + release", "object()", 2.0),
    ("with", "object()", 4.0),
)


@dataclass(frozen=True)
class Result:
    """How one contender did against its yardstick."""

    nbytes: int
    what: str
    against: str
    what_ns: float  # medians, for one statement
    against_ns: float
    budget: float
    ratio: float  # the median
    quartiles: tuple[float, float]

    @property
    def verdict(self) -> str:
        if self.ratio > self.budget:
            return "BROKEN"
        return "kept" if self.quartiles[1] <= self.budget else "kept, barely"


def fitting_number(loop: Callable[[int], int]) -> int:
    """Return how many statements take about a turn."""
    loop(1000)
    each = min(loop(20) for _ in range(20)) / 20
    return max(2, min(2000, int(TURN_NS / each)))


def measure(pool: zcpool.Pool, n: int, rounds: int) -> list[Result]:
    """Let all contenders take turns, and compare."""
    loops = {name: compile_loop(text, pool=pool, n=n, numpy=numpy) for name, text in STATEMENTS.items()}
    numbers = {name: fitting_number(loop) for name, loop in loops.items()}
    turns: dict[str, list[float]] = {name: [] for name in loops}
    order = list(loops)
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            order.reverse()  # who runs after whom evens out
            for name in order:
                turns[name].append(loops[name](numbers[name]) / numbers[name])
    finally:
        gc.enable()
    results = []
    for what, against, budget in BUDGETS:
        ratios = [a / b for a, b in zip(turns[what], turns[against])]
        low, ratio, high = statistics.quantiles(ratios, n=4)
        medians = statistics.median(turns[what]), statistics.median(turns[against])
        results.append(Result(n, what, against, *medians, budget, ratio, (low, high)))
    return results


def size_text(nbytes: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


def print_table(results: list[Result]) -> None:
    line = "{:>7}  {:38}{:>9}{:>9}{:>8}{:>8}  {:13} {}"
    print(line.format("n", "", "ns", "ns", "ratio", "budget", "quartiles", "verdict"))
    for r in results:
        print(
            line.format(
                size_text(r.nbytes),
                f"{r.what} / {r.against}",
                f"{r.what_ns:.1f}",
                f"{r.against_ns:.1f}",
                f"{r.ratio:.2f}",
                f"{r.budget:.2f}",
                "{:.2f} to {:.2f}".format(*r.quartiles),
                r.verdict,
            )
        )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="The budgets of the Python level, measured side by side in one process.",
        epilog="Ends with 1 when a budget is broken.",
    )
    parser.add_argument("--backend", default="posix", metavar="NAME")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="an option of the backend")
    parser.add_argument("--rounds", type=int, default=400, metavar="N")
    parser.add_argument("--sizes", default="256,64KiB,1MiB,8MiB,64MiB", metavar="N,...")
    parser.add_argument(
        "--json", metavar="FILE", help="write the results there, too (-: to the standard output, alone)"
    )
    options = parser.parse_args(arguments)
    if options.rounds < 2:
        parser.error("--rounds must be 2 or more")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    results: list[Result] = []
    strays = 0
    machine: dict[str, Any] = {**describe(), "backend": options.backend, "options": options.option}
    with zcpool.Pool(options.backend, **parse_options(options.option)) as pool:
        for size in options.sizes.split(","):
            n = pool.acquire(size).nbytes  # understood as the pool does, and cached from now on
            before = pool.stats()
            results += measure(pool, n, options.rounds)
            after = pool.stats()
            strays += after.misses - before.misses + after.backend_frees - before.backend_frees
    broken = [r for r in results if r.verdict == "BROKEN"]
    if options.json != "-":
        print(", ".join(f"{key} {value}" for key, value in machine.items() if key in ("python", "cpu", "backend")))
        print(f"{options.rounds} rounds, taking turns of about {TURN_NS // 1000} µs; medians\n")
        print_table(results)
        print(f"\n{len(broken)} of {len(results)} budgets broken" if broken else f"\nall {len(results)} budgets kept")
        if strays:
            print(f"the pool missed, or called its backend, {strays} time(s) where it should only have hit")
    if options.json:
        rows = [{**asdict(r), "verdict": r.verdict} for r in results]
        text = json.dumps({"machine": machine, "rounds": options.rounds, "strays": strays, "budgets": rows}, indent=2)
        if options.json == "-":
            print(text)
        else:
            Path(options.json).write_text(text + "\n")
    return 1 if broken or strays else 0


if __name__ == "__main__":
    sys.exit(main())
