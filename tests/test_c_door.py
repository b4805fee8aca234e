"""The C door: zcpool.h from C, C++ and Cython, with and without the GIL, from threads that Python never saw."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import random
import re
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from harness import fork_child, in_child, join_child, open_fds, run_python, run_quietly, settle
from helpers import MakePool, Workers, eventually
from native.build import (
    C11,
    CXX17,
    HAS_CXX,
    HERE,
    MODULE_SUFFIX,
    PYTHON,
    SANITIZE,
    compile_cython,
    compile_library,
    compile_module,
    compile_native,
    get_api,
    load_module,
)
from snippets import ROOT

import zcpool

KIB, MIB = 1 << 10, 1 << 20

needs_cxx = pytest.mark.skipif(not HAS_CXX, reason="there is no C++ compiler here")
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the native code of the tests, compiled."""
    return tmp_path_factory.mktemp("door")


@pytest.fixture(scope="session")
def door_module(made: Path) -> ModuleType:
    return load_module(compile_module(made, HERE / "door.c"))


@pytest.fixture(params=["with the GIL", "without the GIL"])
def door(door_module: ModuleType, request: pytest.FixtureRequest) -> Iterator[Any]:
    """zcpool.h as Python functions that call it with the GIL held, or released."""
    door_module.without_gil(request.param == "without the GIL")
    yield door_module
    door_module.without_gil(False)


@pytest.fixture(scope="session")
def native(made: Path) -> ctypes.CDLL:
    """The C++ library: its functions run without the GIL, and in threads of their own."""
    if not HAS_CXX:
        pytest.skip("there is no C++ compiler here")
    library = ctypes.CDLL(str(compile_library(made, HERE / "threads.cpp")))
    for name in ("many_threads", "after_an_eventfd", "woken", "told_of_the_end", "end_with_caches", "spin"):
        getattr(library, name).argtypes = [ctypes.c_uint64]  # the first; what follows is an int
    for name in ("pinned", "errors_are_of_the_thread", "guest_begin"):
        getattr(library, name).argtypes = [ctypes.c_uint64]
    library.many_threads.argtypes = [ctypes.c_uint64, ctypes.c_int, ctypes.c_int]
    library.after_an_eventfd.argtypes = [ctypes.c_uint64, ctypes.c_int64]
    library.woken.argtypes = [ctypes.c_uint64, ctypes.c_int64, ctypes.c_int64]
    library.told_of_the_end.argtypes = [ctypes.c_uint64, ctypes.c_int64, ctypes.CFUNCTYPE(None)]
    library.end_with_caches.argtypes = [ctypes.c_uint64, ctypes.c_int, ctypes.c_int64]
    library.spin.argtypes = [ctypes.c_uint64, ctypes.c_int64, ctypes.c_int64]
    library.inlined.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
    assert library.open_door(os.fsencode(zcpool.get_library())) == 0
    return library


def right(line: int) -> None:
    """Fail where a C++ function says that something was wrong."""
    source = (HERE / "threads.cpp").read_text().splitlines()
    assert line == 0, f"threads.cpp:{line}: {source[line - 1].strip()}"


def end(ends: list[Any]) -> None:
    """Let the last references go."""
    ends.clear()
    gc.collect()


def stale(door: Any, token: int) -> None:
    """Check that every function refuses a token, says so, and does nothing."""
    assert door.find(token) is None
    assert "stale" in door.error()
    for call in (door.release, door.pin, door.unpin):
        assert call(token) == -1
        assert "stale" in door.error()
    assert door.sync(token, door.TO_DEVICE) == -1
    assert "stale" in door.error()
    assert door.place(token) is None
    assert "stale" in door.error()
    reader, writer = os.pipe()
    assert door.release_after(token, reader) == -1
    assert "stale" in door.error()
    os.close(reader)  # fails if the door had closed it
    os.close(writer)


def no_pool(door: Any, number: int, cache: int = 0) -> None:
    """Check that every function refuses a pool's number, also the inlined ones with a cache of old."""
    assert door.acquire(number, 64) is None
    assert "has ended, or never was" in door.error()
    assert door.acquire_with(number, 64, 0, 0, -1) is None
    assert "has ended, or never was" in door.error()
    assert door.acquire_fast(cache, number, 64) is None
    assert "has ended, or never was" in door.error()
    assert door.stats(number) is None
    assert "has ended, or never was" in door.error()
    assert door.cache(number) == 0
    assert "has ended, or never was" in door.error()
    assert door.trim(number, 0) == 0
    assert "has ended, or never was" in door.error()


# ---- the header -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("suffix", "flags"),
    [
        pytest.param(".c", C11, id="C11"),
        pytest.param(".c", ["-std=gnu17", "-Wall", "-Wextra", "-Werror"], id="GNU C17"),
        pytest.param(".cpp", CXX17, id="C++17", marks=needs_cxx),
        pytest.param(".cpp", ["-std=c++20", "-Wall", "-Wextra", "-Werror"], id="C++20", marks=needs_cxx),
    ],
)
@pytest.mark.parametrize("python", [False, True], ids=["alone", "after Python.h"])
def test_the_header_compiles_without_a_warning(tmp_path: Path, suffix: str, flags: list[str], python: bool) -> None:
    source = tmp_path / f"header{suffix}"
    first = "#define PY_SSIZE_T_CLEAN\n#include <Python.h>\n" if python else ""
    use = (
        "int use(const zc_api *api, zc_cache *c, zc_pool p);\n"
        "int use(const zc_api *api, zc_cache *c, zc_pool p) { return zc_release_fast(api, c, "
        "zc_acquire_fast(api, c, p, 1)) + (zc_api_from((void *)0) == 0)"
        + (" + (zc_import() == 0)" if python else "")
        + "; }\n"
    )
    source.write_text(f'{first}#include "zcpool.h"\n#include "zcpool.h"\n{use}')
    compile_native(tmp_path / "header.o", source, flags=[*flags, "-c", *PYTHON])


@needs_cxx
def test_layouts_are_the_same_in_c_and_in_cpp(tmp_path: Path) -> None:
    shown = "\n".join(
        [f'printf("{name} %zu\\n", sizeof({name}));' for name in ("zc_block", "zc_place", "zc_stats", "zc_api")]
        + [f'printf("{field} %zu\\n", offsetof(zc_block, {field}));' for field in ("cls", "nbytes", "core")]
        + [f'printf("{field} %zu\\n", offsetof(struct zc_cache, {field}));' for field in ("core", "slots")]
    )
    said = []
    for suffix, flags in ((".c", C11), (".cpp", CXX17)):
        source = tmp_path / f"layout{suffix}"
        source.write_text(f'#include <stdio.h>\n#include "zcpool.h"\nint main(void)\n{{\n{shown}\nreturn 0;\n}}\n')
        program = compile_native(tmp_path / f"layout{suffix}.out", source, flags=flags)
        said.append(subprocess.run([program], capture_output=True, text=True, check=True).stdout)
    assert said[0] == said[1]
    assert "zc_block 64\n" in said[0]


