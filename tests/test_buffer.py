"""Buffers: what they show, what they refuse, and that memory stays while somebody can reach it."""

from __future__ import annotations

import copy
import gc
import inspect
import math
import pickle
import struct
import sys
import threading
import warnings
import weakref

import numpy as np
import pytest
from harness import MIB, Pages, run_quietly, settle
from hypothesis import given, settings
from hypothesis import strategies as st

import zcpool


@pytest.fixture
def pool():
    with zcpool.Pool() as pool:
        yield pool


@pytest.fixture
def device():
    """A pool of memory that is not coherent, and the journal of its backend."""
    backend = Pages(needs_sync=True)
    with zcpool.Pool(backend) as pool:
        yield pool, backend.journal
    settle()
    assert backend.journal.faults == []


def balanced(pool):
    s = pool.stats()
    return s.reserved_bytes == s.in_use_bytes + s.cached_bytes + s.retired_bytes + s.slack_bytes


# ---- what a buffer shows -------------------------------------------------------------------------------------


def test_nbytes_is_what_was_asked_for(pool):
    assert [pool.acquire(n).nbytes for n in (1, 63, 64, 100, "1.5KiB", MIB)] == [1, 63, 64, 100, 1536, MIB]


def test_len_is_nbytes(pool):
    assert len(pool.acquire(1000)) == 1000


def test_capacity_is_what_was_granted(pool):
    with pool.acquire(1000) as b:
        assert 1000 <= b.capacity <= 1125
        assert pool.stats().in_use_bytes == b.capacity


def test_address_is_where_the_bytes_are(pool):
    b = pool.acquire(100)
    assert b.address == np.frombuffer(b, np.uint8).__array_interface__["data"][0]


def test_address_is_aligned_to_the_pools_alignment(pool):
    assert all(pool.acquire(n).address % 64 == 0 for n in range(1, 3000, 7))


