"""The race as a table, and what it comes to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from .patterns import MIB
from .peers import NO_PEERS, Missing
from .verdict import BROKEN, EVEN, KEPT, UNKNOWN, Figure, Row

COLOURS = {KEPT: "green", EVEN: "yellow", BROKEN: "bold red", UNKNOWN: "yellow"}
WIDTH = 160  # characters, where the output is no terminal


def make_console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDTH)


def figure_text(pattern: str, figure: Figure | None) -> str:
    """Return a median as people read it: nanoseconds, mebibytes or a rate."""
    if figure is None:
        return "-"
    if pattern == "memory":
        return f"{figure.median / MIB:.1f}"
    if pattern == "threads":
        return f"{figure.median:.2f}"
    return f"{figure.median:.1f}" if figure.median < 1000 else f"{figure.median:,.0f}"


def ratio_text(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.4f}"


def print_pattern(console: Console, title: str, unit: str, rows: Sequence[Row]) -> None:
    """Print a table for the contests of one pattern: what each contender takes, and how zcpool's ways compare."""
    names = list(dict.fromkeys(name for row in rows for name in row.peers))
    table = Table(title=f"{title} ({unit})", title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", style="dim" if name in NO_PEERS else "")
    for name in ("", unit, "ratio", "quartiles", "budget", "verdict"):
        table.add_column(name, justify="right" if name in (unit, "ratio") else "left", no_wrap=True)
    label = None
    for row in rows:
        head = [""] * (1 + len(names))  # said once for both ways
        if row.label != label:
            label = row.label
            head = [label, *(peer_text(row, name) for name in names)]
        colour = COLOURS.get(row.verdict, "default")
        table.add_row(
            *head,
            row.way,
            figure_text(row.pattern, row.value),
            f"[{colour}]{ratio_text(row.ratio.median)}[/]" if row.ratio else "",
            f"{ratio_text(row.ratio.low)}-{ratio_text(row.ratio.high)}"
            if row.ratio and row.pattern != "memory"
            else "",
            str(row.budget or ""),
            f"[{colour}]{row.verdict}[/]",
        )
    console.print(table)


def peer_text(row: Row, name: str) -> str:
    """Return a peer's figure; that of the fastest stands out."""
    text = figure_text(row.pattern, row.peers.get(name))
    return f"[bold cyan]{text}[/]" if name == row.fastest else text


def conclude(console: Console, rows: Sequence[Row], missing: Sequence[Missing]) -> bool:
    """Print what it comes to; return whether every budget that was measured is kept."""
    counts = Counter(row.verdict for row in rows if row.budget)
    console.print(f"{sum(counts.values())} budgets: " + ", ".join(f"{n} {verdict}" for verdict, n in counts.items()))
    if counts[EVEN]:
        console.print("even: the median is beyond the limit, but a quarter of the rounds or more is not")
    if counts[UNKNOWN]:
        console.print("not measured: the machine has not, or had not, two cores to give")
    for peer in missing:
        console.print(f"[bold yellow]incomplete:[/] {peer.name} is missing ({peer.reason}): {peer.install}")
    return not counts[BROKEN]
