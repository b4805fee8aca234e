"""What tests of several files share."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

import zcpool

MakePool = Callable[..., zcpool.Pool]  # what the fixture make_pool is


def eventually(condition: Callable[[], object], seconds: float = 20) -> bool:
    """Return whether the condition comes true within some time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


class Workers:
    """Threads that run ``work(i)``, i from 0; leaving the ``with`` block joins them and raises what one raised."""

    def __init__(self, count: int, work: Callable[[int], object]) -> None:
        self._start = threading.Barrier(count)
        self._errors: list[BaseException] = []
        self.threads = [threading.Thread(target=self._run, args=(work, i), daemon=True) for i in range(count)]

    def __enter__(self) -> Workers:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, kind: object, error: object, traceback: object, /) -> None:
        self.join()

    @property
    def running(self) -> bool:
        return any(thread.is_alive() for thread in self.threads)

    def join(self, seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        for thread in self.threads:
            thread.join(max(0, deadline - time.monotonic()))
        if self._errors:
            raise self._errors[0]
        assert not self.running, "threads hang"

    def _run(self, work: Callable[[int], object], i: int) -> None:
        try:
            self._start.wait(60)
            work(i)
        except BaseException as error:
            self._errors.append(error)


def in_threads(count: int, work: Callable[[int], object]) -> None:
    """Run ``work(i)`` in `count` threads at once, to the end."""
    with Workers(count, work):
        pass


class Signal:
    """An fd that becomes readable: what a device's fence is to the host. `fd` is for the pool to take over.

    An eventfd, or a pipe where there is none (or where one is asked for).
    """

    def __init__(self, pipe: bool = not hasattr(os, "eventfd")) -> None:
        if pipe:
            self.fd, self._write = os.pipe()
        else:
            self.fd = os.eventfd(0)
            self._write = os.dup(self.fd)

    def set(self) -> None:
        """Make the fd readable, once."""
        os.write(self._write, (1).to_bytes(8, sys.byteorder))
        os.close(self._write)
