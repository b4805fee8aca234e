"""Buffers: what a pool hands out."""

cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from cpython.exc cimport PyErr_SetFromErrno
from cpython.object cimport PyObject
from libc.stdint cimport uint64_t, uintptr_t
from libc.stdlib cimport free
from libc.string cimport memcpy, memset

from zcpool._atomics cimport add32, add64, claim, fd_check, fd_dup, is_finalizing, likely, load32, load64, sub32, \
    sub64, unlikely
from zcpool._backend cimport FROM_DEVICE, TO_DEVICE, Backend, Fault, Handle, fault_error
from zcpool._block cimport FOREIGN, VISIBLE, block_ref, block_unref, word_refs, word_state
from zcpool._dlpack cimport dlpack_capsule
from zcpool._fence cimport Fence, FenceNode, close, fence_attach, fence_node

import warnings

from zcpool._units import format_bytes
from zcpool._views import array_layout
from zcpool.copies import check_copy, count_copy

__all__ = ["Buffer", "Mapping", "Pin"]

cdef extern from *:
    """
    static char zc_empty[64] __attribute__((aligned(64)));      /* what an empty buffer points at */
    """
    char* EMPTY "zc_empty"

cdef str DLPACK_COPY = "DLPack export with copy=True"
cdef tuple BUCKETS = ("small", "medium", "large", "huge")


