"""What is measured: patterns, and the cases of each."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Callable

from .native import CJob, make_job
from .peers import ARITHMETIC, FLOOR
from .traces import all_traces

KIB, MIB = 1 << 10, 1 << 20
NV12 = 1920 * 1080 * 3 // 2  # bytes of a 1080p frame
PAGE = mmap.PAGESIZE

SIZES = tuple(sorted([*(1 << k for k in range(8, 27)), 600_000, 960 * KIB, 3_000_000, NV12, 24 * MIB, 48 * MIB]))
MIXED = tuple(n * MIB for n in (33, 47, 64, 40, 54, 36, 60))  # above 32 MiB, where glibc keeps none
LARSON = tuple(2**k * (8 + j) // 8 for k in range(8, 16) for j in range(8))  # 256 B to 60 KiB, each as often
LARSON_SLOTS = 1024


@dataclass(frozen=True)
class Case:
    """One contest of a pattern."""

    label: str
    nbytes: int  # of a block; 0 where they differ
    make_job: Callable[[], CJob]  # for each contender its own


@dataclass(frozen=True)
class Pattern:
    """Contests of one kind."""

    name: str
    title: str
    turn: str  # the function of the library
    cases: Callable[[Iterable[int]], list[Case]]
    turn_ns: float = 50_000
    two_threads: bool = False
    control: str | None = None  # who takes part besides, where no memory is needed
    scaling: bool = False  # rates, not nanoseconds


def size_text(nbytes: int) -> str:
    """Return a size as people write it."""
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes:,} B"


def batch_of(nbytes: int) -> int:
    """Return how many blocks a producer hands over at a time: 1 MiB, from 1 block to 32."""
    return max(1, min(32, MIB // nbytes))


def by_size(
    sizes: Iterable[int], *, touch_bytes: int = 0, above: int = 0, below: int = 1 << 63, hand_over: bool = False
) -> list[Case]:
    return [
        Case(size_text(n), n, partial(make_job, (n,), touch_bytes=touch_bytes, batch=batch_of(n) if hand_over else 1))
        for n in sizes
        if above < n < below
    ]


def mixed(_: Iterable[int]) -> list[Case]:
    span = f"{MIXED[0] // MIB}-{max(MIXED) // MIB} MiB"
    return [
        Case(f"{span}, first byte", 0, partial(make_job, MIXED)),
        Case(f"{span}, every page", 0, partial(make_job, MIXED, touch_bytes=PAGE)),
    ]


def larson(_: Iterable[int]) -> list[Case]:
    return [Case("256 B to 60 KiB", 0, partial(make_job, LARSON, slot_count=LARSON_SLOTS))]


def traced(_: Iterable[int], *, touch_bytes: int = 0) -> list[Case]:
    return [Case(trace.name, 0, partial(trace.make_job, touch_bytes)) for trace in all_traces()]


PATTERNS = (
    Pattern("pair", "acquire and release, first byte touched", "turn_pairs", by_size, control=FLOOR),
    Pattern(
        "touched",
        "acquire and release, every page touched",
        "turn_pairs",
        partial(by_size, touch_bytes=PAGE, above=PAGE),
    ),
    Pattern("mixed", "sizes above 32 MiB in turn, against those that give memory back", "turn_pairs", mixed),
    Pattern(
        "threads",
        "two threads on private blocks, times one thread's rate",
        "turn_scaling",
        partial(by_size, below=MIB),
        turn_ns=300_000,
        two_threads=True,
        control=ARITHMETIC,
        scaling=True,
    ),
    Pattern(
        "handoff",
        "blocks made in one thread and released in another",
        "turn_handoff",
        partial(by_size, below=MIB, hand_over=True),
        turn_ns=300_000,
        two_threads=True,
    ),
    Pattern(
        "larson",
        "two threads replace blocks at random, and end",
        "turn_larson",
        larson,
        turn_ns=2_000_000,
        two_threads=True,
    ),
    Pattern("traces", "a step of a pipeline's trace, first byte touched", "turn_trace", traced),
    Pattern(
        "traces-touched",
        "a step of a pipeline's trace, every page touched",
        "turn_trace",
        partial(traced, touch_bytes=PAGE),
    ),
)
