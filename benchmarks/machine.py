"""What a result depends on besides the code, and what the process holds."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import sysconfig
from pathlib import Path
from typing import Any

import zcpool


def parse_options(pairs: list[str]) -> dict[str, Any]:
    """Return the keyword arguments for a backend that ``KEY=VALUE`` words stand for."""
    options: dict[str, Any] = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign or not key.isidentifier():
            raise ValueError(f"an option is written KEY=VALUE, not {pair!r}")
        options[key] = int(value) if value.lstrip("-").isdigit() else value
    return options


def describe() -> dict[str, Any]:
    """Return the versions, and what is known of the machine."""
    versions = {}
    for name in ("numpy", "pyarrow"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "zcpool": zcpool.__version__,
        "python": platform.python_version(),
        "free_threaded": bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
        "compiler": platform.python_compiler(),
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cpus": os.cpu_count(),
        "page_bytes": os.sysconf("SC_PAGE_SIZE"),
        "debug": os.environ.get("ZCPOOL_DEBUG", "") not in ("", "0"),
        **versions,
    }


def cpu_name() -> str:
    """Return the processor's name, as far as it can be known."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "Hardware"):
            return value.strip()
    return platform.processor() or platform.machine()


def holdings() -> dict[str, int]:
    """Return what the process holds: fds, mappings and resident bytes; nothing where there is no /proc."""
    if not sys.platform.startswith(("linux", "android")):
        return {}
    return {
        "fds": sum(1 for _ in Path("/proc/self/fd").iterdir()),
        "mappings": Path("/proc/self/maps").read_text().count("\n"),
        "resident_bytes": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
    }