@cython.final
@cython.no_gc_clear             # destructors use _pool, also inside a cycle that is being collected
cdef class Buffer:
    """A block of a pool's memory.

    Buffers come from `Pool.acquire`. They export the buffer protocol (``memoryview(buf)``) and DLPack, and
    give numpy views with `array`. Dropping the last reference releases the block; `release` and ``with`` do it
    earlier.

    Notes
    -----
    `release` means "I am done": the buffer is closed at once, and its block goes home when the last view,
    pin and fence over it is gone. Views so stay valid however long they live.

    A buffer may be used and released from any thread. Two threads must not write to one buffer at a time any
    more than to one array.
    """

    def __init__(self):
        raise TypeError("buffers come from Pool.acquire(nbytes)")

    def __dealloc__(self):
        Buffer_close(<PyObject*>self)

    @cython.always_allow_keywords(False)    # no arguments to take apart
    def __enter__(self):
        if unlikely(not load32(&self._open)):
            Buffer_check(self)
        return self

    def __exit__(self, kind, error, traceback, /):
        Buffer_close(<PyObject*>self)

    def __len__(self):
        return self._nbytes

    def __repr__(self):
        return Buffer_repr(self)

    def __getbuffer__(self, Py_buffer* view, int flags):
        Buffer_check_visible(self)
        if self._block != NULL:
            Buffer_ref(self)
        try:
            PyBuffer_FillInfo(view, self, Buffer_data(self), <Py_ssize_t>self._nbytes, 0, flags)
        except BaseException:
            if self._block != NULL:
                block_unref(self._block)
            raise

    def __releasebuffer__(self, Py_buffer* view):
        if self._block != NULL:
            block_unref(self._block)

    def __array__(self, dtype=None, copy=None):
        # numpy asks here when the buffer protocol has refused: without an answer it makes an array of objects.
        return self.array(self._nbytes)

    def __dlpack_device__(self):
        """Return the DLPack device, ``(1, 0)``: the CPU."""
        return (1, 0)

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        """Export the bytes as a one-dimensional uint8 DLPack tensor.

        Parameters
        ----------
        stream : None
            There are no streams on the CPU.
        max_version : tuple of (int, int), optional
            The newest version the consumer knows; a versioned capsule from ``(1, 0)`` on.
        dl_device : tuple of (int, int), optional
            Only ``(1, 0)`` is possible.
        copy : bool, optional
            True makes a counted copy in a buffer of the same pool.

        Returns
        -------
        PyCapsule
            Named ``"dltensor_versioned"`` or ``"dltensor"``. It keeps the block, not this object.

        Raises
        ------
        BufferError
            For another device, a stream, a released buffer, or memory the CPU does not see.
        """
        if stream is not None:
            raise BufferError(f"CPU memory has no streams: stream must be None, not {stream!r}")
        if dl_device is not None and tuple(dl_device) != (1, 0):
            raise BufferError(f"this memory is on the CPU, device (1, 0), and not on {tuple(dl_device)!r}")
        Buffer_check_visible(self)
        cdef Buffer source = Buffer_copy(self) if copy else self
        return dlpack_capsule(source._block, source._owner, source._nbytes,
                              max_version is not None and tuple(max_version) >= (1,), source is not self)

    def array(self, shape, dtype="uint8", *, offset=0, strides=None):
        """Return a numpy array over the memory, without copying.

        Parameters
        ----------
        shape : int or sequence of int
        dtype : dtype_like, default uint8
        offset : int, default 0
            Bytes from the start of the buffer.
        strides : sequence of int, optional
            Bytes between elements along each axis; C order by default.

        Returns
        -------
        numpy.ndarray
            Writable. It keeps the block, also after `release`.

        Raises
        ------
        ValueError
            When the array would not lie inside the buffer, or holds Python objects.
        BufferError
            When the buffer was released, or the CPU does not see the memory.
        """
        return Buffer_array(self, array_layout(shape, dtype, offset, strides))

    def map(self, mode="rw"):
        """Return a context manager that gives a view the CPU may use, with whatever cache upkeep that takes.

        Parameters
        ----------
        mode : {"r", "w", "rw"}
            ``"r"``: the device's writes are made visible on entry, and the view is read-only. ``"w"``: the
            CPU's writes are made visible to the device on exit.

        Returns
        -------
        Mapping
            ``with buf.map("w") as view: view[:] = ...``; ``view`` is a memoryview of bytes. On coherent memory
            it costs no more than a memoryview.
        """
        if mode not in ("r", "w", "rw"):
            raise ValueError(f'mode must be "r", "w" or "rw", not {mode!r}')
        Buffer_check_visible(self)
        cdef Mapping mapping = Mapping.__new__(Mapping)
        mapping._buffer = self
        mapping._mode = mode
        return mapping

    def sync(self, direction):
        """Make writes visible without a view.

        Parameters
        ----------
        direction : {"to_device", "from_device"}
            After the CPU wrote and before the device reads; after the device wrote and before the CPU reads.

        Raises
        ------
        BackendError
            When the backend's call fails.
        """
        if direction not in ("to_device", "from_device"):
            raise ValueError(f'direction must be "to_device" or "from_device", not {direction!r}')
        Buffer_check(self)
        Buffer_sync(self, TO_DEVICE if direction == "to_device" else FROM_DEVICE)

    def pin(self):
        """Promise that a device is using the memory, until the pin is released.

        Returns
        -------
        Pin
            A context manager; outside ``with``, call its ``release()``. The block does not go home while it is
            pinned, whatever happens to the buffer.
        """
        Buffer_check(self)
        cdef Pin pin = Pin.__new__(Pin)
        if self._block != NULL:
            Buffer_ref(self)
            add64(&self._block.core.pins, 1)
        pin._buffer = self
        pin._held = 1
        add32(&self._pins, 1)
        return pin

    def handle(self):
        """Return what the backend's runtime wants instead of a pointer.

        Returns
        -------
        Handle
            With ``pointer``, ``fd``, ``offset`` and ``nbytes`` (bytes), and what only this backend has. It
            keeps this buffer object, not the block: do not use it after `release`.
        """
        Buffer_check(self)
        return Buffer_handle(self)

    def release(self, after=None, *, bint strict=False):
        """Give the memory back to the pool. Calling it again does nothing.

        Parameters
        ----------
        after : int, object with fileno(), Future, or Fence, optional
            What must be signalled before the block is used again. An ``int`` is an fd that becomes readable,
            which the pool takes over and closes; the fd of an object is duplicated; a Future
            (``add_done_callback``) counts as signalled however it ends. On a buffer that was released already it is
            ignored, and an fd stays the caller's.
        strict : bool, default False
            Raise instead of waiting when views, pins or DLPack tensors live.

        Raises
        ------
        BufferError
            With ``strict``, when references live. Nothing has happened then.
        ValueError
            When the fd is not open, or is that of a regular file. Nothing has happened then.
        TypeError
            When `after` is none of the above.
        """
        if strict and self._open:
            Buffer_check_unused(self)
        if after is not None and self._open:
            Buffer_wait_for(self, after)
        Buffer_close(<PyObject*>self)

    @property
    def nbytes(self):
        """Bytes asked for."""
        return self._nbytes

    @property
    def capacity(self):
        """Bytes granted: the size class. The buffer protocol shows `nbytes` of them."""
        return self._block.capacity if self._block != NULL and self._open else 0

    @property
    def address(self):
        """Address for the CPU; 0 where it does not see the memory. Raises BufferError after release."""
        Buffer_check(self)
        return <uintptr_t>Buffer_data(self) if Buffer_visible(self) else 0

    @property
    def bucket(self):
        """The bucket of the capacity: "small", "medium", "large" or "huge"."""
        Buffer_check(self)
        return BUCKETS[self._block.bucket] if self._block != NULL else "small"

    @property
    def fd(self):
        """The fd of the region, owned by the backend, or None where regions have none."""
        Buffer_check(self)
        return self._block.region.fd if self._block != NULL and self._block.region.fd >= 0 else None

    @property
    def offset(self):
        """Where the block lies in its region, bytes."""
        Buffer_check(self)
        return Buffer_offset(self)

    @property
    def pool(self):
        """The pool it came from."""
        return self._pool

    @property
    def released(self):
        """Whether `release` has been called."""
        return self._open == 0


