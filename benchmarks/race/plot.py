"""The race as a picture: what each contender takes by size, and what it holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .patterns import MIB, PATTERNS, size_text
from .peers import ARITHMETIC, FLOOR, INLINED, RESIDENT, TABLE
from .verdict import Figure, Row

STYLES = {
    TABLE: {"color": "#d62728", "linewidth": 2.4, "zorder": 3},
    INLINED: {"color": "#ff9896", "linewidth": 2.4, "zorder": 3},
    "mimalloc": {"color": "#1f77b4"},
    "jemalloc": {"color": "#2ca02c"},
    "tcmalloc": {"color": "#9467bd"},
    "glibc": {"color": "#8c564b"},
    RESIDENT: {"color": "#f7c6c5"},
    FLOOR: {"color": "#bbbbbb", "linestyle": ":"},
    ARITHMETIC: {"color": "#bbbbbb", "linestyle": ":"},
}
TITLES = {pattern.name: pattern.title for pattern in PATTERNS}


def time_text(ns: float) -> str:
    """Return a time as axes have it."""
    for unit, name in ((1e6, "ms"), (1e3, "µs")):
        if ns >= unit:
            return f"{ns / unit:g} {name}"
    return f"{ns:g} ns"


def decades_or_more(axes: Any) -> tuple[int, ...]:
    """Return the ticks within a decade: more where few decades are shown."""
    low, high = axes.get_ylim()
    return (1,) if high > 1000 * low else (1, 2, 5)


def by_contender(rows: Sequence[Row]) -> dict[str, list[tuple[Row, Figure]]]:
    """Return each contender's figures, zcpool's ways last."""
    found: dict[str, list[tuple[Row, Figure]]] = {}
    for row in rows:
        for name, figure in row.peers.items():
            found.setdefault(name, []).append((row, figure))
    for row in rows:
        if row.value:
            found.setdefault(row.way, []).append((row, row.value))
    return found


def draw_lines(axes: Any, rows: Sequence[Row], unit: str) -> None:
    """Draw figures against sizes; the bands are the quartiles."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    for name, figures in by_contender(rows).items():
        sizes = [row.nbytes for row, _ in figures]
        style = STYLES[name]
        axes.plot(sizes, [f.median for _, f in figures], marker="o", markersize=3, label=name, **style)
        low, high = [f.low for _, f in figures], [f.high for _, f in figures]
        axes.fill_between(sizes, low, high, color=style["color"], alpha=0.15, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(base=4, numticks=20))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: size_text(int(n)).replace("iB", "")))
    axes.tick_params(axis="x", labelrotation=45)
    axes.set_ylabel(unit)


def draw_bars(axes: Any, rows: Sequence[Row], unit: str, scale: float = 1) -> None:
    """Draw figures of a few cases side by side."""
    found = by_contender(rows)
    labels = list(dict.fromkeys(row.label for row in rows))
    width = 0.8 / len(found)
    for place, (name, figures) in enumerate(found.items()):
        first = {row.label: figure for row, figure in figures}
        where = [labels.index(label) - 0.4 + width * (place + 0.5) for label in first]
        heights = [figure.median / scale for figure in first.values()]
        axes.bar(where, heights, width, label=name, color=STYLES[name]["color"])
    axes.set_xticks(range(len(labels)), labels)
    axes.set_xlim(-0.6, len(labels) - 0.4)
    axes.set_ylabel(unit)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw what was measured into a PNG."""
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    patterns = list(dict.fromkeys(row.pattern for row in rows))
    columns = min(3, len(patterns))
    lines = -(-len(patterns) // columns)
    figure, grid = pyplot.subplots(lines, columns, figsize=(6.4 * columns, 4.6 * lines), squeeze=False)
    for axes, pattern in zip(grid.flat, patterns):
        of_pattern = [row for row in rows if row.pattern == pattern]
        axes.set_title(TITLES.get(pattern, "memory held at a trace's peak"), fontsize=10)
        if pattern == "memory":
            draw_bars(axes, of_pattern, "MiB: zcpool reserved, peers resident", MIB)
        elif len({row.nbytes for row in of_pattern}) > 1 or of_pattern[0].nbytes:
            draw_lines(axes, of_pattern, "times one thread's rate" if pattern == "threads" else "")
        else:
            draw_bars(axes, of_pattern, "")
        if pattern == "memory":
            for place, live in enumerate(dict.fromkeys(row.nbytes for row in of_pattern)):
                axes.hlines(live / MIB, place - 0.45, place + 0.45, "black", "dashed", linewidth=1, label="live")
        elif pattern != "threads":
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=decades_or_more(axes)))
            axes.yaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_major_formatter(FuncFormatter(lambda ns, _: time_text(ns)))
        axes.grid(True, which="major", alpha=0.3)
    for axes in grid.flat[len(patterns) :]:
        axes.axis("off")
    handles = {name: handle for axes in grid.flat for handle, name in zip(*axes.get_legend_handles_labels())}
    figure.legend(handles.values(), handles.keys(), loc="upper center", ncol=len(handles), frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.3 / figure.get_figheight()))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
