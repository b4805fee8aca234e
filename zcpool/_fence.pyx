"""Fences that the host signals."""

from cpython.exc cimport PyErr_CheckSignals, PyErr_SetFromErrno
from libc.stdint cimport int64_t, uint32_t, uintptr_t
from libc.stdlib cimport free

from zcpool._atomics cimport cas32, futex_wait, futex_wake_all, is_finalizing, load32_seq, loadptr_acquire, now_ns, \
    store32_release
from zcpool._fence cimport SIGNALLED, FenceNode, close, fence_signal

import warnings

__all__ = ["Fence"]

cdef extern from *:
    """
    #include <unistd.h>
    #if defined(__linux__)
    #include <sys/eventfd.h>
    static int zc_event_new(void) { return eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); }
    #else
    #include <errno.h>
    static int zc_event_new(void) { errno = ENOSYS; return -1; }
    #endif
    static void zc_event_set(int fd)
    {
        const unsigned long long one = 1;
        if (write(fd, &one, sizeof one) < 0) {
            /* EAGAIN: already readable, which is all that is wanted. */
        }
    }
    """
    int getpid() noexcept nogil
    int event_new "zc_event_new"() noexcept nogil
    void event_set "zc_event_set"(int fd) noexcept nogil


cdef class Fence:
    """A one-shot event that retired blocks can wait for.

    ``buf.release(after=fence)`` closes the buffer at once and lets its block go home when `set` is called,
    from any thread. A fence that is dropped without having been set never lets its blocks go: somebody might
    still be using them (a ``ResourceWarning`` says so).

    Examples
    --------
    >>> import zcpool
    >>> fence = zcpool.Fence()
    >>> fence.is_set()
    False
    >>> fence.set()
    >>> fence
    <zcpool.Fence set>
    """

    def __dealloc__(self):
        cdef FenceNode* node = <FenceNode*>loadptr_acquire(&self._waiting)
        cdef FenceNode* next
        cdef int lost = 0
        if <uintptr_t>node != SIGNALLED:
            while node != NULL:
                next = node.next
                free(node)
                node = next
                lost += 1
        if self._fd:
            close(<int>self._fd - 1)
        if lost and not is_finalizing():
            warn_lost(lost)     # made an error by a filter, it is reported as unraisable

    def __reduce__(self):
        raise TypeError("a fence cannot be copied or pickled")

    def __repr__(self):
        if self.is_set():
            return "<zcpool.Fence set>"
        return "<zcpool.Fence not set>"

    def set(self):
        """Signal the fence: whatever waits for it may go on. Calling it again does nothing."""
        with nogil:
            fence_signal(&self._waiting)
            store32_release(&self._turn, 1)
            futex_wake_all(&self._turn)
            if load32_seq(&self._fd) and self._pid == getpid():
                event_set(<int>load32_seq(&self._fd) - 1)

    def is_set(self):
        """Return whether `set` has been called."""
        return loadptr_acquire(&self._waiting) == SIGNALLED

    def wait(self, timeout=None):
        """Wait until the fence is set.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait at most; for ever by default. Other threads run meanwhile.

        Returns
        -------
        bool
            Whether the fence is set.
        """
        cdef int64_t deadline = -1
        cdef int64_t left = -1
        if timeout is not None:
            seconds = float(timeout)
            if seconds != seconds:
                raise ValueError("timeout must be a number of seconds or None, not nan")
            deadline = now_ns() + <int64_t>(max(0.0, min(seconds, 1e9)) * 1e9)
        while not load32_seq(&self._turn):
            if deadline >= 0:
                left = deadline - now_ns()
                if left <= 0:
                    break
            with nogil:
                # Signals interrupt a futex; some arrive just before it, so look at least twice a second.
                futex_wait(&self._turn, 0, left if 0 <= left < 500_000_000 else 500_000_000)
            PyErr_CheckSignals()
        return self.is_set()

    def fileno(self):
        """Return an fd that becomes readable when the fence is set.

        The fence owns it and closes it; ``os.dup`` it to keep it. Linux only.
        """
        cdef uint32_t none = 0
        cdef int fd
        if load32_seq(&self._fd) and self._pid != getpid():
            close(<int>load32_seq(&self._fd) - 1)   # a forked child's copy of the parent's
            store32_release(&self._fd, 0)
        if not load32_seq(&self._fd):
            fd = event_new()
            if fd < 0:
                PyErr_SetFromErrno(OSError)
            self._pid = getpid()
            if not cas32(&self._fd, &none, <uint32_t>fd + 1):
                close(fd)
        fd = <int>load32_seq(&self._fd) - 1
        if self.is_set():
            event_set(fd)
        return fd


cdef int warn_lost(int blocks) except -1:
    warnings.warn(
        f"a Fence was dropped without having been set; {blocks} block(s) wait for it and stay retired",
        ResourceWarning, stacklevel=1)   # Cython has no frame: 1 is who dropped it
    return 0