@cython.final
cdef class Pin:
    """A promise that a device is using a buffer. See `Buffer.pin`.

    A pin that is dropped without having been released stays: the device may still be at it. A
    ``ResourceWarning`` says so.
    """

    def __init__(self):
        raise TypeError("pins come from Buffer.pin()")

    def __reduce__(self):
        raise TypeError("a pin cannot be copied or pickled")

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback, /):
        self.release()

    def __del__(self):
        if self._held and not is_finalizing():
            warnings.warn(f"{self!r} was dropped without release(): its block stays pinned", ResourceWarning,
                          stacklevel=1, source=self)   # Cython has no frame: 1 is who dropped it

    def __repr__(self):
        return f"<zcpool.Pin {'held' if self._held else 'released'} on {self._buffer!r}>"

    def release(self):
        """End the promise. Calling it again does nothing."""
        if claim(&self._held):
            sub32(&self._buffer._pins, 1)
            if self._buffer._block != NULL:
                if not word_state(load64(&self._buffer._block.word)) & FOREIGN:
                    sub64(&self._buffer._block.core.pins, 1)    # a child counts its own pins only
                block_unref(self._buffer._block)


@cython.final
cdef class Mapping:
    """A view of a buffer for the time of a ``with`` block. See `Buffer.map`."""

    def __init__(self):
        raise TypeError("mappings come from Buffer.map(mode)")

    def __repr__(self):
        return f"<zcpool.Mapping {self._mode!r} of {self._buffer!r}>"

    def __reduce__(self):
        raise TypeError("a mapping cannot be copied or pickled")

    def __enter__(self):
        if self._buffer is None or self._view is not None:
            raise ValueError("this mapping is in use: call map() again for another view")
        Buffer_check_visible(self._buffer)
        if "r" in self._mode:
            Buffer_sync(self._buffer, FROM_DEVICE)
        self._view = memoryview(self._buffer)
        if self._mode == "r":
            self._view = self._view.toreadonly()
        return self._view

    def __exit__(self, kind, error, traceback, /):
        if self._view is None:
            raise ValueError("this mapping was not entered")
        view, self._view = self._view, None
        try:
            if "w" in self._mode:
                Buffer_sync(self._buffer, TO_DEVICE)
        finally:
            Mapping_end(view)


cdef int Mapping_end(view) except -1:
    try:
        view.release()
    except BufferError:
        pass        # an array was made of the view: it keeps the block, as any view does
    return 0


# ---- checks ------------------------------------------------------------------------------------------------

cdef inline int Buffer_check(Buffer self) except -1:
    if unlikely(not load32(&self._open)):
        raise BufferError("the buffer was released: use it before release(), or keep a view of it")
    if (self._block != NULL and unlikely(word_state(load64(&self._block.word)) & FOREIGN)
            and not (<Backend>self._block.core.backend).survives_fork):
        raise BufferError("the buffer belongs to the parent process, and its memory is not inherited through fork: "
                          "acquire a new one in the child")
    return 0

cdef inline int Buffer_check_visible(Buffer self) except -1:
    Buffer_check(self)
    if unlikely(not Buffer_visible(self)):
        raise BufferError("the CPU does not see this memory: hand the handle() to the device")
    return 0

cdef int Buffer_check_unused(Buffer self) except -1:
    cdef uint64_t refs = Buffer_refs(self)
    cdef uint64_t pins = load32(&self._pins)
    if refs:
        raise BufferError(f"{refs - pins} view(s) and {pins} pin(s) of the buffer live: drop them first, or release "
                          "without strict=True and the block goes home with the last of them")
    return 0

cdef inline int Buffer_ref(Buffer self) except -1:
    if unlikely(not block_ref(self._block, self._owner)):
        raise BufferError("the buffer was released, or a million views of it live")
    return 0


# ---- access ------------------------------------------------------------------------------------------------

cdef inline void* Buffer_data(Buffer self) noexcept:
    return self._block.data if self._block != NULL else EMPTY

