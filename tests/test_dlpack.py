"""DLPack: what the capsules say, who gives the block back, and when, also where there is no Python."""

from __future__ import annotations

import ctypes
import gc
import random
import threading
import weakref

import numpy as np
import pytest
from harness import MIB, Pages, run_quietly, settle
from helpers import eventually

import zcpool

CPU = (1, 0)
READ_ONLY = 1
IS_COPIED = 2


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class Managed(ctypes.Structure):
    _fields_ = [("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    ]


KINDS = {b"dltensor": Managed, b"dltensor_versioned": Versioned}
USED = {b"dltensor": b"used_dltensor", b"dltensor_versioned": b"used_dltensor_versioned"}
VERSIONS = [None, (0, 8), (1, 0), (1, 1), (2, 3)]

get_name = ctypes.pythonapi.PyCapsule_GetName
get_name.restype, get_name.argtypes = ctypes.c_char_p, [ctypes.py_object]
get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
set_name = ctypes.pythonapi.PyCapsule_SetName
set_name.restype, set_name.argtypes = ctypes.c_int, [ctypes.py_object, ctypes.c_char_p]


def look(capsule):
    """Return what the capsule points to."""
    name = get_name(capsule)
    return KINDS[name].from_address(get_pointer(capsule, name))


class Consumed:
    """What a consumer keeps of a capsule: the struct, and the duty to call its deleter once."""

    def __init__(self, capsule):
        name = get_name(capsule)
        self.managed = look(capsule)
        self.address = get_pointer(capsule, name)
        set_name(capsule, USED[name])  # from here on the capsule's own destructor leaves it alone

    def delete(self):
        """Call the deleter with the GIL released."""
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.managed.deleter)(self.address)


@pytest.fixture
def pool():
    with zcpool.Pool() as pool:
        yield pool


def held(pool):
    s = pool.stats()
    return s.in_use_blocks + s.retired_blocks


# ---- what a capsule says -------------------------------------------------------------------------------------


def test_the_device_is_the_cpu(pool):
    assert pool.acquire(100).__dlpack_device__() == CPU


@pytest.mark.parametrize("version", [(1, 0), (1, 1), (2, 3)])
def test_who_knows_version_one_gets_a_versioned_capsule(pool, version):
    capsule = pool.acquire(100).__dlpack__(max_version=version)
    assert get_name(capsule) == b"dltensor_versioned"
    managed = look(capsule)
    assert managed.major == 1
    assert managed.flags == 0, "neither read-only nor a copy"


@pytest.mark.parametrize("version", [None, (0, 8)])
def test_who_does_not_know_version_one_gets_an_old_capsule(pool, version):
    assert get_name(pool.acquire(100).__dlpack__(max_version=version)) == b"dltensor"


def test_the_old_capsule_is_what_a_call_without_arguments_gives(pool):
    assert get_name(pool.acquire(100).__dlpack__()) == b"dltensor"


@pytest.mark.parametrize("version", VERSIONS)
def test_the_tensor_is_the_buffers_bytes(pool, version):
    b = pool.acquire(1000)
    capsule = b.__dlpack__(max_version=version)
    t = look(capsule).tensor
    assert (t.data, t.byte_offset) == (b.address, 0)
    assert (t.device_type, t.device_id) == CPU
    assert (t.code, t.bits, t.lanes) == (1, 8, 1)
    assert (t.ndim, t.shape[0], t.strides[0]) == (1, 1000, 1)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_tensor_of_an_empty_buffer_has_no_elements(pool, version):
    capsule = pool.acquire(0).__dlpack__(max_version=version)
    t = look(capsule).tensor
    assert (t.ndim, t.shape[0]) == (1, 0)
    assert t.data is None, "dlpack.h: the data pointer of a tensor of size zero is NULL"
    Consumed(capsule).delete()


# ---- numpy ---------------------------------------------------------------------------------------------------


def test_numpy_sees_the_same_memory(pool):
    b = pool.acquire(1000)
    a = np.from_dlpack(b)
    assert (a.shape, a.dtype) == ((1000,), np.uint8)
    assert a.ctypes.data == b.address
    b.array(1000)[:] = 7
    assert (a == 7).all()


@pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) < "2.1.0", reason="older numpys know no versioned capsules")
def test_numpy_may_write(pool):
    b = pool.acquire(1000)
    a = np.from_dlpack(b)
    assert a.flags.writeable
    a[:] = 9
    assert bytes(b) == b"\x09" * 1000


