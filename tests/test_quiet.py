"""A hit makes no system call, allocates nothing and waits for no lock (tests/native/quiet.c)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import zcpool

SOURCE = Path(__file__).with_name("native") / "quiet.c"
PRELUDE = """
import ctypes, gc, sys
import zcpool
gc.disable()
quiet = ctypes.CDLL(sys.argv[1])
"""

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.confstr("CS_GNU_LIBC_VERSION") is None, reason="needs seccomp and glibc's malloc"
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("quiet") / "libquiet.so"
    cc = os.environ.get("CC", "cc").split()
    assert shutil.which(cc[0]), "a C compiler is needed"
    include = f"-I{zcpool.get_include()}"
    subprocess.run([*cc, "-std=gnu11", "-O1", "-fPIC", "-shared", include, str(SOURCE), "-o", out], check=True)
    return str(out)


def run(library: str, code: str, **environment: str) -> str:
    root = str(Path(zcpool.__file__).parents[1])
    path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code, library],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"ended with {done.returncode}\n{done.stderr}"
    return done.stdout


def test_a_hit_and_a_release_enter_no_kernel_while_others_hold_the_lock(library: str) -> None:
    out = run(
        library,
        """
table = ctypes.CDLL(zcpool.get_library()).zcpool_get_api
table.restype = ctypes.c_void_p
pool = zcpool.Pool()
many = [pool.acquire(64) for _ in range(20000)]
sizes = (ctypes.c_size_t * 5)(300, 5000, 3 << 20, 20 << 20, 0)
for n in sizes[:4]:
    pool.reserve(n, 2)
quiet.quiet_run.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p]
print(quiet.quiet_run(table(1), pool.c_handle, sizes))
""",
    )
    assert out == "1\n"


def test_a_hit_in_python_allocates_nothing(library: str) -> None:
    out = run(
        library,
        """
pool = zcpool.Pool()
counting, counted = (ctypes.c_int.in_dll(quiet, "counting"), ctypes.c_long.in_dll(quiet, "counted"))
def hits(n):
    for _ in range(n):
        for size in (300, 5000, 3 << 20):
            pool.acquire(size).release()
hits(1000)
counting.value = 1
bytearray(100000)
seen = counted.value
hits(10000)
counting.value = 0
print(seen > 0, counted.value - seen)
""",
        LD_PRELOAD=library,
    )
    assert out == "True 0\n"
