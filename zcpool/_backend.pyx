"""Backends: where regions of memory come from."""

cimport cython
from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.ref cimport Py_DECREF, Py_INCREF, PyObject
from libc.errno cimport EINVAL, ENOMEM
from libc.stdint cimport uint64_t, uintptr_t
from libc.stdlib cimport free, malloc

from zcpool._atomics cimport is_finalizing

from zcpool.errors import BackendError

__all__ = ["Backend", "Handle", "PythonBackend"]


cdef class Backend:
    """The base class of all backends.

    A Cython backend does ``from zcpool._backend cimport Backend``, subclasses it, sets the attributes in
    ``__cinit__`` or ``__init__`` and overrides the nogil methods ``allocate_region``, ``free_region`` and,
    where the memory is not coherent, ``sync_region``; ``make_handle`` gives users what the runtime wants.
    A backend written in plain Python subclasses `PythonBackend`.

    Attributes
    ----------
    name : str
        The name in messages and statistics.
    granularity : int
        Bytes; sizes and offsets of blocks are multiples of it. A power of two.
    alignment : int
        Bytes; every region is aligned to it at least. A power of two.
    max_alignment : int
        Bytes; the largest alignment that can be asked for.
    largest_region : int
        Bytes; the most one region may have.
    cpu_visible : bool
        The CPU sees the memory without mapping it first.
    survives_fork : bool
        A forked child may go on using the parent's buffers.
    needs_sync : bool
        The memory is not coherent: ``map`` and ``sync`` do something.
    """

    def __cinit__(self, *args, **kwargs):
        self.name = "backend"
        self.granularity = 64
        self.alignment = 64
        self.max_alignment = 64
        self.largest_region = <uint64_t>1 << 46
        self.cpu_visible = True
        self.survives_fork = False
        self.needs_sync = False
        self.python = False

    def __repr__(self):
        return f"<{type(self).__module__}.{type(self).__qualname__} {self.name!r}>"

    cdef int allocate_region(self, Region* region, uint64_t nbytes, uint64_t alignment, Fault* fault) noexcept nogil:
        fault.call = "allocate_region"
        fault.code = EINVAL
        return -1

    cdef void free_region(self, Region* region) noexcept nogil:
        pass

    cdef int sync_region(self, Region* region, uint64_t offset, uint64_t nbytes, int direction,
                         Fault* fault) noexcept nogil:
        return 0

    cdef object make_handle(self, Region* region, uint64_t offset, uint64_t nbytes):
        cdef Handle handle = Handle.__new__(Handle)
        handle.pointer = <uintptr_t>region.data + offset if region.data != NULL else 0
        handle.fd = region.fd if region.fd >= 0 else None
        handle.offset = offset
        handle.nbytes = nbytes
        return handle

    cdef void fill_ops(self, BackendOps* ops) noexcept:
        ops.allocate = <allocate_fn>call_allocate
        ops.free = <free_fn>call_free
        ops.sync = <sync_fn>call_sync


cdef class PythonBackend(Backend):
    """The base class of backends written in Python: for tests and experiments.

    A subclass calls ``super().__init__(...)`` and overrides `allocate` and perhaps `free` and `sync`. They run
    with the GIL and with no lock of the pool held; `free` runs when the pool is next used from Python, so it
    may do what it likes.

    Parameters
    ----------
    name : str, default the class's name
    granularity, alignment : int, default 64
        Bytes, powers of two. Pools use 64 at least.
    max_alignment : int, default `alignment`
        Bytes, a power of two.
    largest_region : int, optional
        Bytes.
    survives_fork, needs_sync : bool, default False

    Examples
    --------
    >>> import mmap, zcpool
    >>> class Pages(zcpool.PythonBackend):
    ...     def allocate(self, nbytes, alignment):
    ...         return mmap.mmap(-1, nbytes)
    >>> pool = zcpool.Pool(Pages(alignment=mmap.PAGESIZE))
    """

    def __init__(self, name=None, *, granularity=64, alignment=64, max_alignment=None, largest_region=None,
                 survives_fork=False, needs_sync=False):
        for what, value in (("granularity", granularity), ("alignment", alignment),
                            ("max_alignment", alignment if max_alignment is None else max_alignment)):
            if value < 1 or value & (value - 1):
                raise ValueError(f"{what} must be a power of two, not {value!r}")
        self.name = type(self).__name__ if name is None else name
        self.granularity = granularity
        self.alignment = alignment
        self.max_alignment = alignment if max_alignment is None else max_alignment
        if largest_region is not None:
            self.largest_region = largest_region
        self.survives_fork = survives_fork
        self.needs_sync = needs_sync
        self.python = True

    def allocate(self, nbytes, alignment):
        """Return a new region: a writable, contiguous object with the buffer protocol.

        Parameters
        ----------
        nbytes : int
            Bytes it must have at least.
        alignment : int
            Bytes its address must be a multiple of.

        Raises
        ------
        MemoryError
            When there is no more: the pool then works against it, and raises `OutOfMemory` in the end.
        Exception
            Anything else ends the acquire in `BackendError`, with this exception as its cause.
        """
        raise NotImplementedError(f"{type(self).__qualname__} must define allocate(nbytes, alignment)")

    def free(self, memory):
        """Give a region back.

        Parameters
        ----------
        memory : object
            What `allocate` returned; the pool holds no view of it any more.
        """

    def sync(self, memory, offset, nbytes, direction):
        """Make writes visible to the device (``"to_device"``) or to the CPU (``"from_device"``).

        Called only where `needs_sync` is set.
        """

    cdef int allocate_region(self, Region* region, uint64_t nbytes, uint64_t alignment, Fault* fault) noexcept nogil:
        with gil:
            try:
                PythonBackend_allocate(self, region, nbytes, alignment)
                return 0
            except BaseException as error:
                fault_set(fault, b"allocate", ENOMEM if isinstance(error, MemoryError) else 0,
                          isinstance(error, MemoryError), error)
                return -1

    @cython.unraisable_tracebacks(False)    # else Cython prints it, too, and a SystemExit ends the process
    cdef void free_region(self, Region* region) noexcept nogil:
        with gil:
            if is_finalizing():
                return      # modules are being torn down, and the process takes the memory back
            PythonBackend_free(self, region)    # an exception has nowhere to go: it is reported as unraisable

    cdef int sync_region(self, Region* region, uint64_t offset, uint64_t nbytes, int direction,
                         Fault* fault) noexcept nogil:
        with gil:
            try:
                self.sync(<object>(<PythonMemory*>region.cookie).memory, offset, nbytes,
                          "to_device" if direction == TO_DEVICE else "from_device")
                return 0
            except BaseException as error:
                fault_set(fault, b"sync", 0, False, error)
                return -1


