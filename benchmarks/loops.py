"""Statements compiled into loops, as timeit does.

Everything that is compared is measured by the same loop::

    def loop(repeat, clock, pool, n, numpy):
        start = clock()
        for _ in repeat:
            STATEMENT
        return clock() - start

The names a statement uses are local variables, builtins are builtins. Nothing is subtracted: the loop itself costs a
few nanoseconds a turn, the same for all.
"""

from __future__ import annotations

import itertools
import textwrap
import time
from typing import Any, Callable

TEMPLATE = """
def loop(repeat, clock{names}):
    start = clock()
    for _ in repeat:
{statement}
    return clock() - start
"""


def compile_loop(statement: str, **names: Any) -> Callable[[int], int]:
    """Return a function that runs the statement so many times and returns the nanoseconds that took."""
    source = TEMPLATE.format(
        names="".join(f", {name}" for name in names), statement=textwrap.indent(statement, " " * 8)
    )
    space: dict[str, Any] = {}
    exec(compile(source, f"<{statement}>", "exec"), space)
    loop, values = space["loop"], tuple(names.values())

    def run(number: int) -> int:
        elapsed: int = loop(itertools.repeat(None, number), time.perf_counter_ns, *values)
        return elapsed

    return run
