"""Compile every .pyx below zcpool/ into the extension module of the same name; pyproject.toml says the rest.

Read from the environment:

ZCPOOL_STRICT=1     C warnings, Cython warnings and Cython performance hints are errors
ZCPOOL_SANITIZE=X   build with -fsanitize=X: address, thread or undefined (or several, with commas)
ZCPOOL_CFLAGS       flags for the C compiler, after all others
ZCPOOL_DEFINES      macros, as in "ZC_TAG_BITS=6 ZC_TRACE"
"""

import contextlib
import io
import os
import re
import shlex
import sys
from pathlib import Path

from Cython.Build import cythonize
from Cython.Compiler import Options
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

STRICT = os.environ.get("ZCPOOL_STRICT", "") not in ("", "0")
SANITIZE = os.environ.get("ZCPOOL_SANITIZE", "")
CFLAGS = shlex.split(os.environ.get("ZCPOOL_CFLAGS", ""))
DEFINES = os.environ.get("ZCPOOL_DEFINES", "").split()

# Builds with other flags are kept apart; what belongs to one interpreter says so in its file name.
VARIANT = "-".join(["strict"] * STRICT + SANITIZE.split() + DEFINES + CFLAGS) or "default"
BUILD = Path("build", re.sub(r"[^\w=.+-]+", "_", VARIANT))

DIRECTIVES = {
    "language_level": 3,
    "freethreading_compatible": True,
    "boundscheck": False,
    "wraparound": False,
    "cdivision": True,
    "initializedcheck": False,
    # Plain method descriptors: the interpreter calls them faster than Cython's own function type (a pair of
    # acquire and release by a third). They carry no signature, so it is embedded in the form that inspect,
    # help() and stubtest read, without a line of its own in the docstring.
    "binding": False,
    "embedsignature": True,
    "embedsignature.format": "clinic",
}


def compile_args():
    """Flags for the C compiler: no processor's own, so that every target builds the same."""
    args = ["-std=gnu11", "-O1" if SANITIZE else "-O2", "-fvisibility=hidden", "-pthread"]
    if SANITIZE:
        args += [f"-fsanitize={SANITIZE}", "-g", "-fno-omit-frame-pointer"]
    if STRICT:
        args += ["-Wall", "-Wextra", "-Werror"]  # the C that Cython makes needs no exception
    return args + CFLAGS


def link_args():
    """Flags for the linker."""
    args = ["-pthread"]
    if SANITIZE:
        args.append(f"-fsanitize={SANITIZE}")
    if sys.platform in ("linux", "android"):
        # Kernels with pages of 16 KiB must be able to load the library, and a thread may end after everyone
        # has closed it: its destructor is in there.
        args += ["-Wl,-z,max-page-size=16384", "-Wl,-z,nodelete"]
        if STRICT:
            args.append("-Wl,--fatal-warnings")
    return args


def extensions():
    """One extension for each .pyx."""
    for source in sorted(Path("zcpool").rglob("*.pyx")):
        yield Extension(
            ".".join(source.with_suffix("").parts),
            [str(source)],
            include_dirs=["zcpool", "zcpool/capi/include"],
            define_macros=[(name, value or None) for name, _, value in (item.partition("=") for item in DEFINES)],
            extra_compile_args=compile_args(),
            extra_link_args=link_args(),
            libraries=["dl"] if sys.platform == "linux" else [],  # glibc before 2.34 keeps dlopen there
        )


def cythonized():
    """The extensions, their .pyx compiled to C below build/, where no one mistakes it for source."""
    made = [BUILD / "cython" / source.with_suffix(".c") for source in Path("zcpool").rglob("*.pyx")]
    changed = any(path.exists() and path.stat().st_mtime < Path("setup.py").stat().st_mtime for path in made)
    said = io.StringIO()
    Options.warning_errors = STRICT
    try:
        with contextlib.redirect_stderr(said) if STRICT else contextlib.nullcontext():
            modules = cythonize(
                list(extensions()),
                force=STRICT or changed,  # for Cython, other directives are no reason to compile again
                include_path=["."],
                build_dir=str(BUILD / "cython"),
                compiler_directives=DIRECTIVES,
            )
    finally:
        sys.stderr.write(said.getvalue())
    if said.getvalue().strip():  # a performance hint is not even a warning to Cython, only a line on stderr
        sys.exit("setup.py: Cython has something to say, which ZCPOOL_STRICT forbids")

    # Cython lays copies of our headers beside the C that includes them: the compiler shall read the originals.
    for header in Path("zcpool").rglob("*.h"):
        (BUILD / "cython" / header).unlink(missing_ok=True)

    # Inline functions live in the .pxd and the .h: when one has changed, everything is compiled again.
    shared = [str(path) for suffix in ("pxd", "h") for path in Path("zcpool").rglob(f"*.{suffix}")]
    for module in modules:
        module.depends = [*shared, "setup.py"]
    return modules


class BuildExt(build_ext):
    """Compile in parallel, and in place only what has changed."""

    def finalize_options(self):
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def run(self):
        if self.editable_mode or self.inplace:  # else setuptools starts an editable build from nothing each time
            self.build_lib = str(BUILD / "lib")
            self.build_temp = str(BUILD / "temp")
        else:  # what lies in build/lib may have been built with other flags
            self.force = True
        super().run()

    def copy_extensions_to_source(self):
        force, self.force = self.force, True  # what lies in the source tree may be newer and of another variant
        super().copy_extensions_to_source()
        self.force = force


setup(ext_modules=cythonized(), cmdclass={"build_ext": BuildExt})