cdef inline bint Buffer_visible(Buffer self) noexcept:
    return self._block == NULL or load32(&self._block.core.flags) & VISIBLE

cdef inline uint64_t Buffer_refs(Buffer self) noexcept:
    return word_refs(load64(&self._block.word)) if self._block != NULL else 0

cdef inline uint64_t Buffer_offset(Buffer self) noexcept nogil:
    if self._block == NULL:
        return 0
    return <uint64_t>(<uintptr_t>self._block.data - <uintptr_t>self._block.region.data)

cdef object Buffer_array(Buffer self, layout):
    import numpy
    layout.check(self._nbytes)
    if self._nbytes == 0 or 0 in layout.shape:
        Buffer_check_visible(self)
        return numpy.empty(layout.shape, layout.dtype)
    # frombuffer holds a memoryview, and so an export; ndarray(buffer=) alone would let go of it at once.
    whole = numpy.frombuffer(self, numpy.uint8)
    return numpy.ndarray(layout.shape, layout.dtype, whole, layout.offset, layout.strides)

cdef object Buffer_handle(Buffer self):
    cdef Backend backend
    cdef Handle handle
    if self._block == NULL:
        raise ValueError("an empty buffer has no handle")
    backend = <Backend>self._block.core.backend
    handle = backend.make_handle(self._block.region, Buffer_offset(self), self._block.capacity)
    handle.owner = self
    return handle

cdef int Buffer_sync(Buffer self, int direction) except -1:
    """Sync a block that this buffer, or a view of it, still keeps; nothing to do for one that went home."""
    cdef Fault fault
    cdef Backend backend
    cdef int failed
    if self._block == NULL:
        return 0
    backend = <Backend>self._block.core.backend
    if not backend.needs_sync:
        return 0
    if word_state(load64(&self._block.word)) & FOREIGN and not backend.survives_fork:
        return 0        # a map that the parent left open
    if not block_ref(self._block, self._owner):
        return 0
    memset(&fault, 0, sizeof(fault))
    with nogil:
        failed = backend.sync_region(self._block.region, Buffer_offset(self), self._nbytes, direction, &fault)
        block_unref(self._block)
    if failed:
        raise fault_error(&fault)
    return 0

cdef Buffer Buffer_copy(Buffer self):
    """Return a counted copy. The source is held: acquiring may run anybody's code, also such as releases it."""
    cdef Buffer copy
    check_copy(self._nbytes, DLPACK_COPY)
    if self._block == NULL:
        return self
    Buffer_ref(self)
    try:
        copy = self._pool.acquire(self._nbytes)
        count_copy(self._nbytes, DLPACK_COPY)
        memcpy(Buffer_data(copy), Buffer_data(self), self._nbytes)
    finally:
        block_unref(self._block)
    return copy


# ---- release -----------------------------------------------------------------------------------------------

cdef inline void Buffer_close(PyObject* self) noexcept:
    """End the ownership, once. Never fails, waits or allocates; also inside garbage collection."""
    cdef Block* b = (<Buffer>self)._block
    if claim(&(<Buffer>self)._open) and likely(b != NULL):
        b.core.release(b.core, b)

cdef int Buffer_wait_for(Buffer self, after) except -1:
    """Give the block a fence's reference. Raises with nothing changed."""
    cdef Fence fence
    if isinstance(after, int) and not isinstance(after, bool):
        return Buffer_wait_for_fd(self, after, False)
    if isinstance(after, Fence):
        return Buffer_wait_for_fence(self, after)
    if hasattr(after, "add_done_callback"):
        fence = Fence()
        Buffer_wait_for_fence(self, fence)
        try:
            after.add_done_callback(lambda _: fence.set())
        except BaseException:
            fence.set()
            raise
        return 0
    if hasattr(after, "fileno"):
        return Buffer_wait_for_fd(self, after.fileno(), True)
    raise TypeError("after must be an fd, an object with fileno(), a Future or a zcpool.Fence, "
                    f"not {type(after).__name__}")

cdef int Buffer_wait_for_fence(Buffer self, Fence fence) except -1:
    cdef FenceNode* node
    if self._block == NULL:
        return 0
    node = fence_node(self._block, -1)
    if node == NULL:
        raise MemoryError("no memory to note the fence; nothing has been released")
    try:
        Buffer_ref(self)
    except BaseException:
        free(node)
        raise
    if not fence_attach(&fence._waiting, node):
        free(node)                      # set already: nothing to wait for
        block_unref(self._block)
    return 0

