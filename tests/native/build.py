"""Compile the native code of the tests with the system's compilers, against the installed zcpool."""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import zcpool

HERE = Path(__file__).resolve().parent

CC = shlex.split(os.environ.get("CC", "cc"))
CXX = shlex.split(os.environ.get("CXX", "c++"))
HAS_CXX = shutil.which(CXX[0]) is not None

# Code of the tests is built with the sanitizer that the package was built with: see scripts/sanitize.sh.
SANITIZE = os.environ.get("ZCPOOL_SANITIZE", "")
OPTIMIZE = ["-O1", "-g", "-fno-omit-frame-pointer", f"-fsanitize={SANITIZE}"] if SANITIZE else ["-O2", "-g"]
if "undefined" in SANITIZE:
    OPTIMIZE.append("-fno-sanitize-recover=undefined")

C11 = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-pedantic"]
CXX17 = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-pedantic"]
SHARED = ["-shared", "-fPIC", "-pthread"]
# Python's own headers are not ours to mend: -isystem keeps their warnings out.
PYTHON = ["-isystem", sysconfig.get_path("include"), "-isystem", sysconfig.get_path("platinclude")]
INCLUDE = ["-I", zcpool.get_include()]
MODULE_SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[0]


def environment() -> dict[str, str]:
    """Return the environment for a compiler: without the runtime of a sanitizer, which it would carry."""
    return {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}


def compile_native(out: Path, *sources: Path, flags: list[str]) -> Path:
    """Compile sources of one language; the warnings of the compiler fail the test."""
    compiler = CXX if sources[0].suffix == ".cpp" else CC
    command = [*compiler, *OPTIMIZE, *flags, *INCLUDE, *map(str, sources), "-o", str(out), "-pthread", "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment(), check=False)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stderr}"
    return out


def compile_library(folder: Path, source: Path, *, name: str | None = None, defines: tuple[str, ...] = ()) -> Path:
    """Compile a shared library that knows nothing of Python."""
    flags = [*(CXX17 if source.suffix == ".cpp" else C11), *SHARED, *(f"-D{define}" for define in defines)]
    return compile_native(folder / f"lib{name or source.stem}.so", source, flags=flags)


def compile_module(folder: Path, source: Path) -> Path:
    """Compile an extension module of the name of its source."""
    flags = [*(CXX17 if source.suffix == ".cpp" else C11), *SHARED, *PYTHON]
    return compile_native(folder / f"{source.stem}{MODULE_SUFFIX}", source, flags=flags)


def compile_cython(folder: Path, source: Path) -> Path:
    """Compile a .pyx in `folder` to a module, with cimport from the installed zcpool."""
    target = folder / source.name
    if target != source:
        shutil.copy(source, target)
    command = [sys.executable, "-m", "cython", "-3", "-I", str(Path(zcpool.__file__).parents[1]), target.name]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=300, env=environment(), check=False
    )
    assert done.returncode == 0, done.stderr
    made = target.with_suffix(".c")
    # The pxd files of the core include headers of their own beside them.
    flags = ["-std=gnu11", "-O0", *SHARED, *PYTHON, "-I", str(Path(zcpool.__file__).parent)]
    return compile_native(folder / f"{source.stem}{MODULE_SUFFIX}", made, flags=flags)


def load_module(path: Path) -> ModuleType:
    """Import an extension module from a file."""
    name = path.name.partition(".")[0]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def get_api() -> int:
    """Return the address of the table of functions."""
    library = ctypes.CDLL(zcpool.get_library())
    library.zcpool_get_api.restype = ctypes.c_void_p
    library.zcpool_get_api.argtypes = [ctypes.c_uint32]
    address: int = library.zcpool_get_api(1)
    return address