def test_numpy_takes_an_empty_buffer(pool):
    assert np.from_dlpack(pool.acquire(0)).shape == (0,)


def test_zero_copy_is_counted_as_none(pool):
    before = zcpool.copies()
    with zcpool.require_zero_copy():
        np.from_dlpack(pool.acquire(1000))
    assert zcpool.copies() == before


# ---- who gives the block back --------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
def test_a_capsule_nobody_consumed_gives_back_its_block(pool, version):
    b = pool.acquire(1000)
    capsule = b.__dlpack__(max_version=version)
    b.release()
    assert pool.stats().retired_blocks == 1
    del capsule
    assert held(pool) == 0


@pytest.mark.parametrize("version", VERSIONS)
def test_a_consumed_capsule_leaves_the_block_to_the_deleter(pool, version):
    b = pool.acquire(1000)
    capsule = b.__dlpack__(max_version=version)
    consumed = Consumed(capsule)
    b.release()
    del capsule
    assert pool.stats().retired_blocks == 1
    consumed.delete()
    assert held(pool) == 0


def test_an_array_keeps_the_block_after_release(pool):
    with pool.acquire(1000) as b:
        a = np.from_dlpack(b)
        b.array(1000)[:] = 3
        address = b.address
    others = [pool.acquire(1000) for _ in range(30)]
    assert address not in {o.address for o in others}
    assert (a == 3).all()
    assert pool.stats().retired_blocks == 1
    del a
    assert pool.stats().retired_blocks == 0


def test_a_tensor_keeps_the_block_and_not_the_buffer_object(pool):
    b = pool.acquire(1000)
    ref = weakref.ref(b)
    a = np.from_dlpack(b)
    del b
    assert ref() is None
    assert pool.stats().retired_blocks == 1
    del a
    assert held(pool) == 0


def test_tensors_and_views_of_one_buffer_may_end_in_any_order(pool):
    order = random.Random(1)
    for _ in range(100):
        b = pool.acquire(1000)
        kept = [np.from_dlpack(b), b.__dlpack__(), b.__dlpack__(max_version=(1, 0)), memoryview(b), b.array(9), b]
        kept += [Consumed(c) for c in (b.__dlpack__(), b.__dlpack__(max_version=(1, 0)))]
        del b
        order.shuffle(kept)
        while kept:
            assert held(pool) == 1
            last = kept.pop()
            if isinstance(last, Consumed):
                last.delete()
            del last
        assert held(pool) == 0


def test_a_capsule_in_a_reference_cycle_gives_back_its_block(pool):
    cycle = [pool.acquire(1000).__dlpack__()]
    cycle.append(cycle)
    assert held(pool) == 1
    del cycle
    gc.collect()
    assert held(pool) == 0


# ---- deleters that run late, and without Python --------------------------------------------------------------


@pytest.mark.parametrize("version", [None, (1, 0)])
@pytest.mark.parametrize("nbytes", [1000, 2 * MIB])
def test_a_deleter_may_run_after_buffer_and_pool_are_gone(version, nbytes):
    backend = Pages()
    journal = backend.journal
    pool = zcpool.Pool(backend)
    b = pool.acquire(nbytes)
    memoryview(b)[:4] = b"abcd"
    capsule = b.__dlpack__(max_version=version)
    consumed = Consumed(capsule)
    refs = [weakref.ref(pool), weakref.ref(b), weakref.ref(backend)]
    del b, pool, backend, capsule
    assert [r() is None for r in refs] == [True, True, False], "the memory keeps the backend alone"
    assert ctypes.string_at(consumed.managed.tensor.data, 4) == b"abcd"
    assert len(journal.live) == 1
    consumed.delete()
    settle()
    assert journal.live == {}
    assert journal.faults == []
    assert refs[2]() is None


