"""Drive stress.c: native threads against pools, while Python does what it is told to do in between.

As a program, ``python -m native.hammer [seconds]``, it goes through every combination and fails if one finds anything.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from native.build import HERE, compile_library, get_api

import zcpool

MIB = 1 << 20
SECONDS = float(os.environ.get("ZCPOOL_STRESS_SECONDS", "5"))  # of all of it together
OPS = int(os.environ.get("ZCPOOL_STRESS_OPS", "20000"))  # of each thread in a round
LARGEST = 8 * MIB

FINDINGS = {
    1: "a block was handed out twice",
    2: "a held block was overwritten",
    4: "a stale token was followed",
    8: "the books did not balance",
    16: "blocks were lost",
    32: "a live token was refused",
    64: "no thread",
    128: "a closed pool has served",
}


class Hammer:
    """The compiled stress.c."""

    def __init__(self, folder: Path) -> None:
        self._library = ctypes.CDLL(str(compile_library(folder, HERE / "stress.c")))
        self._library.stress_run.argtypes = [
            ctypes.c_void_p,
            ctypes.POINTER(ctypes.c_uint64),
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_uint64,
            ctypes.c_uint64,
            ctypes.c_int,
            ctypes.c_uint64,
            ctypes.POINTER(ctypes.c_uint64),
        ]
        self._api = get_api()

    def run(
        self,
        pools: Iterable[zcpool.Pool],
        seconds: float,
        *,
        fast: bool,
        threads: int = 4,
        ops: int = OPS,
        largest: int = LARGEST,
        seed: int = 1,
        meanwhile: Callable[[], object] | None = None,
    ) -> list[str]:
        """Return what was found; `meanwhile` is called again and again in this thread until the run is over."""
        handles = [pool.c_handle for pool in pools]
        numbers = (ctypes.c_uint64 * len(handles))(*handles)
        rounds = ctypes.c_uint64()
        result: list[int] = []

        def native() -> None:
            result.append(
                self._library.stress_run(
                    self._api,
                    numbers,
                    len(handles),
                    threads,
                    int(seconds * 1000),
                    ops,
                    largest,
                    fast,
                    seed,
                    ctypes.byref(rounds),
                )
            )

        thread = threading.Thread(target=native)
        thread.start()
        while meanwhile is not None and thread.is_alive():
            meanwhile()
            time.sleep(0.001)
        thread.join()
        assert rounds.value >= 1
        return [text for bit, text in FINDINGS.items() if result[0] & bit]

    def closed(self, yes: bool) -> None:
        """Say that all pools of the run have been closed: from here on no acquire may succeed."""
        self._library.stress_closed(yes)


def main() -> int:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS
    found: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        hammer = Hammer(Path(folder))
        for fast in (False, True):
            for limit in (None, 24 * MIB):
                with zcpool.Pool(max_bytes=limit) as pool:
                    found += hammer.run([pool], seconds / 4, fast=fast, seed=time.time_ns() % (1 << 40))
                    if not found:  # else trimming may never end
                        pool.trim()
                        if pool.stats().reserved_bytes:
                            found.append("blocks were lost: trim cannot give them back")
                    if found:
                        print("; ".join(found), flush=True)
                        os._exit(1)
    print("nothing was found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
