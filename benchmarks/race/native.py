"""The C side of the race: compiled with the system's compiler against the installed zcpool, called with ctypes."""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

import zcpool

HERE = Path(__file__).resolve().parent
SOURCES = ("turns.c", "threads.c")
FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Werror", "-pedantic", "-shared", "-fPIC", "-pthread"]

PEER, TABLE, INLINED = range(3)


class CContender(ctypes.Structure):
    """`contender` of race.h."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("unused", ctypes.c_int),
        ("malloc", ctypes.c_void_p),
        ("free", ctypes.c_void_p),
        ("api", ctypes.c_void_p),
        ("pool", ctypes.c_uint64),
    )


class COp(ctypes.Structure):
    """`op` of race.h: acquire `nbytes` into a slot, or release it (0)."""

    _fields_ = (("slot", ctypes.c_uint64), ("nbytes", ctypes.c_uint64))


class CJob(ctypes.Structure):
    """`job` of race.h."""

    _fields_ = (
        ("sizes", ctypes.POINTER(ctypes.c_size_t)),
        ("size_count", ctypes.c_size_t),
        ("touch_bytes", ctypes.c_size_t),
        ("batch", ctypes.c_size_t),
        ("ops", ctypes.POINTER(COp)),
        ("op_count", ctypes.c_size_t),
        ("slots", ctypes.POINTER(ctypes.c_void_p)),
        ("slot_count", ctypes.c_size_t),
    )


def compile_race(folder: Path) -> Path:
    """Compile the library into a folder."""
    out = folder / "librace.so"
    compiler = shlex.split(os.environ.get("CC", "cc"))
    sources = [str(HERE / name) for name in SOURCES]
    command = [*compiler, *FLAGS, "-I", zcpool.get_include(), *sources, "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)}\n{done.stderr}")
    return out


def open_race(path: Path) -> ctypes.CDLL:
    """Load the library."""
    library = ctypes.CDLL(str(path))
    pointer = ctypes.c_void_p
    library.race_run.argtypes = (pointer, pointer, pointer, pointer, ctypes.c_size_t, ctypes.c_size_t, pointer)
    library.race_run.restype = None
    library.race_clear.argtypes = (pointer, pointer)
    library.race_clear.restype = None
    return library


def address(function: object) -> int:
    """Return where a function of a library lies."""
    value = ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]
    assert value
    return value


def get_api() -> int:
    """Return the address of zcpool's table of functions."""
    door = ctypes.CDLL(zcpool.get_library()).zcpool_get_api
    door.restype = ctypes.c_void_p
    door.argtypes = [ctypes.c_uint32]
    found: int | None = door(1)
    if not found:
        raise RuntimeError("the installed zcpool does not speak the ABI that the race was written for")
    return found


def make_job(
    sizes: Sequence[int] = (),
    *,
    touch_bytes: int = 0,
    batch: int = 1,
    ops: ctypes.Array[COp] | None = None,
    slot_count: int = 0,
) -> CJob:
    """Return a job, with slots of its own."""
    return CJob(
        (ctypes.c_size_t * len(sizes))(*sizes),
        len(sizes),
        touch_bytes,
        batch,
        ops,
        0 if ops is None else len(ops),
        (ctypes.c_void_p * slot_count)(),
        slot_count,
    )
