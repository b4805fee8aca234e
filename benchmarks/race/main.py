"""The race: zcpool against the allocators one could take instead, in C, side by side in one process.

    python benchmarks/race [--quick] [--only PATTERN,...] [--sizes 64KiB,8MiB] [--rounds N] [--json FILE] [--png FILE]

Ends with 1 when a budget is broken.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from machine import describe
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import zcpool

from . import memory, native, patterns, peers, report, traces
from .measure import Contest, Effort, hold, two_cpus
from .plot import draw
from .verdict import Row, judge

MEMORY = "memory"
MEMORY_TITLE = "memory held at the peak of a trace: zcpool reserved, peers resident"
NAMES = (*(p.name for p in patterns.PATTERNS), MEMORY)
QUICK_SIZES = (256, 64 << 10, 1 << 20, 8 << 20, 64 << 20)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="race",
        description="zcpool against mimalloc, jemalloc, tcmalloc and glibc, in C, side by side in one process.",
        epilog="Ends with 1 when a budget is broken.",
    )
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds: a first impression")
    parser.add_argument("--only", metavar="PATTERN,...", default=",".join(NAMES), help=f"of {', '.join(NAMES)}")
    parser.add_argument("--sizes", metavar="N,...", help="sizes of blocks, instead of the patterns' own")
    parser.add_argument("--rounds", type=int, metavar="N", help="at most (400)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw them there")
    options = parser.parse_args(arguments)
    options.only = options.only.split(",")
    if unknown := set(options.only) - set(NAMES):
        parser.error(f"no pattern {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    if options.rounds is not None and options.rounds < 2:
        parser.error("--rounds must be 2 or more")
    return options


def sizes_of(options: argparse.Namespace) -> tuple[int, ...]:
    if options.sizes:
        with zcpool.Pool() as pool:
            return tuple(pool.acquire(text).nbytes for text in options.sizes.split(","))  # as the pool understands them
    return QUICK_SIZES if options.quick else patterns.SIZES


def effort_of(options: argparse.Namespace) -> Effort:
    usual = Effort(rounds=60, least_rounds=9, seconds=0.2) if options.quick else Effort()
    return Effort(options.rounds or usual.rounds, min(usual.least_rounds, options.rounds or 400), usual.seconds)


@contextlib.contextmanager
def progress_of(console: Console, title: str, total: int) -> Iterator[Any]:
    """Show how far a pattern is; yields what to call before each case."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # A display that is drawn by a thread of its own would take part in the race.
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:
        task = progress.add_task(title, total=total)

        def step(label: str) -> None:
            progress.update(task, description=f"{title}: {label}", advance=1, refresh=True)

        yield step


def race_pattern(
    console: Console,
    library: ctypes.CDLL,
    pattern: patterns.Pattern,
    sizes: Sequence[int],
    effort: Effort,
    others: Sequence[peers.Contender],
) -> list[Row]:
    """Hold the contests of a pattern, with a pool of its own, and print them."""
    cases = pattern.cases(sizes)
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(zcpool.Pool())
        if pattern.two_threads and not stack.enter_context(two_cpus(library)):
            console.print(f"{pattern.name}: not measured, this process has but one CPU")
            return rows
        control = [peers.control(library, pattern.control)] if pattern.control else []
        contenders = [*control, *others, *peers.our_ways(pool)]
        step = stack.enter_context(progress_of(console, pattern.name, len(cases)))
        for case in cases:
            step(case.label)
            rows += judge(hold(library, pattern, case, contenders, effort))
    if rows:
        report.print_pattern(console, pattern.title, "times" if pattern.scaling else "ns", rows)
    return rows


def race_memory(console: Console, library: Path, others: Sequence[peers.Contender]) -> list[Row]:
    """Replay the traces, and print what was held."""
    names = [*(peer.name for peer in others), peers.TABLE]
    rows: list[Row] = []
    with progress_of(console, MEMORY, len(names) * len(traces.all_traces())) as step:
        for trace in traces.all_traces():
            samples: dict[str, list[float]] = {}
            for name in names:
                step(f"{trace.name}, {name}")
                held = memory.measure(name, trace.name, library)
                samples[name] = [held.charged]
                if name == peers.TABLE:
                    samples[peers.RESIDENT] = [held.resident]
            label = f"{trace.name}, {trace.peak_bytes / patterns.MIB:.1f} live"
            rows += judge(Contest(MEMORY, label, trace.peak_bytes, samples))
    report.print_pattern(console, MEMORY_TITLE, "MiB", rows)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    peers.ready_for_all()
    console, rows = report.make_console(), []
    others, missing = peers.open_peers()
    effort, sizes = effort_of(options), sizes_of(options)
    machine = {
        **describe(),
        "peers": {p.name: p.version for p in others},
        "missing": {p.name: p.install for p in missing},
    }
    versions = ", ".join(f"{name} {version}" for name, version in machine["peers"].items())
    console.print(f"zcpool {zcpool.__version__} against {versions}, on {machine['cpu']}\n")
    with tempfile.TemporaryDirectory() as folder:
        path = native.compile_race(Path(folder))
        library = native.open_race(path)
        for pattern in patterns.PATTERNS:
            if pattern.name in options.only:
                rows += race_pattern(console, library, pattern, sizes, effort, others)
        if MEMORY in options.only:
            rows += race_memory(console, path, others)
    kept = report.conclude(console, rows, missing)
    if options.json:
        result = {"machine": machine, "effort": asdict(effort), "complete": not missing}
        options.json.write_text(json.dumps({**result, "rows": [row.to_dict() for row in rows]}, indent=2) + "\n")
    if options.png:
        # In a new process: the C++ of matplotlib is not to meet tcmalloc's operator delete.
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            process.submit(draw, rows, options.png).result()
    return 0 if kept else 1
