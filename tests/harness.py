"""What several test files need: a backend that keeps a journal, children with a watchdog, scripts of their own."""

from __future__ import annotations

import gc
import mmap
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from pathlib import Path

import zcpool

TESTS = Path(__file__).resolve().parent
ROOT = Path(zcpool.__file__).resolve().parents[1]
MIB = 1 << 20
# What hangs hangs for ever; what is built with a sanitizer, on a busy machine, only takes its time.
PATIENCE = 5 if "ZCPOOL_SANITIZE" in os.environ else 1


class Journal:
    """What a `Pages` backend did; it outlives the backend.

    Attributes
    ----------
    live : dict of int to (memory, int)
        By the region's identity: what the pool holds (and so keeps from being reused), and its number.
    freed : list of int
        The numbers of the regions given back, in order.
    faults : list of str
        Whatever a pool must never do.
    """

    def __init__(self):
        self.live = {}
        self.freed = []
        self.allocated = 0
        self.synced = []
        self.threads = []
        self.processes = []
        self.faults = []

    def __repr__(self):
        return f"<{self.allocated} allocated, {len(self.freed)} freed, faults: {self.faults}>"


class Pages(zcpool.PythonBackend):
    """Memory from mmap. Freeing closes the map, which fails while a view of it is held."""

    def __init__(self, journal=None, **options):
        options.setdefault("alignment", mmap.PAGESIZE)
        super().__init__("pages", **options)
        self.journal = Journal() if journal is None else journal

    def allocate(self, nbytes, alignment):
        memory = mmap.mmap(-1, nbytes)
        self.journal.live[id(memory)] = (memory, self.journal.allocated)
        self.journal.allocated += 1
        return memory

    def free(self, memory):
        journal = self.journal
        journal.threads.append(threading.get_ident())
        journal.processes.append(os.getpid())
        _, number = journal.live.pop(id(memory), (None, None))
        if number is None:
            journal.faults.append("a region was freed twice, or is not ours")
            return
        journal.freed.append(number)
        try:
            memory.close()
        except BufferError:
            journal.faults.append(f"region {number} was freed while somebody holds a view of it")

    def sync(self, memory, offset, nbytes, direction):
        _, number = self.journal.live.get(id(memory), (None, None))
        if number is None:
            self.journal.faults.append("sync of a region that has been freed")
        self.journal.synced.append((number, offset, nbytes, direction))


def settle():
    """Let the interpreter run what native code has asked it to do.

    Pending calls run between bytecodes; those from other threads are looked for when the GIL is taken again.
    """
    for _ in range(5):
        select.select([], [], [], 0)  # gives the GIL away and takes it again


def readable(fd, timeout=0):
    """Wait until an fd (or an object with one) is readable; say whether it is. Takes fds of any size."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(max(0, timeout) * 1000))


def open_fds():
    """Count the open file descriptors of this process, but for those of garbage: it may go between two looks."""
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


# ---- scripts in an interpreter of their own ------------------------------------------------------------------


def run_python(code, *flags, env=None, timeout=60):
    """Run a script in a new interpreter; a hang is killed and raises `subprocess.TimeoutExpired`."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(TESTS)]), **(env or {})}
    environment.pop("PYTHONWARNINGS", None)
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", *flags, "-c", textwrap.dedent(code)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE * timeout,
    )


def run_quietly(code, *flags, env=None, timeout=60):
    """Run a script that must end with 0 and say nothing on stderr; return its output."""
    done = run_python(code, *flags, env=env, timeout=timeout)
    assert done.returncode == 0, f"ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert done.stderr == "", done.stderr
    return done.stdout


# ---- forked children -----------------------------------------------------------------------------------------


def fork_child(function, *args):
    """Start a forked child that runs a function and leaves without cleaning up; return (pid, pipe).

    What the child has to complain about, exceptions that nobody could raise included, comes through the pipe.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    status = 1
    try:
        os.close(reader)
        complaints = []
        sys.unraisablehook = lambda u: complaints.append(f"unraisable: {u.exc_type.__name__}: {u.exc_value}")
        try:
            function(*args)
        except BaseException:
            complaints.append(traceback.format_exc())
        os.write(writer, "\n".join(complaints).encode()[:60_000])
        status = bool(complaints)
    finally:
        os._exit(status)


def join_child(pid, reader, timeout=60):
    """Wait for a child; return its exit status (minus the signal that ended it) and its complaints.

    A child that hangs is killed, and that is what the complaint says.
    """
    timeout *= PATIENCE
    deadline = time.monotonic() + timeout
    complaints = b""
    try:
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not readable(reader, left):
                os.kill(pid, signal.SIGABRT)  # with faulthandler on, it says where
                os.waitpid(pid, 0)
                return -signal.SIGABRT, f"the child hung for {timeout} s; {complaints.decode()}"
            piece = os.read(reader, 65536)
            if not piece:
                break
            complaints += piece
    finally:
        os.close(reader)
    _, status = os.waitpid(pid, 0)
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status), complaints.decode()


def in_child(function, *args, timeout=60):
    """Run a function in a forked child and fail as it fails."""
    status, complaints = join_child(*fork_child(function, *args), timeout=timeout)
    if status or complaints:
        raise AssertionError(f"the child ended with {status}: {complaints}")