@pytest.mark.parametrize(
    ("nbytes", "bucket"),
    [
        (1, "small"),
        (MIB // 2, "small"),
        (MIB, "medium"),
        (4 * MIB - 1, "large"),  # rounded up to 4 MiB: the bucket follows the capacity
        (4 * MIB, "large"),
        (16 * MIB, "huge"),
    ],
)
def test_bucket_follows_the_capacity(pool, nbytes, bucket):
    assert pool.acquire(nbytes).bucket == bucket


def test_offset_is_where_the_block_lies_in_its_region(pool):
    held = [pool.acquire(100) for _ in range(5)]
    assert len({b.offset for b in held}) == 5
    assert len({b.address - b.offset for b in held}) == 1, "five small blocks of one arena"


def test_a_region_of_its_own_has_offset_zero(pool):
    assert pool.acquire(2 * MIB).offset == 0
    assert pool.acquire(100, exclusive=True).offset == 0


def test_fd_is_none_where_regions_have_none(pool):
    assert pool.acquire(100).fd is None


def test_pool_is_the_pool_it_came_from(pool):
    assert pool.acquire(100).pool is pool


def test_released_says_whether_release_was_called(pool):
    b = pool.acquire(100)
    assert b.released is False
    b.release()
    assert b.released is True


@pytest.mark.parametrize("name", ["nbytes", "capacity", "address", "bucket", "fd", "offset", "pool", "released"])
def test_attributes_cannot_be_set(pool, name):
    with pytest.raises(AttributeError):
        setattr(pool.acquire(100), name, 1)


def test_what_was_asked_is_still_told_after_release(pool):
    b = pool.acquire(100)
    b.release()
    assert (b.nbytes, len(b), b.pool, b.released) == (100, 100, pool, True)


# ---- repr ----------------------------------------------------------------------------------------------------


def test_repr_of_a_live_buffer_tells_size_address_bucket_and_pool():
    with zcpool.Pool(name="frames") as pool:
        b = pool.acquire(1000)
        text = repr(b)
    assert "1000 B" in text
    assert f"{b.address:#x}" in text
    assert "small" in text
    assert "'frames'" in text


def test_repr_tells_how_many_views_live(pool):
    b = pool.acquire(100)
    views = [memoryview(b), b.array(100)]
    assert "2 view(s)" in repr(b)
    del views
    assert "view" not in repr(b)


def test_repr_tells_how_many_pins_live(pool):
    b = pool.acquire(100)
    with b.pin(), b.pin():
        assert "2 pin(s)" in repr(b)
        assert "view" not in repr(b)
    assert "pin" not in repr(b)


def test_repr_of_a_released_buffer_says_so(pool):
    b = pool.acquire(100)
    view = memoryview(b)
    b.release()
    assert "released" in repr(b)
    assert "0x" not in repr(b)
    view.release()
    assert "released" in repr(b)


def test_repr_of_an_empty_buffer_says_so(pool):
    b = pool.acquire(0)
    assert "empty" in repr(b)
    b.release()
    assert "released" in repr(b)


def test_repr_of_pins_and_mappings_names_their_buffer(pool):
    b = pool.acquire(100)
    pin = b.pin()
    assert "held" in repr(pin)
    assert repr(b) in repr(pin)
    pin.release()
    assert "released" in repr(pin)
    assert "'rw'" in repr(b.map())


# ---- the buffer protocol -------------------------------------------------------------------------------------


def test_memoryview_is_writable_contiguous_bytes(pool):
    b = pool.acquire(100)
    view = memoryview(b)
    assert (view.nbytes, view.shape, view.strides, view.itemsize, view.format) == (100, (100,), (1,), 1, "B")
    assert view.c_contiguous
    assert not view.readonly
    assert view.obj is b


def test_memoryview_shows_the_bytes_asked_for_and_not_the_capacity(pool):
    b = pool.acquire(65)
    assert b.capacity > 65
    assert memoryview(b).nbytes == 65


def test_two_views_show_the_same_memory(pool):
    b = pool.acquire(8)
    memoryview(b)[:] = b"abcdefgh"
    struct.pack_into("<H", b, 2, 0x5958)
    assert bytes(b) == b"abXYefgh"
    assert b.array(8)[2] == ord("X")


def test_files_read_into_a_buffer(pool, tmp_path):
    path = tmp_path / "frame"
    path.write_bytes(bytes(range(200)))
    b = pool.acquire(200)
    with path.open("rb") as f:
        assert f.readinto(b) == 200
    assert bytes(b) == bytes(range(200))


def test_every_export_is_counted_once(pool):
    b = pool.acquire(100)
    views = [memoryview(b) for _ in range(1000)]
    views += [views[0][10:20], views[0].cast("I")]  # share the export of the view they were made of
    with pytest.raises(BufferError, match=r"1000 view\(s\)"):
        b.release(strict=True)
    del views
    b.release(strict=True)


def test_an_export_ends_with_memoryview_release(pool):
    b = pool.acquire(100)
    with memoryview(b):
        with pytest.raises(BufferError):
            b.release(strict=True)
    b.release(strict=True)
    assert pool.stats().in_use_blocks == 0


def test_more_exports_than_can_be_counted_are_refused_and_nothing_overflows(pool):
    b = pool.acquire(100)
    gc.disable()  # it would look at a million objects again and again
    try:
        views = [memoryview(b) for _ in range(2**20 - 2)]
    finally:
        gc.enable()
    with b.pin():
        for use in (memoryview, lambda b: b.pin(), lambda b: b.array(1), lambda b: b.__dlpack__()):
            with pytest.raises(BufferError, match="a million"):
                use(b)
        assert not b.released
        assert pool.stats().in_use_blocks == 1
        views.pop()
        b.array(100)[:] = 1
        b.release()
        assert pool.stats().retired_blocks == 1
    views.clear()
    assert pool.stats().retired_blocks == pool.stats().in_use_blocks == 0


# ---- array() -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (64,), (8, 8), (2, 3, 4), (1, 1, 1, 1, 60), (np.int64(3), 5), [4, 4]])
def test_array_has_the_shape_asked_for(pool, shape):
    a = pool.acquire(4096).array(shape, np.float32)
    assert a.shape == tuple(shape)
    assert a.dtype == np.float32
    assert a.flags.c_contiguous
    assert a.flags.writeable
    assert not a.flags.owndata


def test_array_takes_an_int_for_a_shape(pool):
    assert pool.acquire(100).array(25, "f4").shape == (25,)


def test_array_is_bytes_by_default(pool):
    assert pool.acquire(100).array(100).dtype == np.uint8


@pytest.mark.parametrize(
    "dtype",
    ["u1", "<i2", ">i4", "f2", "f4", "f8", "c16", "?", "S7", "U3", "M8[ns]", [("x", "u1"), ("y", "<f4")], "V5"],
)
def test_array_takes_every_dtype_without_objects(pool, dtype):
    kind = np.dtype(dtype)
    a = pool.acquire(10 * kind.itemsize).array(10, kind)
    a[...] = np.zeros(10, kind)
    assert a.dtype == kind
    assert a.nbytes == 10 * kind.itemsize


def test_array_of_a_subarray_dtype_has_the_shape_numpy_gives_it(pool):
    a = pool.acquire(240).array((10,), "(2,3)f4")
    assert a.shape == np.empty((10,), "(2,3)f4").shape
    assert a.dtype == np.float32


@pytest.mark.parametrize("dtype", [object, [("x", "u1"), ("y", "O")]])
def test_array_refuses_python_objects(pool, dtype):
    with pytest.raises(ValueError, match="objects"):
        pool.acquire(100).array(1, dtype)


def test_array_starts_at_the_offset(pool):
    b = pool.acquire(100)
    memoryview(b)[:] = bytes(range(100))
    assert b.array(3, offset=10).tolist() == [10, 11, 12]
    assert b.array(2, "<u2", offset=11).tolist() == [0x0C0B, 0x0E0D]
    assert b.array(90, offset=10).ctypes.data == b.address + 10


def test_array_writes_through_to_the_buffer(pool):
    b = pool.acquire(16)
    b.array((2, 2), "<u4", strides=(8, 4))[...] = [[1, 2], [3, 4]]
    assert bytes(b) == struct.pack("<4I", 1, 2, 3, 4)


def test_array_takes_strides(pool):
    b = pool.acquire(100)
    memoryview(b)[:] = bytes(range(100))
    assert b.array((3, 2), strides=(10, 1)).tolist() == [[0, 1], [10, 11], [20, 21]]


def test_array_takes_negative_strides(pool):
    b = pool.acquire(100)
    memoryview(b)[:] = bytes(range(100))
    assert b.array(100, offset=99, strides=(-1,)).tolist() == list(range(99, -1, -1))


def test_array_takes_a_stride_of_zero(pool):
    b = pool.acquire(8)
    memoryview(b)[:] = bytes(range(8))
    assert b.array((2, 4), strides=(0, 1)).tolist() == [[0, 1, 2, 3]] * 2


def test_array_of_image_rows_with_padding(pool):
    b = pool.acquire(64 * 10)
    b.array(640)[:] = 0
    a = b.array((10, 16, 3), strides=(64, 3, 1))
    a[...] = 7
    assert a.strides == (64, 3, 1)
    assert bytes(b) == (b"\7" * 48 + bytes(16)) * 10


@pytest.mark.parametrize("shape", [0, (0,), (0, 5), (3, 0, 2)])
def test_array_without_elements_needs_no_bytes(pool, shape):
    for b in (pool.acquire(100), pool.acquire(0)):
        assert b.array(shape, "f4").size == 0
        assert b.array(shape, "f4", strides=[4] * np.empty(shape).ndim).size == 0


def test_array_that_is_too_large_says_what_it_needs_and_what_there_is(pool):
    with pytest.raises(ValueError, match=r"needs 400 bytes.*has 396"):
        pool.acquire(396).array(100, "f4")


def test_array_cannot_use_the_capacity_behind_nbytes(pool):
    b = pool.acquire(65)
    with pytest.raises(ValueError, match=r"66.*65"):
        b.array(66)


@pytest.mark.parametrize(
    "arguments",
    [
        {"shape": 101},
        {"shape": (10, 11)},
        {"shape": 1, "offset": 100},
        {"shape": 0, "offset": 101},
        {"shape": 1, "offset": -1},
        {"shape": -1},
        {"shape": (-1, -1)},
        {"shape": (2**32, 2**32)},  # 2**64 bytes, which are 0 in 64 bits
        {"shape": (2**63, 2), "dtype": "u1"},
        {"shape": 2**62, "dtype": "f4"},
        {"shape": 2**70},
        {"shape": 1, "offset": 2**63},
        {"shape": 1, "offset": 2**70},
        {"shape": 1, "offset": 2**64 - 1},
        {"shape": 2, "strides": (100,)},
        {"shape": 2, "strides": (-1,)},
        {"shape": 100, "offset": 98, "strides": (-1,)},
        {"shape": 1, "offset": 100, "strides": (1,)},
        {"shape": 1, "offset": -1, "strides": (1,)},
        {"shape": -1, "strides": (1,)},
        {"shape": 1, "offset": 2**70, "strides": (1,)},
        {"shape": 2, "strides": (2**70,)},
        {"shape": 2, "strides": (-(2**63),)},
        {"shape": 2**70, "strides": (1,)},
        {"shape": (2, 2), "strides": (1,)},
        {"shape": 2, "strides": (1, 1)},
        {"shape": 2, "strides": 100},
        {"shape": 10, "dtype": object, "strides": (8,)},
        {"shape": (1,) * 100},
    ],
    ids=str,
)
def test_array_outside_the_buffer_is_a_value_error(pool, arguments):
    with pytest.raises(ValueError):
        pool.acquire(100).array(**arguments)


@pytest.mark.parametrize("stride", [2**62, -(2**62), 2**63 - 1])
def test_strides_that_overflow_64_bits_are_a_value_error(pool, stride):
    # (5 - 1) * 2**62 is 0 in 64 bits: such an array would seem to lie inside.
    with pytest.raises(ValueError):
        pool.acquire(100).array(5, strides=(stride,))


def test_strides_whose_extents_overflow_together_are_a_value_error(pool):
    with pytest.raises(ValueError):
        pool.acquire(100).array((2, 2, 2, 2, 2), strides=(2**62, 2**62, 2**62, 2**62, 1))


@pytest.mark.parametrize("arguments", [{"shape": 1.5}, {"shape": "12"}, {"shape": None}, {"shape": 1, "offset": 1.0}])
def test_array_of_the_wrong_types_is_a_type_error(pool, arguments):
    with pytest.raises(TypeError):
        pool.acquire(100).array(**arguments)


def test_a_refused_array_leaves_no_export(pool):
    b = pool.acquire(100)
    for arguments in ({"shape": 101}, {"shape": 2, "strides": (100,)}, {"shape": 1, "offset": 100, "strides": (1,)}):
        with pytest.raises(ValueError):
            b.array(**arguments)
    gc.collect()
    b.release(strict=True)


@settings(max_examples=200, deadline=None)
@given(
    dims=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    dtype=st.sampled_from(["u1", "<u2", "<f4", "<f8"]),
    offset=st.integers(0, 70),
    data=st.data(),
)
def test_array_with_strides_lies_inside_or_is_refused(dims, dtype, offset, data):
    kind = np.dtype(dtype)
    steps = st.one_of(st.integers(-12, 12), st.integers(-(2**63), 2**63 - 1))
    strides = data.draw(st.lists(steps, min_size=len(dims), max_size=len(dims)))
    ends = [step * (n - 1) for n, step in zip(dims, strides)]
    low = offset + sum(e for e in ends if e < 0)
    high = offset + sum(e for e in ends if e > 0) + kind.itemsize
    inside = 0 in dims or (low >= 0 and high <= 64)
    contents = bytes(range(64))
    with zcpool.Pool() as pool, pool.acquire(64) as b:
        memoryview(b)[:] = contents
        try:
            a = b.array(dims, kind, offset=offset, strides=strides)
        except ValueError:
            assert not inside or 0 in dims
            return
        assert inside
        if a.size:
            assert a.tolist() == np.ndarray(dims, kind, contents, offset, strides).tolist()


@settings(max_examples=200, deadline=None)
@given(
    dims=st.lists(st.integers(0, 9), max_size=4),
    dtype=st.sampled_from(["u1", "<u2", "<f4", "<f8", "S3"]),
    offset=st.integers(0, 70),
)
def test_array_without_strides_fits_exactly_or_is_refused(dims, dtype, offset):
    kind = np.dtype(dtype)
    needed = offset + math.prod(dims) * kind.itemsize
    with zcpool.Pool() as pool, pool.acquire(64) as b:
        if needed > 64:
            with pytest.raises(ValueError, match=rf"{needed} bytes.*64"):
                b.array(dims, kind, offset=offset)
            return
        a = b.array(dims, kind, offset=offset)
        assert a.shape == tuple(dims)
        assert not a.size or a.ctypes.data == b.address + offset


# ---- promise 3: memory stays while somebody can reach it -----------------------------------------------------


def test_an_array_stays_valid_after_its_with_block(pool):
    with pool.acquire(1000) as b:
        a = b.array(250, "f4")
        a[:] = 1
    others = [pool.acquire(1000) for _ in range(100)]
    for other in others:
        other.array(250, "f4")[:] = 2
    assert (a == 1).all()


@pytest.mark.parametrize("nbytes", [100, 5000, 2 * MIB])
def test_a_block_is_not_handed_out_until_its_array_dies(pool, nbytes):
    with pool.acquire(nbytes) as b:
        a = b.array(nbytes)
        address, capacity = b.address, b.capacity
    held = [pool.acquire(nbytes) for _ in range(8)]
    assert all(h.address + h.capacity <= address or address + capacity <= h.address for h in held)
    assert pool.stats().retired_bytes == capacity
    held.clear()
    del a
    assert pool.stats().retired_bytes == 0
    held = [pool.acquire(nbytes) for _ in range(9)]
    assert address in {h.address for h in held}, "and then it is"


@pytest.mark.parametrize(
    "keep",
    [
        memoryview,
        lambda b: memoryview(b)[10:20],
        lambda b: memoryview(b).cast("I"),
        lambda b: b.array(100)[::7],
        lambda b: b.array(25, "f4").reshape(5, 5).T,
        lambda b: np.frombuffer(b, np.uint16),
        lambda b: np.asarray(b),
        lambda b: b.array(10, strides=(9,)),
        lambda b: iter(memoryview(b)),
    ],
    ids=["memoryview", "slice", "cast", "array", "transposed", "frombuffer", "asarray", "strided", "iterator"],
)
def test_any_kind_of_view_keeps_the_block(pool, keep):
    b = pool.acquire(100)
    view = keep(b)
    b.release()
    assert pool.stats().retired_blocks == 1
    del view
    assert pool.stats().retired_blocks == 0
    assert pool.stats().cached_blocks >= 1


def test_the_last_of_several_views_sends_the_block_home(pool):
    b = pool.acquire(100)
    views = [memoryview(b), b.array(100), np.from_dlpack(b), b.array(10)]
    b.release()
    while views:
        assert pool.stats().retired_blocks == 1
        views.pop(len(views) // 2)
    assert pool.stats().retired_blocks == 0


def test_views_keep_the_block_when_the_buffer_is_dropped_without_release(pool):
    a = pool.acquire(1000).array(1000)
    a[:] = 5
    others = [pool.acquire(1000).array(1000) for _ in range(50)]
    for other in others:
        other[:] = 6
    assert (a == 5).all()
    del a, others, other
    assert pool.stats().in_use_blocks == pool.stats().retired_blocks == 0


# ---- release -------------------------------------------------------------------------------------------------


def test_dropping_the_last_reference_releases(pool):
    b = pool.acquire(1000)
    assert pool.stats().in_use_blocks == 1
    del b
    assert pool.stats().in_use_blocks == 0
    assert balanced(pool)


def test_release_is_idempotent(pool):
    b = pool.acquire(1000)
    for _ in range(5):
        b.release()
        b.release(strict=True)
    del b
    s = pool.stats()
    assert (s.acquires, s.releases, s.in_use_blocks) == (1, 1, 0)
    assert pool.acquire(1000).address != pool.acquire(1000).address, "it went home once"


def test_with_releases_also_when_the_body_raises(pool):
    with pytest.raises(KeyError):
        with pool.acquire(100) as b:
            raise KeyError
    assert b.released
    assert pool.stats().in_use_blocks == 0


def test_with_gives_the_buffer_itself(pool):
    b = pool.acquire(100)
    with b as entered:
        assert entered is b


@pytest.mark.parametrize("reference", ["view", "array", "dlpack", "capsule", "pin"])
def test_strict_release_with_references_raises_and_changes_nothing(pool, reference):
    b = pool.acquire(100)
    kept = {
        "view": lambda: memoryview(b),
        "array": lambda: b.array(100),
        "dlpack": lambda: np.from_dlpack(b),
        "capsule": b.__dlpack__,
        "pin": b.pin,
    }[reference]()
    before = pool.stats()
    with pytest.raises(BufferError, match=r"0 view\(s\) and 1 pin" if reference == "pin" else r"1 view\(s\) and 0 pin"):
        b.release(strict=True)
    assert not b.released
    assert pool.stats() == before
    b.array(100)[:] = 3
    assert bytes(b) == b"\3" * 100
    if reference == "pin":
        kept.release()
    del kept
    b.release(strict=True)
    assert pool.stats().in_use_blocks == 0


def test_release_from_another_thread_balances(pool):
    held = [pool.acquire(n) for n in (1, 1000, 100_000, 2 * MIB) for _ in range(100)]
    threads = [threading.Thread(target=lambda part: [b.release() for b in part], args=(held[i::4],)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all(b.released for b in held)
    assert pool.stats().in_use_blocks == 0
    assert balanced(pool)


def test_the_last_view_may_die_in_another_thread(pool):
    with pool.acquire(1000) as b:
        a = [b.array(1000)]
    assert pool.stats().retired_blocks == 1
    t = threading.Thread(target=a.clear)
    t.start()
    t.join()
    assert pool.stats().retired_blocks == 0
    assert balanced(pool)


def test_many_threads_releasing_one_buffer_release_it_once(pool):
    for _ in range(200):
        b = pool.acquire(1000)
        barrier = threading.Barrier(3)

        def release(b=b, barrier=barrier):
            barrier.wait()
            b.release()

        threads = [threading.Thread(target=release) for _ in range(3)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    s = pool.stats()
    assert (s.acquires, s.releases, s.in_use_blocks) == (200, 200, 0)
    assert len({b.address for b in [pool.acquire(1000) for _ in range(50)]}) == 50


# ---- use after release ---------------------------------------------------------------------------------------

USES = {
    "memoryview": memoryview,
    "bytes": bytes,
    "array": lambda b: b.array(1),
    "frombuffer": lambda b: np.frombuffer(b, np.uint8),
    "map": lambda b: b.map("r"),
    "pin": lambda b: b.pin(),
    "sync": lambda b: b.sync("to_device"),
    "handle": lambda b: b.handle(),
    "address": lambda b: b.address,
    "fd": lambda b: b.fd,
    "offset": lambda b: b.offset,
    "bucket": lambda b: b.bucket,
    "__dlpack__": lambda b: b.__dlpack__(),
    "from_dlpack": np.from_dlpack,
}


@pytest.mark.parametrize("use", USES)
def test_use_after_release_is_refused_with_advice(pool, use):
    b = pool.acquire(100)
    b.release()
    with pytest.raises(BufferError, match=r"released.*(before release|keep a view)"):
        USES[use](b)


@pytest.mark.parametrize("use", USES)
def test_use_after_release_is_refused_also_while_a_view_keeps_the_block(pool, use):
    b = pool.acquire(100)
    view = memoryview(b)
    b.release()
    with pytest.raises(BufferError, match="released"):
        USES[use](b)
    view.release()
    assert pool.stats().retired_blocks == 0


def test_use_after_release_is_refused_when_somebody_else_has_the_block(pool):
    b = pool.acquire(100)
    address = b.address
    b.release()
    other = pool.acquire(100)
    assert other.address == address
    with pytest.raises(BufferError):
        memoryview(b)
    b.release()
    assert not other.released
    assert pool.stats().in_use_blocks == 1


def test_capacity_of_a_released_buffer_is_zero(pool):
    b = pool.acquire(100)
    b.release()
    assert b.capacity == 0


def test_a_mapping_made_before_release_is_refused_after_it(pool):
    b = pool.acquire(100)
    mapping = b.map("rw")
    b.release()
    with pytest.raises(BufferError, match="released"), mapping:
        pass


# ---- what cannot be done with buffers ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [zcpool.Buffer, zcpool.Pin, zcpool.Mapping, zcpool.Handle])
def test_only_the_pool_makes_them(kind):
    with pytest.raises(TypeError, match="come"):
        kind()


def test_objects_made_behind_the_back_of_init_refuse_to_work():
    run_quietly("""
        import zcpool
        uses = {
            "Buffer": [repr, len, memoryview, lambda x: x.array(1), lambda x: x.release(), lambda x: x.pin(),
                       lambda x: x.__enter__(), lambda x: x.__dlpack__(copy=True), lambda x: x.handle()],
            "Pin": [repr, lambda x: x.release(), lambda x: x.__enter__()],
            "Handle": [repr, lambda x: x.pointer, lambda x: x.owner],
            "Fence": [repr, lambda x: x.set(), lambda x: x.wait(0)],
            "Pool": [repr, lambda x: x.acquire(1), lambda x: x.stats(), lambda x: x.close()],
            "FixedPool": [repr, lambda x: x.acquire(), lambda x: x.stats()],
            "Mapping": [repr, lambda x: x.__exit__(None, None, None), lambda x: x.__enter__()],
        }
        for name, calls in uses.items():
            kind = getattr(zcpool, name)
            for call in calls:
                try:
                    call(kind.__new__(kind))
                except Exception:
                    pass
    """)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"])
def test_buffers_cannot_be_copied_or_pickled(pool, duplicate):
    b = pool.acquire(100)
    with pytest.raises(TypeError):
        duplicate(b)
    b.release(strict=True)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"])
def test_pins_cannot_be_copied_or_pickled(pool, duplicate):
    # A copy would be released a second time, and the block would go home under the device.
    with pool.acquire(100).pin() as pin:
        with pytest.raises(TypeError):
            duplicate(pin).release()


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"])
def test_mappings_cannot_be_copied_or_pickled(pool, duplicate):
    mapping = pool.acquire(100).map()
    with pytest.raises(TypeError):
        duplicate(mapping)


def test_buffers_are_told_apart_by_identity(pool):
    a, b = pool.acquire(10), pool.acquire(10)
    assert a != b
    assert len({a, b, a}) == 2


def test_buffers_and_pins_can_be_referenced_weakly(pool):
    b = pool.acquire(100)
    pin = b.pin()
    refs = [weakref.ref(b), weakref.ref(pin)]
    pin.release()
    del b, pin
    assert [r() for r in refs] == [None, None]


def test_a_weak_reference_to_a_buffer_does_not_keep_its_block(pool):
    ref = weakref.ref(pool.acquire(100))
    assert ref() is None
    assert pool.stats().in_use_blocks == 0


def test_buffers_live_again_after_many_have_died_at_once(pool):
    """Dead buffers are kept for the next ones: more than are kept die here, twice."""
    for _ in range(2):
        many = [pool.acquire(100 + i) for i in range(200)]
        assert [b.nbytes for b in many] == list(range(100, 300))
        assert len({b.address for b in many}) == 200
        del many
    assert pool.stats().in_use_blocks == 0
    assert balanced(pool)


def test_a_buffer_knows_nothing_of_the_one_that_died_before(pool):
    b = pool.acquire(1000)
    with b.pin():
        b.release()
    del b
    fresh = pool.acquire(0)
    assert (fresh.nbytes, fresh.capacity, fresh.released) == (0, 0, False)
    assert "pin" not in repr(fresh)


def test_the_death_of_a_buffer_leaves_the_exception_that_is_handled(pool):
    handled = []
    try:
        raise KeyError("kept")
    except KeyError:
        pool.acquire(100)
        handled.append(sys.exc_info()[1])
    assert repr(handled) == "[KeyError('kept')]"


def test_a_weak_reference_is_told_when_its_buffer_dies(pool):
    told = []
    b = pool.acquire(100)
    ref = weakref.ref(b, told.append)
    del b
    assert told == [ref]
    again = pool.acquire(100)
    assert ref() is None, "it does not see the next buffer"
    assert weakref.getweakrefcount(again) == 0


def test_the_collector_sees_living_buffers_only(pool):
    many = [pool.acquire(100) for _ in range(10)]
    assert sum(any(o is b for b in many) for o in gc.get_objects()) == 10
    del many
    assert not any(isinstance(o, zcpool.Buffer) and o.pool is pool for o in gc.get_objects())


@pytest.mark.parametrize("arguments", [(1,), (1, 2), (1, 2, 3, 4)])
def test_exit_takes_three_arguments(pool, arguments):
    b = pool.acquire(100)
    with pytest.raises(TypeError):
        b.__exit__(*arguments)
    assert not b.released


def test_release_refuses_what_it_does_not_know(pool):
    b = pool.acquire(100)
    with pytest.raises(TypeError):
        b.release(1, 2, 3)
    with pytest.raises(TypeError, match="later"):
        b.release(later=1)
    assert not b.released


@pytest.mark.parametrize("method", ["release", "__exit__", "__enter__"])
def test_methods_refuse_other_objects(method):
    with pytest.raises(TypeError):
        getattr(zcpool.Buffer, method)(object())


# ---- map and sync --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "readonly"), [("r", True), ("w", False), ("rw", False)])
def test_map_gives_a_memoryview_of_the_bytes(pool, mode, readonly):
    b = pool.acquire(100)
    memoryview(b)[:] = bytes(range(100))
    with b.map(mode) as view:
        assert isinstance(view, memoryview)
        assert view.readonly is readonly
        assert bytes(view) == bytes(range(100))


def test_map_reads_and_writes_by_default(pool):
    b = pool.acquire(3)
    with b.map() as view:
        view[:] = b"abc"
    assert bytes(b) == b"abc"


def test_a_view_mapped_for_reading_cannot_be_written(pool):
    with pool.acquire(3).map("r") as view:
        with pytest.raises(TypeError):
            view[0] = 1
        with pytest.raises(ValueError):
            np.frombuffer(view, np.uint8)[0] = 1


def test_the_view_ends_with_the_map(pool):
    b = pool.acquire(100)
    with b.map("rw") as view:
        pass
    with pytest.raises(ValueError, match="released"):
        view[0]
    b.release(strict=True)


@pytest.mark.parametrize("mode", ["", "x", "wr", "rb", "read", None, 1])
def test_map_refuses_other_modes(pool, mode):
    with pytest.raises(ValueError, match='"rw"'):
        pool.acquire(100).map(mode)


def test_an_array_made_inside_a_map_may_outlive_it(pool):
    b = pool.acquire(100)
    with b.map("rw") as view:
        a = np.frombuffer(view, np.uint8)
        a[:] = 9
    b.release()
    others = [pool.acquire(100) for _ in range(30)]
    for other in others:
        memoryview(other)[:] = bytes(100)
    assert (a == 9).all()
    assert pool.stats().retired_blocks == 1
    del a, view
    assert pool.stats().retired_blocks == 0


def test_a_mapping_cannot_be_entered_twice_at_a_time(pool):
    mapping = pool.acquire(100).map("rw")
    with mapping as view:
        with pytest.raises(ValueError, match="in use"):
            mapping.__enter__()
        view[0] = 1


def test_a_mapping_can_be_used_again_after_it_has_ended(pool):
    mapping = pool.acquire(100).map("rw")
    for i in range(3):
        with mapping as view:
            view[0] = i


def test_leaving_a_mapping_that_was_not_entered_does_not_crash_or_leak(pool):
    b = pool.acquire(100)
    mapping = b.map("rw")
    with pytest.raises((ValueError, RuntimeError)):
        mapping.__exit__(None, None, None)
    b.release(strict=True)


def test_a_buffer_mapped_twice_gives_two_views(pool):
    b = pool.acquire(4)
    with b.map("w") as one, b.map("r") as two:
        one[:] = b"abcd"
        assert bytes(two) == b"abcd"


def test_map_for_reading_syncs_from_the_device_on_entry_alone(device):
    pool, journal = device
    b = pool.acquire(1000)
    mapping = b.map("r")
    assert journal.synced == []
    with mapping:
        assert journal.synced == [(0, b.offset, 1000, "from_device")]
    assert len(journal.synced) == 1


def test_map_for_writing_syncs_to_the_device_on_exit_alone(device):
    pool, journal = device
    b = pool.acquire(1000)
    with b.map("w"):
        assert journal.synced == []
    assert journal.synced == [(0, b.offset, 1000, "to_device")]


def test_map_for_both_syncs_on_entry_and_on_exit(device):
    pool, journal = device
    with pool.acquire(1000).map("rw"):
        pass
    assert [direction for *_, direction in journal.synced] == ["from_device", "to_device"]


def test_what_the_cpu_wrote_reaches_the_device_also_when_the_body_raises(device):
    pool, journal = device
    with pytest.raises(KeyError), pool.acquire(1000).map("w"):
        raise KeyError
    assert [direction for *_, direction in journal.synced] == ["to_device"]


def test_map_syncs_the_range_of_its_block_and_no_more(device):
    pool, journal = device
    held = [pool.acquire(n) for n in (100, 1000, 70, 2 * MIB)]
    for b in held:
        with b.map("w"):
            pass
    assert [(offset, nbytes) for _, offset, nbytes, _ in journal.synced] == [(b.offset, b.nbytes) for b in held]
    assert len({(number, offset) for number, offset, *_ in journal.synced}) == 4


@pytest.mark.parametrize("direction", ["to_device", "from_device"])
def test_sync_goes_in_the_direction_asked_for(device, direction):
    pool, journal = device
    b = pool.acquire(1000)
    b.sync(direction)
    assert journal.synced == [(0, b.offset, 1000, direction)]


@pytest.mark.parametrize("direction", ["", "device", "to device", None, 1])
def test_sync_refuses_other_directions(pool, direction):
    with pytest.raises(ValueError, match='"to_device"'):
        pool.acquire(100).sync(direction)


def test_coherent_memory_is_not_synced(pool):
    backend = Pages()
    with zcpool.Pool(backend) as plain, plain.acquire(100) as b:
        with b.map("rw"):
            b.sync("to_device")
    assert backend.journal.synced == []


def test_views_and_arrays_do_not_sync(device):
    pool, journal = device
    b = pool.acquire(100)
    b.array(100)[:] = 1
    bytes(memoryview(b))
    assert journal.synced == []


def test_empty_buffers_do_not_sync(device):
    pool, journal = device
    with pool.acquire(0).map("rw") as view:
        assert view.nbytes == 0
    pool.acquire(0).sync("to_device")
    assert journal.synced == []


class Failing(Pages):
    """Its sync fails in one direction."""

    def __init__(self, direction):
        super().__init__(needs_sync=True)
        self.direction = direction

    def sync(self, memory, offset, nbytes, direction):
        super().sync(memory, offset, nbytes, direction)
        if direction == self.direction:
            raise OSError(5, "the cache is on strike")


def test_a_sync_that_fails_is_a_backend_error_with_its_cause():
    with zcpool.Pool(Failing("to_device")) as pool, pool.acquire(100) as b:
        with pytest.raises(zcpool.BackendError, match="on strike") as caught:
            b.sync("to_device")
    assert caught.value.call == "sync"
    assert isinstance(caught.value.__cause__, OSError)


def test_a_map_that_fails_on_entry_holds_nothing():
    with zcpool.Pool(Failing("from_device")) as pool, pool.acquire(100) as b:
        with pytest.raises(zcpool.BackendError), b.map("r"):
            pytest.fail("entered")
        b.release(strict=True)


def test_a_map_that_fails_on_exit_holds_nothing():
    with zcpool.Pool(Failing("to_device")) as pool, pool.acquire(100) as b:
        with pytest.raises(zcpool.BackendError):
            with b.map("w") as view:
                view[0] = 1
        with pytest.raises(ValueError):
            view[0]
        b.release(strict=True)


def test_a_buffer_released_inside_its_map_is_synced_while_its_view_keeps_it(device):
    pool, journal = device
    b = pool.acquire(1000)
    with b.map("w") as view:
        b.release()
        view[:] = bytes(1000)
    assert [direction for *_, direction in journal.synced] == ["to_device"]
    del view
    assert pool.stats().retired_blocks == 0


def test_nothing_is_synced_that_went_home_inside_its_map():
    # The view and the buffer are given back inside the map: its region may be gone when the map ends.
    out = run_quietly("""
        import zcpool
        from harness import Pages, MIB
        backend = Pages(needs_sync=True)
        pool = zcpool.Pool(backend)
        b = pool.acquire(2 * MIB)
        try:
            with b.map("w") as view:
                view.release()
                b.release()
                pool.trim()
        except BufferError:
            pass
        assert backend.journal.live == {}
        print(backend.journal.faults, backend.journal.synced)
    """)
    assert out == "[] []\n"


# ---- handles -------------------------------------------------------------------------------------------------


def test_a_handle_tells_where_the_block_is(pool):
    b = pool.acquire(1000)
    handle = b.handle()
    assert (handle.pointer, handle.fd, handle.offset) == (b.address, None, b.offset)
    assert handle.nbytes == b.capacity


def test_a_handle_keeps_its_buffer(pool):
    b = pool.acquire(1000)
    handle = b.handle()
    assert handle.owner is b
    ref = weakref.ref(b)
    del b
    assert ref() is not None
    assert pool.stats().in_use_blocks == 1
    del handle
    assert ref() is None
    assert pool.stats().in_use_blocks == 0


def test_an_empty_buffer_has_no_handle(pool):
    with pytest.raises(ValueError, match="empty"):
        pool.acquire(0).handle()


def test_repr_of_a_handle_tells_where_it_points(pool):
    b = pool.acquire(1000)
    assert f"{b.address:#x}" in repr(b.handle())


# ---- pins ----------------------------------------------------------------------------------------------------


def test_a_pin_keeps_the_block_after_release(pool):
    b = pool.acquire(1000)
    pin = b.pin()
    address = b.address
    b.release()
    assert pool.stats().retired_blocks == 1
    assert address not in {h.address for h in [pool.acquire(1000) for _ in range(30)]}
    pin.release()
    assert pool.stats().retired_blocks == 0
    assert pool.stats().in_use_blocks == 0


def test_a_pin_keeps_the_block_when_the_buffer_is_dropped(pool):
    pin = pool.acquire(1000).pin()
    held = pool.stats()
    assert held.in_use_blocks + held.retired_blocks == 1
    pin.release()
    del pin
    free = pool.stats()
    assert free.in_use_blocks + free.retired_blocks == 0


def test_a_pin_is_released_once(pool):
    b = pool.acquire(1000)
    one, two = b.pin(), b.pin()
    b.release()
    for _ in range(3):
        one.release()
    assert pool.stats().retired_blocks == 1, "the other pin is still held"
    two.release()
    assert pool.stats().retired_blocks == 0
    assert balanced(pool)


def test_a_pin_is_released_at_the_end_of_its_with_block(pool):
    b = pool.acquire(1000)
    with b.pin() as pin:
        with pytest.raises(BufferError):
            b.release(strict=True)
        assert "held" in repr(pin)
    b.release(strict=True)


def test_a_pin_is_released_by_four_threads_once(pool):
    for _ in range(100):
        b = pool.acquire(1000)
        pins = [b.pin(), b.pin()]
        threads = [threading.Thread(target=pins[0].release) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        b.release()
        assert pool.stats().retired_blocks == 1
        pins[1].release()
    assert pool.stats().retired_blocks == 0


def test_an_empty_buffer_can_be_pinned(pool):
    b = pool.acquire(0)
    with b.pin():
        assert not b.released
    b.release(strict=True)


def dropped_pin(pool):
    """Drop a pin that was not released; return the address of its block."""
    b = pool.acquire(1000)
    address = b.address
    pin = b.pin()
    b.release()
    with pytest.warns(ResourceWarning, match=r"dropped without release\(\).*stays pinned"):
        del pin
    return address


def test_a_dropped_pin_warns_and_its_block_is_never_handed_out():
    pool = zcpool.Pool()
    address = dropped_pin(pool)
    for _ in range(3):
        assert address not in {h.address for h in [pool.acquire(1000) for _ in range(100)]}
        pool.trim()
    assert pool.stats().retired_blocks == 1
    assert balanced(pool)
    with pytest.warns(ResourceWarning, match=r"ends while 1 block\(s\) are held"):
        del pool


def test_the_warnings_about_a_dropped_pin_name_the_lines_that_dropped_pin_and_pool():
    pool = zcpool.Pool()
    pin = pool.acquire(1000).pin()
    line = inspect.currentframe().f_lineno
    with pytest.warns(ResourceWarning) as caught:
        del pin
    places = [(caught[0].filename, caught[0].lineno)]
    caught.clear()  # what it knows keeps the pin, and the pool
    with pytest.warns(ResourceWarning) as caught:
        del pool
    places.append((caught[0].filename, caught[0].lineno))
    assert places == [(__file__, line + 2), (__file__, line + 6)]


def test_a_dropped_pin_keeps_its_region_after_close():
    backend = Pages()
    pool = zcpool.Pool(backend)
    dropped_pin(pool)
    pool.close()
    settle()
    assert len(backend.journal.live) == 1
    assert backend.journal.freed == []
    with pytest.warns(ResourceWarning):
        del pool


def test_releasing_a_pin_after_a_warning_about_it_is_harmless(pool):
    b = pool.acquire(1000)
    pin = b.pin()
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        pin.__del__()
    pin.release()
    b.release(strict=True)


# ---- garbage -------------------------------------------------------------------------------------------------


class Node:
    """Something in a reference cycle."""

    def __init__(self, buffer, extra=None):
        self.me = self
        self.buffer = buffer
        self.extra = extra


KEEPERS = {
    "nothing": lambda b: None,
    "view": memoryview,
    "array": lambda b: b.array(1000),
    "capsule": lambda b: b.__dlpack__(),
}


@pytest.mark.parametrize("keeper", KEEPERS)
def test_buffers_in_reference_cycles_go_home(pool, keeper):
    gc.disable()
    try:
        b = pool.acquire(1000)
        ref = weakref.ref(Node(b, KEEPERS[keeper](b)))
        del b
        assert pool.stats().in_use_blocks == 1
    finally:
        gc.enable()
    gc.collect()
    assert ref() is None
    s = pool.stats()
    assert s.in_use_blocks == s.retired_blocks == 0


def test_a_cycle_through_the_pool_itself_is_collected():
    class Owner(zcpool.Pool):
        pass

    backend = Pages()
    pool = Owner(backend)
    pool.buffer = pool.acquire(1000)
    pool.view = memoryview(pool.buffer)
    pool.buffer.array(10)[:] = 1
    refs = [weakref.ref(pool), weakref.ref(pool.buffer)]
    journal = backend.journal
    del pool
    gc.collect()
    settle()
    assert [r() for r in refs] == [None, None]
    assert journal.live == {}
    assert len(journal.freed) == journal.allocated
    assert journal.faults == []


def test_a_cycle_through_on_pressure_is_collected():
    backend = Pages()

    def make():
        held = []
        pool = zcpool.Pool(backend, on_pressure=lambda pool, nbytes: held.clear())
        held.append(pool.acquire(1000))
        return weakref.ref(pool)

    ref = make()
    assert ref() is not None
    gc.collect()
    settle()
    assert ref() is None
    assert backend.journal.live == {}


def test_collection_at_every_step_of_acquire_and_release(pool):
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for i in range(20_000):
            b = pool.acquire(1 + i % 5000)
            Node(b, memoryview(b) if i % 3 == 0 else None)
            if i % 7 == 0:
                b.release()
            del b
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    s = pool.stats()
    assert s.in_use_blocks == s.retired_blocks == 0
    assert s.acquires == s.releases == 20_000
    assert balanced(pool)


def test_collection_inside_the_backend_and_on_pressure_does_no_harm():
    class Collecting(Pages):
        def allocate(self, nbytes, alignment):
            gc.collect()
            return super().allocate(nbytes, alignment)

        def free(self, memory):
            gc.collect()
            super().free(memory)

    def litter():
        b = pool.acquire(2 * MIB)
        Node(b, memoryview(b))

    backend = Collecting()
    with zcpool.Pool(backend, max_bytes=8 * MIB, on_pressure=lambda pool, nbytes: gc.collect()) as pool:
        for i in range(50):
            litter()
            if i % 10 == 0:
                pool.trim()
    gc.collect()
    settle()
    assert backend.journal.live == {}
    assert backend.journal.faults == []


# ---- empty buffers -------------------------------------------------------------------------------------------


def test_an_empty_buffer_behaves_like_any_other(pool):
    b = pool.acquire(0)
    assert (b.nbytes, len(b), b.capacity, b.bucket, b.fd, b.offset, b.released) == (0, 0, 0, "small", None, 0, False)
    assert bytes(b) == b""
    assert memoryview(b).nbytes == 0
    assert isinstance(b.address, int)
    with b:
        pass
    assert b.released
    with pytest.raises(BufferError):
        memoryview(b)


def test_an_empty_buffer_never_reaches_the_backend():
    backend = Pages()
    with zcpool.Pool(backend) as pool:
        held = [pool.acquire(0) for _ in range(100)]
        assert backend.journal.allocated == 0
        assert pool.stats().in_use_blocks == 0
        del held


# ---- Pool.array ----------------------------------------------------------------------------------------------


def test_pool_array_is_a_writable_array_of_the_pools_memory(pool):
    a = pool.array((3, 4), "f4")
    assert (a.shape, a.dtype, a.flags.writeable, a.flags.owndata) == ((3, 4), np.float32, True, False)
    a[...] = 1
    s = pool.stats()
    assert s.in_use_blocks + s.retired_blocks == 1


def test_the_block_of_a_pool_array_goes_home_with_its_last_view(pool):
    a = pool.array((100, 100), "f8")
    row = a[3]
    del a
    s = pool.stats()
    assert s.in_use_blocks + s.retired_blocks == 1
    del row
    s = pool.stats()
    assert s.in_use_blocks + s.retired_blocks == 0


def test_pool_array_takes_an_int_and_is_bytes_by_default(pool):
    a = pool.array(10)
    assert (a.shape, a.dtype) == ((10,), np.uint8)


def test_pool_array_without_elements_is_empty(pool):
    assert pool.array((0, 3), "f4").shape == (0, 3)
    assert pool.stats().reserved_bytes == 0


@pytest.mark.parametrize("shape", [-1, (3, -1), (-1, -1)])
def test_pool_array_refuses_negative_dimensions(pool, shape):
    with pytest.raises(ValueError, match="negative"):
        pool.array(shape)


@pytest.mark.parametrize("shape", [(2**32, 2**32), (2**62, 8), 2**70])
def test_a_pool_array_larger_than_any_machine_is_out_of_memory(pool, shape):
    with pytest.raises(zcpool.OutOfMemory):
        pool.array(shape, "f8")


def test_pool_array_refuses_python_objects_and_holds_nothing(pool):
    with pytest.raises(ValueError, match="objects"):
        pool.array(10, object)
    gc.collect()
    assert pool.stats().in_use_blocks == 0


# ---- what a newcomer tries -----------------------------------------------------------------------------------


@pytest.mark.parametrize("convert", [np.asarray, np.array, lambda b: np.add(b, 1)], ids=["asarray", "array", "add"])
def test_numpy_refuses_a_released_buffer(pool, convert):
    b = pool.acquire(100)
    b.release()
    with pytest.raises(BufferError, match="released"):
        convert(b)


def test_with_refuses_a_released_buffer(pool):
    b = pool.acquire(100)
    b.release()
    with pytest.raises(BufferError, match="released"), b:
        pytest.fail("entered")
