"""Memory held: what a trace makes a contender take from the system, beside what is live at its peak.

Each contender replays the trace in a process of its own, three times over, and writes to every page. A peer is charged
with the resident memory it adds at its peak, zcpool with what it has reserved at its peak. Time is not part of it: what
is given back only after a while counts as held.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import zcpool

from . import native, peers
from .patterns import PAGE
from .traces import all_traces

REPLAYS = 3


@dataclass(frozen=True)
class Held:
    """Bytes at the peak."""

    resident: int
    reserved: int | None  # by zcpool's own books

    @property
    def charged(self) -> int:
        return self.resident if self.reserved is None else self.reserved


def status_bytes(field: str) -> int:
    """Return a figure of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"/proc/self/status does not say {field}")


def replay(name: str, trace_name: str, library: Path) -> Held:
    """Replay a trace in this process, which has done nothing else."""
    trace = next(t for t in all_traces() if t.name == trace_name)
    job = trace.make_job(PAGE)
    race = native.open_race(library)
    with zcpool.Pool() if name == peers.TABLE else contextlib.nullcontext() as pool:
        found = peers.our_ways(pool) if pool else peers.open_peers((name,))[0]
        struct, value, once = found[0].struct, ctypes.c_double(), ctypes.c_size_t(REPLAYS)
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak is that of now
        before = status_bytes("VmRSS")
        function = native.address(race.turn_trace)
        race.race_run(function, ctypes.byref(struct), ctypes.byref(job), ctypes.byref(once), 1, 1, ctypes.byref(value))
        resident = status_bytes("VmHWM") - before
        return Held(resident, pool.stats().peak_reserved_bytes if pool else None)


def measure(name: str, trace_name: str, library: Path) -> Held:
    """Replay a trace in a new process."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(replay, name, trace_name, library).result()
