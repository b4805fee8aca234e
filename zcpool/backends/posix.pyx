"""Host memory from posix_memalign, with optional transparent huge pages."""

from libc.errno cimport ENOMEM
from libc.stdint cimport uint64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport free
from libc.string cimport strerror

from zcpool._backend cimport Backend, Fault
from zcpool._block cimport Region

__all__ = ["PosixBackend"]

cdef extern from "<stdlib.h>" nogil:
    int posix_memalign(void** memory, size_t alignment, size_t nbytes) noexcept

cdef extern from * nogil:
    """
    #include <sys/mman.h>
    #if defined(__linux__) && defined(MADV_HUGEPAGE)
    static int zc_advise_huge(void *p, size_t n) { return madvise(p, n, MADV_HUGEPAGE); }
    #else
    static int zc_advise_huge(void *p, size_t n) { (void)p; (void)n; return -1; }
    #endif
    """
    int advise_huge "zc_advise_huge"(void* data, size_t nbytes) noexcept

cdef enum:
    PAGE = 4096
    HUGE_PAGE = 2 << 20     # bytes, on x86-64 and on aarch64 with 4 KiB pages


cdef class PosixBackend(Backend):
    """Memory of the host's C library.

    Parameters
    ----------
    huge_pages : bool, default False
        Align regions of 2 MiB and more to 2 MiB and ask the kernel for transparent huge pages there
        (``madvise(MADV_HUGEPAGE)``; a kernel without them serves ordinary pages). Fewer TLB misses on large
        tensors, coarser resident memory.

    Notes
    -----
    Regions are page aligned. A forked child sees its own copy of the parent's buffers.
    """

    cdef readonly bint huge_pages

    def __cinit__(self, *, huge_pages=False):
        self.name = "posix"
        self.alignment = PAGE
        self.max_alignment = HUGE_PAGE
        self.survives_fork = True
        self.huge_pages = bool(huge_pages)

    cdef int allocate_region(self, Region* region, uint64_t nbytes, uint64_t alignment, Fault* fault) noexcept nogil:
        cdef int error
        cdef bint huge = self.huge_pages and nbytes >= HUGE_PAGE
        if alignment < PAGE:
            alignment = PAGE
        if huge and alignment < HUGE_PAGE:
            alignment = HUGE_PAGE
        error = posix_memalign(&region.data, alignment, nbytes)
        if error:
            fault.call = "posix_memalign"
            fault.code = error
            fault.no_memory = error == ENOMEM
            snprintf(fault.meaning, sizeof(fault.meaning), "%s (%llu bytes, alignment %llu)", strerror(error),
                     <unsigned long long>nbytes, <unsigned long long>alignment)
            return -1
        if huge:
            advise_huge(region.data, nbytes)    # advice: a refusal leaves ordinary pages
        region.nbytes = nbytes
        region.fd = -1
        region.cookie = NULL
        return 0

    cdef void free_region(self, Region* region) noexcept nogil:
        free(region.data)
