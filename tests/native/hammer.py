"""Drive stress.c: native threads against pools, while Python does what it is told to do in between.

As a program, ``python -m native.hammer [seconds]``, it goes through every combination, again and again, and fails if
one finds anything.
"""

from __future__ import annotations

import ctypes
import itertools
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
FOUND = 3  # the exit status of the program when it has found something (stress.c: FOUND_STATUS)
PATIENCE = 60  # seconds, as for a thread that does not get on

FINDINGS = {
    1: "a block was handed out twice",
    2: "a held block was overwritten",
    4: "a stale token was followed",
    8: "the books did not balance",
    16: "blocks were lost",
    32: "a live token was refused",
    64: "no thread",
    128: "a closed pool has served",
    256: "a thread hangs",
    512: "a forked child went wrong",
}

# What a forked child does. AddressSanitizer's allocator may be locked in it for ever: there, nothing that allocates.
LOOKS, SERVES = 1, 2
FORKS = LOOKS if "address" in os.environ.get("ZCPOOL_SANITIZE", "") else SERVES


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
            ctypes.c_int,
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
        trims: int = 4096,
        forks: int = 0,
        seed: int = 1,
        meanwhile: Callable[[], object] | None = None,
    ) -> list[str]:
        """Return what was found; `meanwhile` is called again and again in this thread until the run is over.

        A thread trims every `trims` operations, about, or never (0), and forks children that do `forks`.
        """
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
                    trims,
                    forks,
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
        assert rounds.value >= 1 or result[0]
        return [text for bit, text in FINDINGS.items() if result[0] & bit]

    def patience(self, seconds: int) -> None:
        """End the process with FOUND when it spends so many seconds where no thread is watched; begin anew."""
        self._library.stress_patience(seconds)

    def closed(self, yes: bool) -> None:
        """Say that all pools of the run have been closed: from here on no acquire may succeed."""
        self._library.stress_closed(yes)


def hammer_once(hammer: Hammer, seconds: float, fast: bool, act: str) -> None:
    """Run one of the acts with pools of its own; end the program if anything is found."""
    limit = 24 * MIB if act == "limit" else None
    # Without trimming, and small, all is hits: a list that is broken is found by those who take from it.
    quiet = {"trims": 0, "largest": 4096} if act == "quiet" else {"trims": 1024}
    forks = {"fork": FORKS, "close": LOOKS}.get(act, 0)
    pools = [zcpool.Pool(max_bytes=limit) for _ in range(1 if act == "quiet" else 2)]
    start = time.monotonic()

    def meanwhile() -> None:
        if act == "close" and time.monotonic() > start + seconds / 2:
            for pool in pools:
                pool.close()
            hammer.closed(True)

    try:
        found = hammer.run(
            pools, seconds, fast=fast, forks=forks, seed=time.time_ns() % (1 << 40), meanwhile=meanwhile, **quiet
        )
    finally:
        hammer.closed(False)
    for pool in pools:
        if not found:
            pool.trim()
            if pool.stats().reserved_bytes:
                found.append("blocks were lost: trim cannot give them back")
            pool.close()
    if found:
        print(f"{act}, {'inlined' if fast else 'table'}: {'; '.join(found)}", flush=True)
        os._exit(FOUND)  # broken pools may hang when they end


def main() -> int:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS
    end = time.monotonic() + seconds
    acts = list(itertools.product(("quiet", "trim", "limit", "fork", "close"), (False, True)))
    share = min(5.0, seconds / len(acts))
    with tempfile.TemporaryDirectory() as folder:
        hammer = Hammer(Path(folder))
        for runs in itertools.count(1):
            act, fast = acts[(runs - 1) % len(acts)]
            hammer.patience(PATIENCE)  # broken lists may have no end, also for those who empty them
            hammer_once(hammer, share, fast, act)
            if runs >= len(acts) and time.monotonic() >= end:
                break
    print(f"nothing was found in {runs} runs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