def test_an_array_outlives_buffer_and_pool():
    pool = zcpool.Pool()
    b = pool.acquire(2 * MIB)
    b.array(2 * MIB)[:] = 1
    a = np.from_dlpack(b)
    del pool, b
    assert (a == 1).all()


def test_deleters_run_in_threads_without_the_gil(pool):
    consumed = [[Consumed(pool.acquire(1000).__dlpack__()) for _ in range(200)] for _ in range(4)]
    assert held(pool) == 800
    threads = [threading.Thread(target=lambda part: [c.delete() for c in part], args=(part,)) for part in consumed]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert held(pool) == 0
    s = pool.stats()
    assert s.acquires == s.releases == 800
    assert s.reserved_bytes == s.cached_bytes + s.slack_bytes


NATIVE = """
    import ctypes, sys, threading
    import numpy, zcpool
    from harness import Pages, settle
    from test_dlpack import Consumed

    # PyDLL keeps the GIL during the call: if a deleter asked for it, this would hang.
    libc = ctypes.PyDLL(None)
    def in_native_thread(consumed):
        thread = ctypes.c_ulong()
        start = ctypes.c_void_p(consumed.managed.deleter)
        assert libc.pthread_create(ctypes.byref(thread), None, start, ctypes.c_void_p(consumed.address)) == 0
        assert libc.pthread_join(thread, None) == 0
"""


def run_native(code):
    run_quietly(NATIVE + code)


def test_a_deleter_in_a_native_thread_never_waits_for_the_gil():
    run_native("""
    pool = zcpool.Pool()
    for version in (None, (1, 0)):
        for nbytes in (100, 5000, 2 << 20):
            consumed = [Consumed(pool.acquire(nbytes).__dlpack__(max_version=version)) for _ in range(50)]
            for c in consumed:
                in_native_thread(c)
    s = pool.stats()
    assert s.in_use_blocks == s.retired_blocks == 0, s
    assert s.acquires == s.releases == 300, s
    assert s.reserved_bytes == s.cached_bytes + s.slack_bytes, s
    """)


def test_a_deleter_on_a_closed_pool_never_waits_for_the_gil():
    run_native("""
    pool = zcpool.Pool()
    consumed = [Consumed(pool.acquire(n).__dlpack__()) for n in (100, 5000, 2 << 20)]
    pool.close()
    for c in consumed:
        in_native_thread(c)
    assert pool.stats().reserved_bytes == 0, pool.stats()
    """)


@pytest.mark.parametrize("closed", ["pool.close()", "del pool"])
def test_python_frees_what_a_native_deleter_gave_back(closed):
    # The deleter must neither call the backend, which is Python, nor wait until it may.
    run_native(f"""
    backend = Pages()
    journal = backend.journal
    pool = zcpool.Pool(backend)
    consumed = [Consumed(pool.acquire(n).__dlpack__()) for n in (100, 5000, 2 << 20, 3 << 20)]
    {closed}
    regions = len(journal.live)
    assert regions == 3, journal
    for c in consumed:
        in_native_thread(c)
    settle()
    assert len(journal.freed) == regions == len(set(journal.freed)), journal
    assert set(journal.threads) == {{threading.get_ident()}}
    assert journal.faults == []
    """)


def test_python_frees_what_deleters_in_several_threads_gave_back():
    backend = Pages()
    journal = backend.journal
    pool = zcpool.Pool(backend)
    consumed = [[Consumed(pool.acquire(MIB).__dlpack__()) for _ in range(20)] for _ in range(4)]
    del pool
    threads = [threading.Thread(target=lambda part: [c.delete() for c in part], args=(part,)) for part in consumed]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert eventually(lambda: journal.live == {})
    assert sorted(journal.freed) == list(range(80))
    assert journal.faults == []
    ref = weakref.ref(backend)
    del backend
    assert eventually(lambda: ref() is None)