cdef class Handle:
    """What a runtime wants instead of a pointer. A backend adds its own attributes in a subclass.

    Attributes
    ----------
    pointer : int
        The CPU address, 0 where there is none.
    fd : int or None
        The region's fd, owned by the backend: dup it to keep it.
    offset, nbytes : int
        Where the block lies in the region, bytes.
    owner : Buffer
        Keeps the buffer object, though not its block after `release`.
    """

    def __init__(self):
        raise TypeError("a Handle comes from Buffer.handle()")

    def __reduce__(self):
        raise TypeError("a handle cannot be copied or pickled")

    def __repr__(self):
        return (f"<{type(self).__module__}.{type(self).__qualname__} pointer={self.pointer:#x} fd={self.fd} "
                f"offset={self.offset} nbytes={self.nbytes}>")


# ---- from the core's function table to methods -----------------------------------------------------------

ctypedef int (*allocate_fn)(void*, Region*, uint64_t, uint64_t, Fault*) noexcept nogil
ctypedef void (*free_fn)(void*, Region*) noexcept nogil
ctypedef int (*sync_fn)(void*, Region*, uint64_t, uint64_t, int, Fault*) noexcept nogil

cdef int call_allocate(Backend backend, Region* region, uint64_t nbytes, uint64_t alignment,
                       Fault* fault) noexcept nogil:
    return backend.allocate_region(region, nbytes, alignment, fault)

cdef void call_free(Backend backend, Region* region) noexcept nogil:
    backend.free_region(region)

cdef int call_sync(Backend backend, Region* region, uint64_t offset, uint64_t nbytes, int direction,
                   Fault* fault) noexcept nogil:
    return backend.sync_region(region, offset, nbytes, direction, fault)


# ---- helpers -----------------------------------------------------------------------------------------------

cdef struct PythonMemory:
    Py_buffer view
    PyObject* memory            # what allocate() returned, owned


cdef int PythonBackend_allocate(PythonBackend self, Region* region, uint64_t nbytes, uint64_t alignment) except -1:
    cdef PythonMemory* kept = <PythonMemory*>malloc(sizeof(PythonMemory))
    if kept == NULL:
        raise MemoryError()
    try:
        memory = self.allocate(nbytes, alignment)
        PyObject_GetBuffer(memory, &kept.view, PyBUF_WRITABLE)
    except BaseException:
        free(kept)
        raise
    if <uint64_t>kept.view.len < nbytes or <uintptr_t>kept.view.buf & (alignment - 1):
        text = (f"allocate({nbytes}, {alignment}) returned {kept.view.len} bytes at {<uintptr_t>kept.view.buf:#x}: "
                "too few or misaligned")
        PyBuffer_Release(&kept.view)
        free(kept)
        raise ValueError(text)
    Py_INCREF(memory)
    kept.memory = <PyObject*>memory
    region.data = kept.view.buf
    region.nbytes = kept.view.len
    region.fd = -1
    region.cookie = kept
    return 0


cdef int PythonBackend_free(PythonBackend self, Region* region) except -1:
    cdef PythonMemory* kept = <PythonMemory*>region.cookie
    memory = <object>kept.memory
    Py_DECREF(memory)
    PyBuffer_Release(&kept.view)
    free(kept)
    region.cookie = NULL
    self.free(memory)
    return 0


cdef void fault_set(Fault* fault, const char* call, int code, bint no_memory, object error) noexcept:
    cdef object earlier
    if fault.error != NULL:
        earlier = <object><PyObject*>fault.error
        Py_DECREF(earlier)
    fault.call = call
    fault.code = code
    fault.no_memory = no_memory
    fault.final = not isinstance(error, Exception)
    fault.meaning[0] = 0
    Py_INCREF(error)
    fault.error = <PyObject*>error


cdef object fault_error(Fault* fault):
    """Return the BackendError of a fault, with the Python exception behind it as its cause."""
    cdef object cause = None
    if fault.error != NULL:
        cause = <object><PyObject*>fault.error
        Py_DECREF(cause)
        fault.error = NULL
    if cause is not None and not isinstance(cause, Exception):
        return cause    # KeyboardInterrupt and the like go through as they are
    meaning = fault.meaning.decode("utf-8", "replace") or (f"{type(cause).__name__}: {cause}" if cause else "")
    error = BackendError(fault.call.decode() if fault.call != NULL else "?", fault.code, meaning)
    error.__cause__ = cause
    return error