def test_the_table_says_what_it_is(door_module: Any) -> None:
    assert door_module.ABI == 1
    assert door_module.SIZE == door_module.TABLE
    assert door_module.BLOCK == 64


def test_another_abi_is_refused() -> None:
    library = ctypes.CDLL(zcpool.get_library())
    library.zcpool_get_api.restype = ctypes.c_void_p
    library.zcpool_get_api.argtypes = [ctypes.c_uint32]
    for abi in (0, 2, 2**31, 2**32 - 1):
        assert library.zcpool_get_api(abi) is None
    assert get_api()


@needs_cxx
def test_another_abi_is_refused_in_native_code(native: ctypes.CDLL) -> None:
    right(native.other_abi(os.fsencode(zcpool.get_library())))


def test_a_module_for_another_abi_does_not_import(tmp_path: Path) -> None:
    header = (Path(zcpool.get_include()) / "zcpool.h").read_text()
    (tmp_path / "zcpool.h").write_text(header.replace("#define ZC_ABI 1\n", "#define ZC_ABI 2\n"))
    (tmp_path / "future.c").write_text(
        '#define PY_SSIZE_T_CLEAN\n#include <Python.h>\n#include "zcpool.h"\n'
        'static struct PyModuleDef d = {PyModuleDef_HEAD_INIT, "future", 0, -1, 0, 0, 0, 0, 0};\n'
        "PyMODINIT_FUNC PyInit_future(void) { return zc_import() ? PyModule_Create(&d) : NULL; }\n"
    )
    with pytest.raises(ImportError, match="does not speak ABI 2"):
        load_module(compile_module(tmp_path, tmp_path / "future.c"))


def test_the_paths_are_there() -> None:
    assert (Path(zcpool.get_include()) / "zcpool.h").is_file()
    assert Path(zcpool.get_library()).is_file()


# ---- acquire and release ----------------------------------------------------------------------------------------


def test_a_block_is_what_it_says(door: Any, pool: zcpool.Pool) -> None:
    for nbytes in (1, 64, 65, 1000, 4096, MIB - 1, MIB, 5 * MIB, 20 * MIB):
        b = door.acquire(pool.c_handle, nbytes)
        assert b["nbytes"] == nbytes <= b["capacity"]
        assert b["data"] % pool.alignment == 0
        assert b["bucket"] == sum(b["capacity"] >= limit * MIB for limit in (1, 4, 16))
        ctypes.memset(b["data"], 0xA5, nbytes)
        assert door.find(b["token"]) == b
        stats = pool.stats()
        assert (stats.in_use_blocks, stats.in_use_bytes, stats.requested_bytes) == (1, b["capacity"], nbytes)
        assert door.release(b["token"]) == 0
        assert pool.stats().in_use_blocks == 0


def test_the_inlined_way_is_the_same(door: Any, pool: zcpool.Pool) -> None:
    cache = door.cache(pool.c_handle)
    assert cache
    assert door.cache(pool.c_handle) == cache
    for nbytes in (1, 64, 65, 1000, MIB - 1, MIB, 5 * MIB):
        for _ in range(3):
            b = door.acquire_fast(cache, pool.c_handle, nbytes)
            assert b["nbytes"] == nbytes <= b["capacity"]
            assert door.find(b["token"]) == b
            assert pool.stats().in_use_blocks == 1
            assert door.release_fast(cache, b["block"]) == 0
            assert pool.stats().in_use_blocks == 0
            stale(door, b["token"])


