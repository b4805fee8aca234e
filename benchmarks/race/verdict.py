"""The budgets of the C level, and whether they are kept.

Times are compared within a round: one contender's turn is divided by another's next to it, and the median of these
ratios counts. The fastest peer is the one with the greatest ratio.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .measure import Contest
from .patterns import KIB, MIB
from .peers import INLINED, NO_PEERS, OURS, TABLE

KEPT, EVEN, BROKEN, UNKNOWN, NO_BUDGET = "kept", "even", "BROKEN", "not measured", ""
GIVE_BACK = ("glibc", "jemalloc")  # the peers that give large blocks back to the system
MEMORY_FROM = 64 * MIB  # bytes live at a trace's peak, from which on memory has a budget


@dataclass(frozen=True)
class Figure:
    """The median, and the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Figure:
        low, median, high = statistics.quantiles(samples, n=4) if len(samples) > 1 else [*samples] * 3
        return cls(median, low, high)


@dataclass(frozen=True)
class Budget:
    """What the ratio to the fastest peer may be at most or, `at_least`, what a rate must be."""

    limit: float
    at_least: bool = False
    against: tuple[str, ...] = ()  # these peers only
    even: bool = False  # by nature all are alike: broken only where three rounds of four are beyond the limit

    def verdict(self, figure: Figure) -> str:
        """Hold a figure against the budget."""
        if figure.median >= self.limit if self.at_least else figure.median <= self.limit:
            return KEPT
        return EVEN if self.even and figure.low <= self.limit else BROKEN

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.limit:g}"


@dataclass(frozen=True)
class Row:
    """How one of zcpool's ways did in a contest."""

    pattern: str
    label: str
    nbytes: int
    way: str
    value: Figure | None  # in the pattern's unit; None: no round could be used
    peers: dict[str, Figure]
    ratio: Figure | None  # to the fastest peer, where there is one and lower is better
    fastest: str | None
    budget: Budget | None

    @property
    def verdict(self) -> str:
        if self.budget is None:
            return NO_BUDGET
        figure = self.value if self.budget.at_least else self.ratio
        return self.budget.verdict(figure) if figure else UNKNOWN

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}


def budget_of(pattern: str, way: str, nbytes: int) -> Budget | None:
    """Return the budget, where there is one; `nbytes` is a block's size, of `memory` the trace's peak."""
    if pattern == "pair" and way == INLINED:
        return Budget(0.65) if nbytes <= 256 * KIB else None
    if pattern == "pair":
        return Budget(1.1 if nbytes <= 256 * KIB else 0.5 if 512 * KIB <= nbytes <= MIB else 1.0)
    if pattern == "memory":
        return Budget(1.1) if way == TABLE and nbytes >= MEMORY_FROM else None
    return {
        "touched": Budget(1.0, even=True),
        "mixed": Budget(1 / 20, against=GIVE_BACK),
        "threads": Budget(1.8, at_least=True),
        "handoff": Budget(1.0),
    }.get(pattern)


def judge(contest: Contest) -> list[Row]:
    """Return a row for each of zcpool's ways that took part."""
    figures = {name: Figure.of(samples) for name, samples in contest.samples.items() if samples}
    rows = []
    for way in (way for way in OURS if way in contest.samples):
        budget = budget_of(contest.pattern, way, contest.nbytes)
        ratios = {
            name: Figure.of([ours / peer for ours, peer in zip(contest.samples[way], contest.samples[name])])
            for name in figures
            if name not in NO_PEERS and (not budget or not budget.against or name in budget.against)
        }
        if budget and budget.at_least:
            ratios = {}  # more is better, and the limit is not a peer's
        fastest = max(ratios, key=lambda name: ratios[name].median, default=None)
        peers = {name: figure for name, figure in figures.items() if name not in OURS}
        where = (contest.pattern, contest.label, contest.nbytes, way)
        rows.append(Row(*where, figures.get(way), peers, ratios[fastest] if fastest else None, fastest, budget))
    return rows
