"""A strict backend in Python: it counts everything, fails or blocks on demand, and forgives nothing."""

from __future__ import annotations

import ctypes
import mmap
import threading
from typing import Any

import zcpool


class Gate:
    """A door inside `CountingBackend.allocate`: `entered` says that somebody stands in it, `open` lets him go on."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self._go = threading.Event()

    def open(self) -> None:
        self._go.set()

    def pass_through(self) -> None:
        self.entered.set()
        assert self._go.wait(60), "nobody opened the gate"


class CountingBackend(zcpool.PythonBackend):
    """Host memory whose every region is accounted for.

    Regions are mappings of their own: whoever touches one after it was freed is ended by the kernel. What a pool
    must not do (free twice, free what is not a region, keep a view of what it frees, ask for an alignment beyond
    the maximum or a region beyond the largest) raises, and is kept in `misuses`, since an exception in `free` goes
    nowhere.

    Parameters
    ----------
    name : str
    memory : int, optional
        Bytes the "device" has; more is a MemoryError.
    max_alignment : int
        Bytes.
    **options
        As for `zcpool.PythonBackend`.

    Attributes
    ----------
    calls : int
        Calls of `allocate`, successful or not.
    allocations, frees, failures : int
        Regions given, regions taken back, calls of `allocate` that raised.
    live_regions, live_bytes, peak_bytes : int
        What is out now, and the most bytes that ever were.
    asked : list of (int, int)
        The arguments of every call of `allocate`.
    synced : list of (int, int, str)
        Offset, bytes and direction of every call of `sync`.
    """

    def __init__(
        self, name: str = "counting", *, memory: int | None = None, max_alignment: int = 2 << 20, **options: Any
    ) -> None:
        super().__init__(name, max_alignment=max_alignment, **options)
        self.memory = memory
        self.calls = self.allocations = self.frees = self.failures = 0
        self.live_bytes = self.peak_bytes = 0
        self.asked: list[tuple[int, int]] = []
        self.synced: list[tuple[int, int, str]] = []
        self.misuses: list[str] = []
        self.gate: Gate | None = None
        # By id of the view that was given out, which is kept here so that the id stays its own.
        self._regions: dict[int, tuple[memoryview, int, mmap.mmap]] = {}
        self._errors: list[BaseException | type[BaseException]] = []
        # Reentrant: a pool may run free() in any thread that comes by, also in one that stands in here.
        self._lock = threading.RLock()

    @property
    def live_regions(self) -> int:
        return len(self._regions)

    def fail_next(self, count: int = 1, error: BaseException | type[BaseException] = MemoryError) -> None:
        """Let the next `count` allocations raise `error`."""
        with self._lock:
            self._errors += [error] * count

    def fail_no_more(self) -> None:
        """Forget the failures that are still to come."""
        with self._lock:
            self._errors.clear()

    def shut(self) -> Gate:
        """Let the next allocations wait inside until the gate that is returned is opened."""
        self.gate = Gate()
        return self.gate

    def allocate(self, nbytes: int, alignment: int) -> memoryview:
        with self._lock:
            self.calls += 1
            self.asked.append((nbytes, alignment))
        gate = self.gate
        if gate is not None:
            gate.pass_through()
        with self._lock:
            self._check(nbytes >= 1 and nbytes % self.granularity == 0, f"allocate of {nbytes} bytes")
            self._check(nbytes <= self.largest_region, f"allocate of {nbytes} bytes, more than the largest region")
            self._check(
                alignment >= 1 and not alignment & (alignment - 1) and alignment <= self.max_alignment,
                f"allocate with alignment {alignment}",
            )
            if self._errors:
                self.failures += 1
                raise self._errors.pop(0)
            if self.memory is not None and self.live_bytes + nbytes > self.memory:
                self.failures += 1
                raise MemoryError(f"the device has {self.memory} bytes, {self.live_bytes} are out")
            return self._map(nbytes, alignment)

    def free(self, memory: memoryview) -> None:
        with self._lock:
            known = self._regions.pop(id(memory), None)
            self._check(known is not None, "free of memory that is not a region, or not any more")
            assert known is not None
            _, nbytes, mapping = known
            self.frees += 1
            self.live_bytes -= nbytes
            try:
                memory.release()
                mapping.close()
            except BufferError as error:
                self._check(False, f"free of memory that somebody still has a view of: {error}")

    def sync(self, memory: memoryview, offset: int, nbytes: int, direction: str) -> None:
        with self._lock:
            known = self._regions.get(id(memory))
            self._check(known is not None, "sync of memory that is not a region")
            assert known is not None
            self._check(0 <= offset <= offset + nbytes <= known[1], f"sync of {nbytes} bytes at {offset}")
            self.synced.append((offset, nbytes, direction))

    def check(self) -> None:
        """Raise if the pool ever misused the backend."""
        assert not self.misuses, self.misuses

    def check_empty(self) -> None:
        """Raise if the pool misused the backend, or still holds memory of it."""
        self.check()
        assert (self.live_regions, self.live_bytes) == (0, 0)
        assert self.allocations == self.frees

    def _map(self, nbytes: int, alignment: int) -> memoryview:
        spare = alignment if alignment > mmap.PAGESIZE else 0
        mapping = mmap.mmap(-1, nbytes + spare)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        start = -address % alignment
        memory = memoryview(mapping)[start : start + nbytes]
        self._regions[id(memory)] = (memory, nbytes, mapping)
        self.allocations += 1
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return memory

    def _check(self, fine: bool, what: str) -> None:
        if not fine:
            self.misuses.append(what)
            raise AssertionError(what)