def test_a_cache_makes_room_for_a_size_that_is_used_by_letting_go_of_those_that_are_not(
    door: Any, pool: zcpool.Pool
) -> None:
    number = pool.c_handle
    cache = door.cache(number)
    for nbytes in range(MIB // 4, MIB + 1, MIB // 32):
        for _ in range(300):
            b = door.acquire_fast(cache, number, nbytes)
            assert door.release_fast(cache, b["block"]) == 0
        kept, _ = door.keeps(cache, number, nbytes)
        assert kept, nbytes


def test_a_cache_never_holds_more_than_4_mib(door: Any, pool: zcpool.Pool) -> None:
    number = pool.c_handle
    cache = door.cache(number)
    order = random.Random(7)
    blocks: list[dict[str, int]] = []
    for _ in range(3000):
        if blocks and (len(blocks) > 60 or order.random() < 0.5):
            b = blocks.pop(order.randrange(len(blocks)))
            assert door.release_fast(cache, b["block"]) == 0
        else:
            nbytes = int(2 ** order.uniform(8, 20))
            blocks.append(door.acquire_fast(cache, number, nbytes))
        _, held = door.keeps(cache, number, 1)
        assert held <= 4 * MIB
    for b in blocks:
        assert door.release_fast(cache, b["block"]) == 0
    assert 0 < door.keeps(cache, number, 1)[1] <= 4 * MIB


@pytest.mark.parametrize("alignment", [1, 128, 512, 4096])
@pytest.mark.parametrize("granule", [64, 256, 4096])
def test_both_ways_take_blocks_of_one_class(
    door_module: Any, make_pool: MakePool, alignment: int, granule: int
) -> None:
    pool = make_pool(alignment=granule)
    cache = door_module.cache(pool.c_handle)
    for nbytes in (1, 63, 65, 100, 257, 4000, 4097, 100_000):
        a = door_module.acquire_with(pool.c_handle, nbytes, alignment, 0, 0)
        assert a["data"] % max(alignment, granule) == 0
        assert door_module.release(a["token"]) == 0
        b = door_module.acquire_fast(cache, pool.c_handle, nbytes)
        assert b["data"] % granule == 0
        assert door_module.release_fast(cache, b["block"]) == 0
        c = door_module.acquire(pool.c_handle, nbytes)
        assert (c["block"], c["capacity"]) == (b["block"], b["capacity"])
        assert door_module.release(c["token"]) == 0


def test_a_token_dies_with_the_release(door: Any, pool: zcpool.Pool) -> None:
    b = door.acquire(pool.c_handle, 1000)
    assert door.release(b["token"]) == 0
    stale(door, b["token"])  # the block lies in a cache
    again = door.acquire(pool.c_handle, 1000)
    assert again["block"] == b["block"]
    assert again["token"] != b["token"]
    stale(door, b["token"])  # somebody else has it
    assert door.find(again["token"]) == again
    assert door.release(again["token"]) == 0
    pool.trim()
    stale(door, b["token"])  # it is no block any more
    stale(door, again["token"])
    assert pool.stats().in_use_blocks == 0


def test_a_sequential_double_release_is_refused_every_time(door: Any, pool: zcpool.Pool) -> None:
    for nbytes in (100, 2 * MIB):
        for _ in range(200):
            b = door.acquire(pool.c_handle, nbytes)
            assert door.release(b["token"]) == 0
            assert door.release(b["token"]) == -1
            assert door.release(b["token"]) == -1
    stats = door.stats(pool.c_handle)
    assert stats["cached_blocks"] <= 2
    assert stats["in_use_blocks"] == 0


@pytest.mark.parametrize(
    "token", [0, 1, 0xFFFFFF, 1 << 24, (1 << 64) - 1, (1 << 63) | 5, 0x0123456789ABCDEF, 4095, 4096, 1 << 23]
)
def test_nonsense_is_no_token(door: Any, pool: zcpool.Pool, token: int) -> None:
    pool.acquire(10).release()
    stale(door, token)


def test_a_buffers_block_cannot_be_released_through_the_door(door: Any, pool: zcpool.Pool) -> None:
    b = door.acquire(pool.c_handle, 3000)
    assert door.release(b["token"]) == 0
    buf = pool.acquire(3000)  # the same block, of the next generation
    assert buf.address == b["data"]
    token = b["token"] + (1 << 24)
    assert door.find(token)["data"] == buf.address
    reader, writer = os.pipe()
    assert door.release(token) == -1
    assert "a Buffer owns" in door.error()
    assert door.release_after(token, reader) == -1
    assert "a Buffer owns" in door.error()
    os.close(reader)
    os.close(writer)
    assert not buf.released
    assert pool.stats().in_use_blocks == 1
    buf.array(3000)[:] = 7
    buf.release()
    assert door.find(token) is None


def test_native_code_may_pin_a_buffers_block(door: Any, pool: zcpool.Pool) -> None:
    b = door.acquire(pool.c_handle, 3000)
    assert door.release(b["token"]) == 0
    buf = pool.acquire(3000)
    token = b["token"] + (1 << 24)
    assert door.pin(token) == 0
    buf.release()
    assert pool.stats().retired_blocks == 1
    assert door.unpin(token) == 0
    assert pool.stats().retired_blocks == 0
    stale(door, token)


@pytest.mark.parametrize(
    ("nbytes", "alignment"),
    [(0, 0), ((1 << 64) - 1, 0), (1 << 63, 0), (1 << 46, 0), ((1 << 46) + 1, 0), ((1 << 64) - 4096, 4096)]
    + [(100, alignment) for alignment in (3, 65, 4 << 20, 1 << 63, (1 << 64) - 1)],
)
def test_what_cannot_be_served_is_refused(door: Any, pool: zcpool.Pool, nbytes: int, alignment: int) -> None:
    assert door.acquire_with(pool.c_handle, nbytes, alignment, 0, 0) is None
    assert str(nbytes if nbytes != 100 else alignment) in door.error()
    if not alignment:
        assert door.acquire(pool.c_handle, nbytes) is None
        assert str(nbytes) in door.error()
        assert door.acquire_fast(door.cache(pool.c_handle), pool.c_handle, nbytes) is None
        assert str(nbytes) in door.error()
    stats = pool.stats()
    assert stats.in_use_blocks == 0
    assert stats.reserved_bytes < 64 * MIB


def test_a_size_between_bounds_is_refused_without_waiting(door: Any, make_pool: MakePool) -> None:
    pool = make_pool(max_bytes=MIB)
    start = time.monotonic()
    assert door.acquire_with(pool.c_handle, 2 * MIB, 0, 0, -1) is None  # no release can help
    assert "more than the limit" in door.error()
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("alignment", [1 << i for i in range(22)])
@pytest.mark.parametrize("exclusive", [False, True], ids=["shared", "exclusive"])
def test_alignment(door: Any, pool: zcpool.Pool, alignment: int, exclusive: bool) -> None:
    flags = door.EXCLUSIVE if exclusive else 0
    held = [door.acquire_with(pool.c_handle, n, alignment, flags, 0) for n in (1, 700, 5000, 2 * MIB)]
    for b in held:
        assert b["data"] % max(alignment, 64) == 0
        assert not exclusive or door.place(b["token"])["offset"] == 0
    for b in held:
        assert door.release(b["token"]) == 0


def test_exclusive_blocks_have_a_region_of_their_own(door: Any, pool: zcpool.Pool) -> None:
    before = pool.stats().handles
    held = [door.acquire_with(pool.c_handle, 100, 0, door.EXCLUSIVE, 0) for _ in range(3)]
    places = [door.place(b["token"]) for b in held]
    assert pool.stats().handles == before + 3
    assert [p["region_data"] for p in places] == [b["data"] for b in held]
    assert all(p["fd"] == -1 and p["region_bytes"] >= 100 for p in places)
    for b in held:
        assert door.release(b["token"]) == 0
    again = door.acquire_with(pool.c_handle, 100, 0, door.EXCLUSIVE, 0)
    assert again["block"] in [b["block"] for b in held]
    assert door.release(again["token"]) == 0


def test_place_says_where_in_the_region(door: Any, pool: zcpool.Pool) -> None:
    held = [door.acquire(pool.c_handle, 1000) for _ in range(10)]
    for b in held:
        p = door.place(b["token"])
        assert p["region_data"] + p["offset"] == b["data"]
        assert p["offset"] + b["capacity"] <= p["region_bytes"]
    for b in held:
        assert door.release(b["token"]) == 0


def test_the_books_agree_with_pythons(door: Any, pool: zcpool.Pool) -> None:
    held = [door.acquire(pool.c_handle, n) for n in (10, 1000, 100_000, 3 * MIB, 30 * MIB)]
    kept = [pool.acquire(n) for n in (10, 2 * MIB)]
    assert door.release(held.pop()["token"]) == 0
    assert door.pin(held[1]["token"]) == 0
    pinned = held.pop(1)
    assert door.release(pinned["token"]) == 0
    assert door.acquire_with(pool.c_handle, (1 << 45), 0, 0, 0) is None or pytest.skip("this machine is too large")
    said, books = door.stats(pool.c_handle), pool.stats()
    for name, value in said.items():
        assert value == getattr(books, name), name
    assert said["retired_blocks"] == 1
    assert said["failures"] >= 1
    assert said["reserved_bytes"] == sum(said[f"{kind}_bytes"] for kind in ("in_use", "cached", "retired", "slack"))
    assert door.unpin(pinned["token"]) == 0
    for b in held:
        assert door.release(b["token"]) == 0
    for buf in kept:
        buf.release()


def test_trim_gives_back(door: Any, pool: zcpool.Pool) -> None:
    for nbytes in (1000, 3 * MIB):
        assert door.release(door.acquire(pool.c_handle, nbytes)["token"]) == 0
    reserved = pool.stats().reserved_bytes
    assert 0 < door.trim(pool.c_handle, 3 * MIB) < reserved
    assert door.trim(pool.c_handle, 0) > 0
    assert pool.stats().reserved_bytes == 0
    assert door.trim(pool.c_handle, 0) == 0


# ---- pins, sync and fences -------------------------------------------------------------------------------------


def test_a_pin_holds_a_released_block(door: Any, pool: zcpool.Pool) -> None:
    b = door.acquire(pool.c_handle, 1000)
    assert door.pin(b["token"]) == 0
    assert door.pin(b["token"]) == 0
    assert door.release(b["token"]) == 0
    assert door.release(b["token"]) == -1
    ctypes.memset(b["data"], 1, 1000)
    assert door.unpin(b["token"]) == 0
    other = door.acquire(pool.c_handle, 1000)
    assert other["data"] != b["data"]
    assert door.unpin(b["token"]) == 0
    stale(door, b["token"])
    assert door.release(other["token"]) == 0


def test_unpin_without_a_pin_is_refused(door: Any, pool: zcpool.Pool) -> None:
    b = door.acquire(pool.c_handle, 1000)
    assert door.unpin(b["token"]) == -1
    assert "not pinned" in door.error()
    assert door.pin(b["token"]) == 0
    assert door.unpin(b["token"]) == 0
    assert door.unpin(b["token"]) == -1
    assert door.release(b["token"]) == 0


def test_a_million_pins_and_no_more(door: Any, pool: zcpool.Pool) -> None:
    b = door.acquire(pool.c_handle, 1000)
    most = (1 << 20) - 1
    assert door.pin_often(b["token"], most + 10) == most
    reader, writer = os.pipe()
    assert door.release_after(b["token"], reader) == -1  # there is no reference for the fence
    os.close(reader)
    os.close(writer)
    assert door.unpin(b["token"]) == 0
    assert door.pin(b["token"]) == 0
    assert door.release(b["token"]) == 0
    assert pool.stats().retired_blocks == 1
    assert door.unpin_often(b["token"], most + 10) == most
    assert pool.stats().retired_blocks == 0


def test_sync_has_two_directions(door: Any, pool: zcpool.Pool) -> None:
    b = door.acquire(pool.c_handle, 1000)
    assert door.sync(b["token"], door.TO_DEVICE) == 0
    assert door.sync(b["token"], door.FROM_DEVICE) == 0
    for direction in (0, 3, -1):
        assert door.sync(b["token"], direction) == -1
        assert "direction" in door.error()
    assert door.release(b["token"]) == 0


def test_a_block_waits_for_its_fence(door: Any, pool: zcpool.Pool) -> None:
    b = door.acquire(pool.c_handle, 1000)
    reader, writer = os.pipe()
    fds = open_fds()
    assert door.release_after(b["token"], reader) == 0
    assert door.release(b["token"]) == -1
    assert door.stats(pool.c_handle)["retired_blocks"] == 1
    assert door.find(b["token"])["data"] == b["data"]
    os.write(writer, b"!")
    assert door.stats(pool.c_handle)["retired_blocks"] == 0
    assert open_fds() == fds - 1  # the pool has closed it
    stale(door, b["token"])
    os.close(writer)


def test_a_fence_that_is_no_fence_changes_nothing(door: Any, pool: zcpool.Pool, tmp_path: Path) -> None:
    b = door.acquire(pool.c_handle, 1000)
    reader, writer = os.pipe()
    os.close(reader)
    regular = os.open(tmp_path / "regular", os.O_RDWR | os.O_CREAT)
    folder = os.open(tmp_path, os.O_RDONLY)
    for fd in (reader, regular, folder, -1, 1 << 30):
        assert door.release_after(b["token"], fd) == -1
        assert str(fd) in door.error() or fd < 0
        assert door.find(b["token"]) == b
        assert pool.stats().in_use_blocks == 1
    for fd in (writer, regular, folder):
        os.close(fd)  # all still ours
    assert door.release(b["token"]) == 0


@needs_cxx
@pytest.mark.watchdog(120)
def test_native_threads_release_after_an_eventfd(native: ctypes.CDLL, pool: zcpool.Pool) -> None:
    fds = open_fds()
    for nbytes in (5000, 3 * MIB):
        right(native.after_an_eventfd(pool.c_handle, nbytes))
    assert open_fds() <= fds + 1


@needs_cxx
def test_native_threads_pin(native: ctypes.CDLL, pool: zcpool.Pool) -> None:
    right(native.pinned(pool.c_handle))


# ---- pools -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flip", [0, 1 << 12, 1 << 11, 1 << 43, 1 << 44, 1 << 63, (1 << 64) - 1])
def test_nonsense_is_no_pool(door: Any, pool: zcpool.Pool, flip: int) -> None:
    cache = door.cache(pool.c_handle)
    number = pool.c_handle ^ flip if flip else 0
    no_pool(door, number, cache)
    assert pool.stats().in_use_blocks == 0


def test_the_number_dies_with_the_pool(door: Any) -> None:
    pool = zcpool.Pool()
    number = pool.c_handle
    cache = door.cache(number)
    b = door.acquire_fast(cache, number, 100)
    assert door.release_fast(cache, b["block"]) == 0
    del pool
    gc.collect()
    no_pool(door, number, cache)
    stale(door, b["token"])


def test_the_number_stays_dead_when_the_control_block_lives_again(door: Any) -> None:
    old = zcpool.Pool()
    number, cache = old.c_handle, door.cache(old.c_handle)
    b = door.acquire_fast(cache, number, 100)
    assert door.release_fast(cache, b["block"]) == 0
    del old
    pools = []
    while True:  # until the control block, and so the thread's cache, is of another pool
        pools.append(zcpool.Pool())
        if pools[-1].c_handle & 4095 == number & 4095:
            break
        assert len(pools) < 100
    new = pools[-1]
    assert new.c_handle != number
    assert door.cache(new.c_handle) == cache
    fresh = door.acquire_fast(cache, new.c_handle, 100)
    assert door.release_fast(cache, fresh["block"]) == 0  # now the cache holds a block of the new pool
    no_pool(door, number, cache)
    stale(door, b["token"])
    assert new.stats().in_use_blocks == 0
    again = door.acquire_fast(cache, new.c_handle, 100)
    assert again["block"] == fresh["block"]
    assert door.release_fast(cache, again["block"]) == 0


def test_blocks_outlive_a_closed_pool(door: Any, make_pool: MakePool) -> None:
    pool = make_pool()
    cache = door.cache(pool.c_handle)
    held = [door.acquire(pool.c_handle, n) for n in (10, 1000, 3 * MIB)]
    pool.close()
    assert door.acquire(pool.c_handle, 64) is None
    assert "closed" in door.error()
    assert door.acquire_with(pool.c_handle, 64, 0, 0, -1) is None
    assert "closed" in door.error()
    assert door.acquire_fast(cache, pool.c_handle, 64) is None
    assert "closed" in door.error()
    for b in held:
        assert door.find(b["token"]) == b
        ctypes.memset(b["data"], 3, b["nbytes"])
        assert door.release(b["token"]) == 0
        stale(door, b["token"])
    assert door.stats(pool.c_handle)["reserved_bytes"] == 0


def test_a_frozen_pool_serves_what_is_cached(door: Any, pool: zcpool.Pool) -> None:
    pool.reserve(1000, 1)
    pool.freeze()
    b = door.acquire(pool.c_handle, 1000)
    assert b
    assert door.acquire(pool.c_handle, 3 * MIB) is None
    assert "frozen" in door.error()
    assert door.release(b["token"]) == 0
    assert door.trim(pool.c_handle, 0) == 0
    pool.thaw()


@pytest.mark.parametrize("limit", [{"max_bytes": 4 * MIB}, {"max_handles": 1}], ids=["bytes", "handles"])
def test_a_limit_is_an_error_with_a_reason(door: Any, make_pool: MakePool, limit: dict[str, int]) -> None:
    pool = make_pool(**limit)
    b = door.acquire(pool.c_handle, 4 * MIB)
    assert door.acquire(pool.c_handle, 3 * MIB) is None
    assert "limit in" in door.error()
    assert pool.stats().failures == 1
    assert door.release(b["token"]) == 0
    b = door.acquire(pool.c_handle, 3 * MIB)  # what is cached is given back for it
    assert door.release(b["token"]) == 0


@pytest.mark.watchdog(120)
@pytest.mark.parametrize("timeout", [20_000_000, 1])
def test_waiting_ends_in_time(door: Any, make_pool: MakePool, timeout: int) -> None:
    pool = make_pool(max_bytes=MIB)
    b = door.acquire(pool.c_handle, MIB)
    start = time.monotonic()
    assert door.acquire_with(pool.c_handle, MIB, 0, 0, timeout) is None
    assert timeout / 1e9 <= time.monotonic() - start < 30
    assert "limit in bytes" in door.error()
    assert door.release(b["token"]) == 0


@pytest.mark.watchdog(120)
@pytest.mark.parametrize("timeout", [-1, 60 * 10**9, (1 << 63) - 1], ids=["for ever", "a minute", "centuries"])
def test_a_waiter_with_the_gil_is_woken(door: Any, make_pool: MakePool, timeout: int) -> None:
    pool = make_pool(max_bytes=MIB)
    b = door.acquire(pool.c_handle, MIB)
    timer = threading.Timer(0.1, door.release, [b["token"]])  # runs: the waiter has let the GIL go
    timer.start()
    got = door.acquire_with(pool.c_handle, MIB, 0, 0, timeout)
    timer.join()
    assert got, door.error()
    assert door.release(got["token"]) == 0


@pytest.mark.watchdog(120)
def test_a_waiter_is_woken_by_a_fence(door: Any, make_pool: MakePool) -> None:
    pool = make_pool(max_bytes=MIB)
    b = door.acquire(pool.c_handle, MIB)
    reader, writer = os.pipe()
    assert door.release_after(b["token"], reader) == 0
    timer = threading.Timer(0.1, os.write, [writer, b"!"])
    timer.start()
    got = door.acquire_with(pool.c_handle, MIB, 0, 0, -1)
    timer.join()
    os.close(writer)
    assert door.release(got["token"]) == 0


@needs_cxx
@pytest.mark.watchdog(120)
@pytest.mark.parametrize("nbytes", [1000, 3 * MIB])
@pytest.mark.parametrize("timeout", [-1, 60 * 10**9], ids=["for ever", "a minute"])
def test_a_waiter_is_woken_by_another_native_thread(
    native: ctypes.CDLL, make_pool: MakePool, nbytes: int, timeout: int
) -> None:
    pool = make_pool(max_bytes=3 * MIB + (1024 if nbytes == 1000 else 0), arena_buckets="none")
    fill = [pool.acquire(3 * MIB)] if nbytes == 1000 else []
    right(native.woken(pool.c_handle, nbytes, timeout))
    for buf in fill:
        buf.release()


@needs_cxx
@pytest.mark.watchdog(120)
def test_waiters_are_told_when_the_pool_is_closed(native: ctypes.CDLL, make_pool: MakePool) -> None:
    pool = make_pool(max_bytes=MIB)
    right(native.told_of_the_end(pool.c_handle, MIB, ctypes.CFUNCTYPE(None)(pool.close)))


# ---- ended pools --------------------------------------------------------------------------------------------------


@pytest.mark.watchdog(120)
@pytest.mark.filterwarnings("ignore:.*held by C code:ResourceWarning")
def test_strangers_who_ask_for_ended_pools_meet_no_other_pool(made: Path) -> None:
    """Pools come and go under native threads that know the number of each; the one between was told to nobody."""
    strangers = ctypes.CDLL(str(compile_library(made, HERE / "strangers.c")))
    strangers.strangers_come.argtypes = [ctypes.c_void_p]
    strangers.strangers_hear.argtypes = [ctypes.c_uint64]
    strangers.strangers_go.restype = ctypes.c_uint64
    assert strangers.strangers_come(get_api()) == 0
    met = []
    for _ in range(300):
        told = zcpool.Pool()
        strangers.strangers_hear(told.c_handle)
        time.sleep(0.0005)
        del told
        untold = zcpool.Pool()
        time.sleep(0.0002)
        stats = untold.stats()
        met.append(stats.acquires + stats.failures + stats.reserved_bytes)
        del untold
    assert strangers.strangers_go() > 0
    assert sum(met) == 0


@pytest.mark.skipif(SANITIZE in ("address", "thread"), reason="their runtimes reserve terabytes of addresses")
def test_a_token_of_what_was_never_made_is_refused_also_where_addresses_are_rationed() -> None:
    """Where there is no room for all descriptors, an index may lie behind those there can be."""
    run_quietly(
        """
        import ctypes, resource
        resource.setrlimit(resource.RLIMIT_AS, (900 << 20, 900 << 20))
        import zcpool
        from native.build import get_api
        api = ctypes.cast(get_api(), ctypes.POINTER(ctypes.c_void_p))
        release = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64)(api[3])
        pool = zcpool.Pool()
        pool.acquire(100).release()
        for token in (0x1FFFFF, 0xFFFFFF, 0x1000FFFFFF, 0x7F0000):
            assert release(token) == -1
        """
    )


# ---- native threads -----------------------------------------------------------------------------------------------


@needs_cxx
def test_native_threads_acquire_and_release(native: ctypes.CDLL, pool: zcpool.Pool) -> None:
    right(native.many_threads(pool.c_handle, 4, 500))
    assert pool.stats().in_use_blocks == 0
    assert pool.stats().acquires == 2000


@needs_cxx
def test_the_inlined_way_in_a_native_thread(native: ctypes.CDLL, make_pool: MakePool) -> None:
    for alignment in (64, 512):
        right(native.inlined(make_pool(alignment=alignment).c_handle, make_pool().c_handle))


@needs_cxx
@pytest.mark.watchdog(120)
def test_a_native_thread_lives_through_the_end_of_a_pool(native: ctypes.CDLL) -> None:
    class Watched(zcpool.PythonBackend):
        freed = 0

        def allocate(self, nbytes: int, alignment: int) -> mmap.mmap:
            return mmap.mmap(-1, nbytes)

        def free(self, memory: Any) -> None:
            Watched.freed += 1

    for backend in ("posix", Watched(alignment=mmap.PAGESIZE)):
        pool = zcpool.Pool(backend)
        native.guest_begin(pool.c_handle)
        try:
            right(native.guest_do(1))
            pool.close()
            right(native.guest_do(2))
            ends = [pool]
            del pool
            with pytest.warns(ResourceWarning, match=r"5 block\(s\) are held"):
                end(ends)
            right(native.guest_do(3))
        finally:
            native.guest_end()
    del backend
    settle()
    assert Watched.freed > 0
    assert zcpool.Pool().stats().reserved_bytes == 0  # nothing of the old one in its control block


@needs_cxx
def test_an_ended_threads_blocks_are_found_by_trim(native: ctypes.CDLL, pool: zcpool.Pool) -> None:
    for nbytes in (200, 5000):
        right(native.end_with_caches(pool.c_handle, 3, nbytes))
    stats = pool.stats()
    assert stats.in_use_blocks == 0
    assert stats.cached_blocks >= 16
    pool.trim()
    assert pool.stats().reserved_bytes == 0


@needs_cxx
def test_an_ended_threads_blocks_go_to_the_next(native: ctypes.CDLL, make_pool: MakePool) -> None:
    pool = make_pool()
    right(native.end_with_caches(pool.c_handle, 1, 5000))
    asked = pool.stats().backend_allocations
    pool.freeze()
    right(native.end_with_caches(pool.c_handle, 5, 5000))
    pool.thaw()
    assert pool.stats().backend_allocations == asked


@needs_cxx
def test_an_error_text_is_of_its_thread(native: ctypes.CDLL, pool: zcpool.Pool) -> None:
    right(native.errors_are_of_the_thread(pool.c_handle))


# ---- leaks -------------------------------------------------------------------------------------------------------


def test_a_pool_that_ends_with_blocks_held_by_c_code_warns(door: Any) -> None:
    pool = zcpool.Pool(name="leaky")
    held = [door.acquire(pool.c_handle, n) for n in (10, 1000, 3 * MIB)]
    ends = [pool, pool.acquire(100)]
    del pool
    with pytest.warns(ResourceWarning, match=r"'leaky' ends while 3 block\(s\) are held by C code") as told:
        end(ends)
    assert len(told) == 1
    for b in held:
        ctypes.memset(b["data"], 1, b["nbytes"])
        assert door.release(b["token"]) == 0


def test_a_pinned_block_of_c_code_counts_once(door: Any) -> None:
    pool = zcpool.Pool(name="leaky")
    held, pinned = (door.acquire(pool.c_handle, 100) for _ in range(2))
    for token in (held["token"], pinned["token"]):
        assert door.pin(token) == 0
    assert door.release(pinned["token"]) == 0  # held by its pin alone
    ends = [pool]
    del pool
    with pytest.warns(ResourceWarning, match=r"2 block\(s\) are held"):
        end(ends)
    assert door.release(held["token"]) == 0
    for token in (held["token"], pinned["token"]):
        assert door.unpin(token) == 0


def test_a_pool_that_ends_in_order_does_not_warn(door: Any) -> None:
    pool = zcpool.Pool()
    b = door.acquire(pool.c_handle, 100)
    assert door.pin(b["token"]) == 0
    assert door.release(b["token"]) == 0
    assert door.unpin(b["token"]) == 0
    reader, writer = os.pipe()
    c = door.acquire(pool.c_handle, 100)
    assert door.release_after(c["token"], reader) == 0  # the fence holds it, and will let it go
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del pool
        gc.collect()
    os.close(writer)
    settle()


LEAK_AT_EXIT = """
    import sys, zcpool
    from native.build import load_module
    from pathlib import Path
    door = load_module(Path(sys.argv[1]) if len(sys.argv) > 1 else Path({path!r}))
    pool = zcpool.Pool(name="kept")
    b = door.acquire(pool.c_handle, 100)
    {more}
"""


def module_path(made: Path) -> str:
    return str(made / f"door{MODULE_SUFFIX}")


def test_blocks_held_at_exit_are_told_of(door_module: Any, made: Path) -> None:
    code = LEAK_AT_EXIT.format(path=module_path(made), more="")
    done = run_python(code, "-W", "always::ResourceWarning")
    assert done.returncode == 0, done.stderr
    assert "pool 'kept' ends while 1 block(s) are held by C code" in done.stderr


def test_blocks_released_before_exit_are_not(door_module: Any, made: Path) -> None:
    code = LEAK_AT_EXIT.format(path=module_path(made), more="assert door.release(b['token']) == 0")
    run_quietly(code, "-W", "always::ResourceWarning")


# ---- backends in Python ------------------------------------------------------------------------------------------


class Pages(zcpool.PythonBackend):
    """Counts, and can be told to fail."""

    def __init__(self, **options: Any) -> None:
        super().__init__("pages", alignment=mmap.PAGESIZE, **options)
        self.live = 0
        self.synced: list[tuple[int, int, str]] = []
        self.error: BaseException | None = None

    def allocate(self, nbytes: int, alignment: int) -> mmap.mmap:
        if self.error is not None:
            raise self.error
        self.live += 1
        return mmap.mmap(-1, nbytes)

    def free(self, memory: Any) -> None:
        self.live -= 1

    def sync(self, memory: Any, offset: int, nbytes: int, direction: str) -> None:
        if self.error is not None:
            raise self.error
        self.synced.append((offset, nbytes, direction))


def test_a_backend_in_python_serves_the_door(door: Any) -> None:
    backend = Pages(needs_sync=True)
    pool = zcpool.Pool(backend)
    held = [door.acquire(pool.c_handle, n) for n in (10, 1000, 3 * MIB)]
    for b in held:
        ctypes.memset(b["data"], 1, b["nbytes"])
    assert door.sync(held[1]["token"], door.TO_DEVICE) == 0
    assert door.sync(held[2]["token"], door.FROM_DEVICE) == 0
    place = door.place(held[1]["token"])
    assert backend.synced == [(place["offset"], 1000, "to_device"), (0, 3 * MIB, "from_device")]
    for b in held:
        assert door.release(b["token"]) == 0
    assert door.trim(pool.c_handle, 0) > 0
    assert eventually(lambda: settle() or backend.live == 0)


@pytest.mark.parametrize("error", [MemoryError("no more pages"), OSError(5, "the driver is gone"), KeyboardInterrupt()])
def test_a_backend_in_python_that_fails_is_an_error_text(door: Any, error: BaseException) -> None:
    backend = Pages(needs_sync=True)
    pool = zcpool.Pool(backend)
    backend.error = error
    before = sys.getrefcount(error)
    for _ in range(10):
        assert door.acquire(pool.c_handle, 1000) is None
        assert "allocate failed" in door.error()
        assert type(error).__name__ in door.error()
    error.__traceback__ = error.__context__ = None
    gc.collect()
    assert sys.getrefcount(error) == before  # nobody reads the exception, and nobody keeps it
    assert pool.stats().failures == 10
    backend.error = None
    b = door.acquire(pool.c_handle, 1000)
    backend.error = error
    for _ in range(10):
        assert door.sync(b["token"], door.TO_DEVICE) == -1
        assert "sync failed" in door.error()
    error.__traceback__ = error.__context__ = None
    gc.collect()
    assert sys.getrefcount(error) == before
    backend.error = None
    assert door.release(b["token"]) == 0


@needs_cxx
@pytest.mark.watchdog(120)
def test_native_threads_use_a_backend_in_python(native: ctypes.CDLL) -> None:
    backend = Pages()
    pool = zcpool.Pool(backend)
    right(native.many_threads(pool.c_handle, 3, 100))
    right(native.spin(pool.c_handle, 100, MIB))
    pool.trim()
    assert pool.stats().reserved_bytes == 0
    assert backend.live == 0


@needs_cxx
@pytest.mark.watchdog(120)
@pytest.mark.parametrize("in_python", [False, True], ids=["posix", "a backend in Python"])
def test_nobody_waits_for_a_lock_with_the_gil(native: ctypes.CDLL, door: Any, in_python: bool) -> None:
    """Slow paths of a thread with the GIL and of native threads at once: waiting for each other is the end."""
    pool = zcpool.Pool(Pages() if in_python else "posix")
    number = pool.c_handle

    def work(i: int) -> None:
        if i < 2:
            right(native.spin(number, 500, MIB))
            return
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            b = door.acquire(number, MIB + time.monotonic_ns() % 64 * 4096)
            assert b, door.error()
            assert door.release(b["token"]) == 0
            assert door.stats(number) is not None
            door.trim(number, 0)
            pool.acquire(100).release()

    with Workers(4, work):
        pass
    pool.trim()
    assert pool.stats().reserved_bytes == 0


@pytest.mark.watchdog(120)
def test_a_backend_in_python_may_use_the_door_itself(door: Any) -> None:
    inner = zcpool.Pool()

    class Nested(Pages):
        def allocate(self, nbytes: int, alignment: int) -> mmap.mmap:
            b = door.acquire(inner.c_handle, 2 * MIB)
            assert door.release(b["token"]) == 0
            door.trim(inner.c_handle, 0)
            return super().allocate(nbytes, alignment)

    pool = zcpool.Pool(Nested())
    b = door.acquire(pool.c_handle, 1000)
    assert door.release(b["token"]) == 0


# ---- other interpreters ----------------------------------------------------------------------------------------


@needs_cxx
def test_native_threads_after_a_subinterpreter_was_made(native: ctypes.CDLL, made: Path) -> None:
    """CPython then answers "do I hold the GIL" with yes to every thread."""
    run_quietly(
        f"""
        import ctypes, os, zcpool
        try:
            import _xxsubinterpreters as interpreters
        except ImportError:
            import _interpreters as interpreters
        interpreters.destroy(interpreters.create())
        library = ctypes.CDLL({str(made / "libthreads.so")!r})
        library.many_threads.argtypes = [ctypes.c_uint64, ctypes.c_int, ctypes.c_int]
        assert library.open_door(os.fsencode(zcpool.get_library())) == 0
        pool = zcpool.Pool()
        assert library.many_threads(pool.c_handle, 2, 50) == 0
        """
    )


# ---- debug mode --------------------------------------------------------------------------------------------------


def debug(made: Path, code: str) -> tuple[int, str]:
    """Run code with a door and a pool in debug mode; return the status and what it said on stderr."""
    head = f"""
import ctypes, zcpool
from pathlib import Path
from native.build import load_module
door = load_module(Path({module_path(made)!r}))
pool = zcpool.Pool(name="debugged")
number = pool.c_handle
cache = door.cache(number)
"""
    done = run_python(head + code, "-W", "always", env={"ZCPOOL_DEBUG": "1"})
    return done.returncode, done.stderr


def test_debug_mode_is_quiet_about_what_is_right(door_module: Any, made: Path) -> None:
    code = """
for fast in (False, True):
    for nbytes in (1, 1000, 3 << 20):
        for _ in range(3):
            b = door.acquire_fast(cache, number, nbytes) if fast else door.acquire(number, nbytes)
            ctypes.memset(b["data"], 7, nbytes)
            assert (door.release_fast(cache, b["block"]) if fast else door.release(b["token"])) == 0
            assert ctypes.string_at(b["data"], nbytes) == b"\\xdd" * nbytes
"""
    assert debug(made, code) == (0, "")


@pytest.mark.parametrize("fast", [False, True], ids=["table", "inlined"])
def test_debug_mode_sees_a_write_past_the_end(door_module: Any, made: Path, fast: bool) -> None:
    release = "door.release_fast(cache, b['block'])" if fast else "door.release(b['token'])"
    status, said = debug(made, f"b = door.acquire(number, 1000)\nctypes.memset(b['data'], 1, 1001)\n{release}\n")
    assert status == 0
    assert "was written past its end, at byte 1000" in said
    assert "RuntimeWarning" in said


@pytest.mark.parametrize("fast", [False, True], ids=["table", "inlined"])
def test_debug_mode_sees_a_write_after_the_release(door_module: Any, made: Path, fast: bool) -> None:
    acquire = "door.acquire_fast(cache, number, 1000)" if fast else "door.acquire(number, 1000)"
    code = f"""
b = door.acquire(number, 1000)
assert door.release(b['token']) == 0
ctypes.memset(b['data'] + 20, 1, 1)
c = {acquire}
assert c['data'] == b['data']
assert door.release(c['token']) == 0
"""
    status, said = debug(made, code)
    assert status == 0
    assert "was written after its release, at byte 20" in said


def test_debug_mode_refuses_a_stale_inlined_release(door_module: Any, made: Path) -> None:
    code = """
b = door.acquire_fast(cache, number, 1000)
assert door.release_fast(cache, b["block"]) == 0
assert door.release_fast(cache, b["block"]) == -1
assert pool.stats().in_use_blocks == 0 and pool.stats().cached_blocks < 20
"""
    assert debug(made, code) == (0, "")


# ---- fork --------------------------------------------------------------------------------------------------------


def test_a_child_leaves_its_parents_blocks_alone(door: Any, pool: zcpool.Pool) -> None:
    cache = door.cache(pool.c_handle)
    held = [door.acquire(pool.c_handle, n) for n in (10, 1000, 3 * MIB)]
    fast = door.acquire_fast(cache, pool.c_handle, 100)
    assert door.release(door.acquire(pool.c_handle, 500)["token"]) == 0

    def child() -> None:
        assert door.stats(pool.c_handle)["reserved_bytes"] == 0
        for b in (*held, fast):
            ctypes.memset(b["data"], 9, b["nbytes"])  # a copy of its own
            door.release(b["token"])  # whatever it says: nothing goes to the child's pool
            assert door.release_fast(cache, b["block"]) in (0, -1)
        assert door.stats(pool.c_handle)["reserved_bytes"] == 0
        for _ in range(3):
            for b in (*held, fast):
                mine = door.acquire_fast(door.cache(pool.c_handle), pool.c_handle, b["nbytes"])
                assert mine["data"] not in [h["data"] for h in (*held, fast)]
                assert door.release(mine["token"]) == 0
                assert door.release(mine["token"]) == -1
        door.trim(pool.c_handle, 0)
        assert pool.stats().reserved_bytes == 0

    for b in held:
        ctypes.memset(b["data"], 5, b["nbytes"])
    in_child(child)
    for b in held:
        assert ctypes.string_at(b["data"], b["nbytes"]) == b"\x05" * b["nbytes"]
        assert door.release(b["token"]) == 0
    assert door.release_fast(cache, fast["block"]) == 0


def test_a_childs_pins_are_its_parents_business(door: Any, pool: zcpool.Pool) -> None:
    b = door.acquire(pool.c_handle, 1000)
    assert door.pin(b["token"]) == 0

    def child() -> None:
        door.unpin(b["token"])
        door.unpin(b["token"])
        mine = zcpool.Pool()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            pool.__del__()  # what the interpreter's end would do
        assert [str(w.message) for w in told] == []
        assert mine.acquire(100).release() is None

    in_child(child)
    assert door.unpin(b["token"]) == 0
    assert door.release(b["token"]) == 0


@needs_cxx
@pytest.mark.watchdog(120)
def test_a_fork_in_the_midst_of_native_threads(native: ctypes.CDLL, door_module: Any, pool: zcpool.Pool) -> None:
    def child() -> None:
        for n in (10, 1000, 3 * MIB):
            b = door_module.acquire(pool.c_handle, n)
            ctypes.memset(b["data"], 1, n)
            assert door_module.release(b["token"]) == 0
        pool.trim()
        assert pool.stats().reserved_bytes == 0

    with Workers(3, lambda i: right(native.spin(pool.c_handle, 700, 1000 << (5 * i)))) as workers:
        forks = 0
        while workers.running and forks < 10:
            status, complaints = join_child(*fork_child(child), timeout=60)
            assert (status, complaints) == (0, "")
            forks += 1
    assert forks


# ---- Cython ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def cython_module(made: Path) -> Any:
    pytest.importorskip("Cython")
    return load_module(compile_cython(made, HERE / "door_cython.pyx"))


def test_cython_code_cimports_the_types(cython_module: Any, pool: zcpool.Pool) -> None:
    buf = pool.acquire(1000)
    assert cython_module.address(buf) == buf.address
    with pytest.raises(TypeError):
        cython_module.address(pool)
    with pytest.raises(TypeError):
        cython_module.fill(None, 1, 2)
    buf.release()


def test_cython_code_uses_the_door(cython_module: Any, pool: zcpool.Pool) -> None:
    assert cython_module.fill(pool, 1000, 7) >= 1000
    assert cython_module.loop(pool, 1000, 1000) == 1000
    with pytest.raises(MemoryError, match="cannot serve 0 bytes"):
        cython_module.fill(pool, 0, 7)
    pool.close()
    with pytest.raises(MemoryError, match="closed"):
        cython_module.fill(pool, 10, 7)


# ---- the document ------------------------------------------------------------------------------------------------

PAGE = ROOT / "docs" / "c-door.md"
_FILE = re.compile(
    r"```(?:c|cpp|cython|python)\n(?:/\* |// |# )(\S+\.\w+)(?: \*/)?\n(.*?)^```$", re.DOTALL | re.MULTILINE
)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that docs/c-door.md shows, in a folder."""
    folder = tmp_path_factory.mktemp("examples")
    for name, text in _FILE.findall(PAGE.read_text()):
        (folder / name).write_text(text)
    return folder


def run_example(folder: Path, name: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "error", name],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def said_in(folder: Path, name: str) -> list[str]:
    """Return what the comments behind ``print(...)`` promise."""
    return re.findall(r"^\s*print\(.*\)  # (.*)$", (folder / name).read_text(), re.MULTILINE)


def test_the_c_example_works(shown: Path) -> None:
    compile_module(shown, shown / "frames.c")
    assert run_example(shown, "use_frames.py") == said_in(shown, "use_frames.py") != []


@needs_cxx
def test_the_cpp_example_works(shown: Path) -> None:
    compile_library(shown, shown / "camera.cpp", name="camera")
    assert run_example(shown, "use_camera.py") == said_in(shown, "use_camera.py") != []


def test_the_setup_and_the_cython_example_work(shown: Path, tmp_path: Path) -> None:
    pytest.importorskip("Cython")
    pytest.importorskip("setuptools")
    for name in ("setup.py", "frames.c", "blur.pyx", "use_frames.py", "use_blur.py"):
        (tmp_path / name).write_text((shown / name).read_text())
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CFLAGS": "-O0"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for name in ("use_frames.py", "use_blur.py"):
        assert run_example(tmp_path, name) == said_in(shown, name) != []


def test_what_the_page_says_of_the_header_is_so() -> None:
    """Every function of the table is named on the page."""
    header = (Path(zcpool.get_include()) / "zcpool.h").read_text()
    table = header[header.index("typedef struct zc_api") : header.index("} zc_api;")]
    names = re.findall(r"\(\*(\w+)\)\(", table)
    assert len(names) == 13
    page = PAGE.read_text()
    for name in names:
        assert f"`{name}" in page, name
