# Backend, the class to subclass, and the function table through which the core calls it.
#
# The core holds a void* and thunks, so that no reference count is touched without the GIL. A subclass
# overrides the nogil methods; they run with no lock of the core held, on any thread, several at a time.
from libc.stdint cimport uint64_t, uintptr_t

from zcpool._block cimport Region


cdef enum:
    TO_DEVICE = 1
    FROM_DEVICE = 2


cdef struct Fault:
    # Why a backend call failed. Errors travel by value: there may be no GIL to raise with.
    const char* call        # the vendor's name of the function
    int code                # what it returned, or errno
    bint no_memory          # more of the same may succeed later: worked against, then OutOfMemory
    bint final              # an interrupt: do not even try again
    char meaning[192]
    void* error             # a Python exception that was raised meanwhile (owned), or NULL


cdef struct BackendOps:
    # 0 or -1 with the fault filled in.
    int (*allocate)(void* backend, Region* region, uint64_t nbytes, uint64_t alignment, Fault* fault) noexcept nogil
    void (*free)(void* backend, Region* region) noexcept nogil
    int (*sync)(void* backend, Region* region, uint64_t offset, uint64_t nbytes, int direction,
                Fault* fault) noexcept nogil


cdef class Backend:
    cdef object __weakref__
    cdef readonly str name
    cdef readonly uint64_t granularity      # bytes; a power of two
    cdef readonly uint64_t alignment        # bytes; what every region is aligned to at least
    cdef readonly uint64_t max_alignment    # bytes; the most allocate() can be asked for
    cdef readonly uint64_t largest_region   # bytes
    cdef readonly bint cpu_visible          # the CPU reads and writes region.data without mapping it first
    cdef readonly bint survives_fork        # a child sees its own copy (or the same) of the parent's memory
    cdef readonly bint needs_sync           # sync() does something
    cdef readonly bint python               # the methods are Python: they need the GIL

    cdef int allocate_region(self, Region* region, uint64_t nbytes, uint64_t alignment, Fault* fault) noexcept nogil
    cdef void free_region(self, Region* region) noexcept nogil
    cdef int sync_region(self, Region* region, uint64_t offset, uint64_t nbytes, int direction,
                         Fault* fault) noexcept nogil
    cdef object make_handle(self, Region* region, uint64_t offset, uint64_t nbytes)
    cdef void fill_ops(self, BackendOps* ops) noexcept


cdef class PythonBackend(Backend):
    pass


cdef class Handle:
    cdef object __weakref__
    cdef readonly object owner              # the Buffer (or whatever keeps the memory alive)
    cdef readonly uintptr_t pointer
    cdef readonly object fd
    cdef readonly uint64_t offset
    cdef readonly uint64_t nbytes


cdef object fault_error(Fault* fault)
