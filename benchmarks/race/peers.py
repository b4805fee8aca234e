"""Who takes part: zcpool in its two ways, and the allocators it is held against."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import sys
from dataclasses import dataclass, field
from typing import Callable

import zcpool

from . import native

TABLE, INLINED = "zcpool", "zcpool inlined"
OURS = (TABLE, INLINED)
FLOOR, ARITHMETIC, RESIDENT = "two bare calls", "arithmetic", "zcpool resident"
NO_PEERS = (*OURS, FLOOR, ARITHMETIC, RESIDENT)

# jemalloc's thread-local variables find room only in libraries known at exec, unless glibc is told to leave some.
TUNABLE = "glibc.rtld.optional_static_tls=16384"


@dataclass(frozen=True)
class Contender:
    """A pair of functions, by name."""

    name: str
    version: str
    struct: native.CContender = field(repr=False)


@dataclass(frozen=True)
class Missing:
    """A peer that is not here, why, and what would bring it."""

    name: str
    reason: str
    install: str


@dataclass(frozen=True)
class Peer:
    """An allocator that one could take instead."""

    name: str
    install: str
    library: Callable[[], str | None]  # what dlopen is told; None: what the process has
    malloc: str
    free: str
    version: Callable[[ctypes.CDLL], str]

    def open(self) -> Contender | Missing:
        """Load it, if it can be."""
        try:
            library = ctypes.CDLL(self.library())
            pair = [native.address(getattr(library, name)) for name in (self.malloc, self.free)]
            return Contender(self.name, self.version(library), native.CContender(native.PEER, 0, *pair))
        except (OSError, AttributeError) as error:
            return Missing(self.name, str(error), self.install)


def mimalloc_library() -> str:
    try:
        files = importlib.metadata.files("cmeel-mimalloc") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    return next((str(file.locate()) for file in files if file.name == "libmimalloc.so.3"), "libmimalloc.so.3")


def mimalloc_version(library: ctypes.CDLL) -> str:
    number = int(library.mi_version())
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def jemalloc_version(library: ctypes.CDLL) -> str:
    text, size = ctypes.c_char_p(), ctypes.c_size_t(ctypes.sizeof(ctypes.c_char_p))
    library.mallctl(b"version", ctypes.byref(text), ctypes.byref(size), None, ctypes.c_size_t(0))
    return (text.value or b"").decode().partition("-")[0]


def tcmalloc_version(library: ctypes.CDLL) -> str:
    library.tc_version.restype = ctypes.c_char_p
    version: bytes = library.tc_version(None, None, None)
    return version.decode().split()[-1]


def glibc_version(library: ctypes.CDLL) -> str:
    library.gnu_get_libc_version.restype = ctypes.c_char_p
    version: bytes = library.gnu_get_libc_version()
    return version.decode()


PEERS = (
    Peer("mimalloc", "pip install cmeel-mimalloc", mimalloc_library, "mi_malloc", "mi_free", mimalloc_version),
    Peer("jemalloc", "apt install libjemalloc2", lambda: "libjemalloc.so.2", "malloc", "free", jemalloc_version),
    Peer(
        "tcmalloc",
        "apt install libtcmalloc-minimal4",
        lambda: "libtcmalloc_minimal.so.4",
        "tc_malloc",
        "tc_free",
        tcmalloc_version,
    ),
    Peer("glibc", "a system with glibc", lambda: None, "malloc", "free", glibc_version),
)


def ready_for_all() -> None:
    """Start the process again where it was not started so that every peer can be loaded."""
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if TUNABLE not in tunables and sys.platform == "linux":
        os.environ["GLIBC_TUNABLES"] = f"{tunables}:{TUNABLE}".lstrip(":")
        os.execv(sys.executable, [sys.executable, *sys.argv])


def open_peers(names: tuple[str, ...] = ()) -> tuple[list[Contender], list[Missing]]:
    """Return the peers that are here, and those that are not."""
    opened = [peer.open() for peer in PEERS if not names or peer.name in names]
    return [p for p in opened if isinstance(p, Contender)], [p for p in opened if isinstance(p, Missing)]


def our_ways(pool: zcpool.Pool) -> list[Contender]:
    """Return zcpool through the table of functions, and inlined."""
    api, version = native.get_api(), zcpool.__version__
    kinds = ((TABLE, native.TABLE), (INLINED, native.INLINED))
    return [Contender(n, version, native.CContender(kind, 0, None, None, api, pool.c_handle)) for n, kind in kinds]


def control(library: ctypes.CDLL, name: str) -> Contender:
    """Return a contender that has no memory to give: it shows what the machine does, and what the loop costs."""
    malloc = {FLOOR: library.nothing_malloc, ARITHMETIC: library.busy_malloc}[name]
    pair = (native.address(malloc), native.address(library.nothing_free))
    return Contender(name, "", native.CContender(native.PEER, 0, *pair))