# ---- copies --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_a_copy_is_made_when_asked_for_and_counted(pool, version):
    b = pool.acquire(1000)
    b.array(1000)[:] = np.arange(1000) % 251
    before = zcpool.copies()
    capsule = b.__dlpack__(max_version=version, copy=True)
    after = zcpool.copies()
    assert (after.bytes - before.bytes, after.count - before.count) == (1000, 1)
    assert any("DLPack" in reason for reason in after.reasons)
    t = look(capsule).tensor
    assert t.data != b.address
    assert ctypes.string_at(t.data, 1000) == bytes(b)


def test_a_copy_says_that_it_is_one(pool):
    capsule = pool.acquire(1000).__dlpack__(max_version=(1, 0), copy=True)
    assert look(capsule).flags == IS_COPIED


def test_a_copy_is_memory_of_its_own(pool):
    b = pool.acquire(1000)
    b.array(1000)[:] = 1
    consumed = Consumed(b.__dlpack__(copy=True))
    assert held(pool) == 2
    b.array(1000)[:] = 2
    b.release(strict=True)
    assert ctypes.string_at(consumed.managed.tensor.data, 1000) == b"\1" * 1000
    consumed.delete()
    assert held(pool) == 0


@pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) < "2.1.0", reason="older numpys have no copy=")
def test_numpy_gets_a_copy_when_it_asks_for_one(pool):
    b = pool.acquire(1000)
    before = zcpool.copies().count
    a = np.from_dlpack(b, copy=True)
    assert a.ctypes.data != b.address
    assert zcpool.copies().count == before + 1


@pytest.mark.parametrize("copy", [None, False])
def test_no_copy_is_made_unless_asked_for(pool, copy):
    b = pool.acquire(1000)
    with zcpool.require_zero_copy():
        assert look(b.__dlpack__(copy=copy)).tensor.data == b.address


def test_a_forbidden_copy_raises_and_changes_nothing(pool):
    b = pool.acquire(1000)
    books, copies = pool.stats(), zcpool.copies()
    with zcpool.require_zero_copy(), pytest.raises(zcpool.PoolError, match=r"1000 bytes.*require_zero_copy"):
        b.__dlpack__(copy=True)
    assert pool.stats() == books
    assert zcpool.copies() == copies
    b.release(strict=True)


def test_a_copy_the_pool_has_no_memory_for_is_not_counted():
    with zcpool.Pool(max_bytes=MIB) as pool, pool.acquire(MIB) as b:
        before = zcpool.copies()
        with pytest.raises(zcpool.OutOfMemory):
            b.__dlpack__(copy=True)
        assert zcpool.copies() == before, "nothing was copied"
        b.release(strict=True)


def test_an_empty_buffer_can_be_copied(pool):
    capsule = pool.acquire(0).__dlpack__(copy=True)
    assert look(capsule).tensor.shape[0] == 0


# ---- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [(2, 0), (1, 1), [2, 0], (1, 0, 0), ()])
def test_another_device_is_a_buffer_error(pool, device):
    b = pool.acquire(100)
    with pytest.raises(BufferError, match="CPU"):
        b.__dlpack__(dl_device=device)
    b.release(strict=True)


def test_the_cpu_may_be_asked_for(pool):
    b = pool.acquire(100)
    assert look(b.__dlpack__(dl_device=CPU)).tensor.data == b.address


@pytest.mark.parametrize("stream", [0, 1, -1, object()])
def test_a_stream_is_a_buffer_error(pool, stream):
    b = pool.acquire(100)
    with pytest.raises(BufferError, match="stream"):
        b.__dlpack__(stream=stream)
    b.release(strict=True)


@pytest.mark.parametrize("arguments", [{"dl_device": 5}, {"max_version": 1}, {"max_version": "1"}])
def test_arguments_of_the_wrong_type_leave_no_export(pool, arguments):
    b = pool.acquire(100)
    with pytest.raises(TypeError):
        b.__dlpack__(**arguments)
    b.release(strict=True)


@pytest.mark.parametrize("arguments", [{}, {"max_version": (1, 0)}, {"copy": True}])
def test_a_released_buffer_gives_no_capsule(pool, arguments):
    b = pool.acquire(100)
    b.release()
    before = zcpool.copies()
    with pytest.raises(BufferError, match="released"):
        b.__dlpack__(**arguments)
    assert zcpool.copies() == before