cdef int Buffer_wait_for_fd(Buffer self, fd, bint duplicate) except -1:
    cdef int number = fd if -1 <= fd < (1 << 31) else -1
    cdef int wrong = fd_check(number)
    cdef FenceNode* node
    if wrong == 1:
        raise ValueError(f"the fence fd {fd} is not open; nothing has been released")
    if wrong == 2:
        raise ValueError(f"the fence fd {fd} is a regular file or a directory, which is always readable: it signals "
                         "nothing. Pass a sync_file, an eventfd or a pipe; nothing has been released")
    if self._block == NULL:
        if not duplicate:
            close(number)               # taken over, with nothing to wait
        return 0
    if duplicate:
        number = fd_dup(number)
        if number < 0:
            PyErr_SetFromErrno(OSError)
    node = fence_node(self._block, number)
    try:
        if node == NULL:
            raise MemoryError("no memory to note the fence; nothing has been released")
        Buffer_ref(self)
    except BaseException:
        free(node)
        if duplicate:
            close(number)
        raise
    self._block.core.wait_for(self._block.core, node)
    return 0

cdef object Buffer_repr(Buffer self):
    cdef uint64_t refs, pins
    if self._block == NULL or not self._open:
        return f"<zcpool.Buffer {format_bytes(self._nbytes)}, {'empty' if self._open else 'released'}>"
    refs = Buffer_refs(self)
    pins = load32(&self._pins)
    parts = [f"{format_bytes(self._nbytes)} at {<uintptr_t>self._block.data:#x}",
             f"{BUCKETS[self._block.bucket]}, capacity {format_bytes(self._block.capacity)}"]
    if refs > pins:
        parts.append(f"{refs - pins} view(s)")
    if pins:
        parts.append(f"{pins} pin(s)")
    if word_state(load64(&self._block.word)) & FOREIGN:
        parts.append("inherited through fork")
    return f"<zcpool.Buffer {', '.join(parts)}, of pool {self._pool.name!r}>"


# ---- what Cython would make, for less ----------------------------------------------------------------------
#
# A pool's hit is made of little else than the birth and death of a Buffer, and the calls of four methods. The code
# that Cython makes for these calls the interpreter to save an exception, to take arguments apart, and to clear.

cdef extern from "_object.h":
    ctypedef void (*destructor)(PyObject* o) noexcept
    destructor dealloc_replace "zc_dealloc_replace" (object kind, destructor function) noexcept
    void object_leave "zc_object_leave" (PyObject* o) noexcept
    Buffer object_revive "zc_object_revive" (PyObject* o, object kind) noexcept
    void* method_replace "zc_method_replace" (object kind, const char* name, void* function) noexcept

cdef enum:
    SPARES = 64

cdef PyObject* spares[SPARES]       # dead buffers, for the next life; guarded by the GIL, empty where there is none
cdef int n_spares = 0

cdef Buffer Buffer_new():
    global n_spares
    if unlikely(n_spares == 0):
        return Buffer.__new__(Buffer)
    n_spares -= 1
    return object_revive(spares[n_spares], Buffer)

cdef destructor dealloc_any         # the one that Cython made

cdef void Buffer_dealloc(PyObject* self) noexcept:
    """Release the block. Until the pool is dropped, nothing here runs Python code or touches an exception."""
    global n_spares
    object_leave(self)
    Buffer_close(self)
    (<Buffer>self)._block = NULL
    (<Buffer>self)._pins = 0
    (<Buffer>self)._pool = None
    if likely(n_spares < SPARES):
        spares[n_spares] = self
        n_spares += 1
    else:
        dealloc_any(self)

dealloc_any = dealloc_replace(Buffer, Buffer_dealloc)

ctypedef object (*method)(object self, PyObject** args, Py_ssize_t n_args, PyObject* keywords)

cdef method exit_any, release_any           # the doors that Cython made

cdef object exit_plain(object self, PyObject** args, Py_ssize_t n_args, PyObject* keywords):
    if unlikely(n_args != 3 or keywords != NULL):
        return exit_any(self, args, n_args, keywords)
    Buffer_close(<PyObject*>self)
    return None

cdef object release_plain(object self, PyObject** args, Py_ssize_t n_args, PyObject* keywords):
    if unlikely(n_args != 0 or keywords != NULL):
        return release_any(self, args, n_args, keywords)
    Buffer_close(<PyObject*>self)
    return None

exit_any = <method>method_replace(Buffer, "__exit__", <void*>exit_plain)
release_any = <method>method_replace(Buffer, "release", <void*>release_plain)
