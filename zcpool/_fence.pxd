# What a retired block waits for.
#
# An fd fence (sync_file, eventfd, pipe) is polled: it lies in its pool's FenceQueue, and the slow paths look
# at a bounded batch from the front, putting what has not signalled to the back, so that a stuck fence costs a
# constant and delays nobody. A Fence (and through it a Future) is pushed: it holds the blocks that wait for
# it and drops their references when it is set. Both hold one reference of the block.
from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc

from zcpool._atomics cimport add64, casptr, loadptr, loadptr_acquire, swapptr
from zcpool._block cimport Block, block_unref

cdef extern from "<poll.h>" nogil:
    struct pollfd:
        int fd
        short events
        short revents
    int poll(pollfd* fds, unsigned long n, int timeout) noexcept
    enum: POLLIN
    enum: POLLNVAL

cdef extern from "<unistd.h>" nogil:
    int close(int fd) noexcept

cdef enum:
    FENCE_BATCH = 64


cdef struct FenceNode:
    FenceNode* next
    Block* block
    int fd                  # owned


cdef struct FenceQueue:
    uintptr_t incoming      # atomic stack of nodes, pushed by release()
    FenceNode* first        # the rest is guarded by core.lock
    FenceNode* last
    uint64_t pending        # atomic: nodes anywhere


cdef inline FenceNode* fence_node(Block* block, int fd) noexcept nogil:
    cdef FenceNode* node = <FenceNode*>malloc(sizeof(FenceNode))
    if node != NULL:
        node.next = NULL
        node.block = block
        node.fd = fd
    return node

cdef inline void stack_push(uintptr_t* top, FenceNode* node) noexcept nogil:
    # No ABA: nodes are only ever taken all at once.
    cdef uintptr_t seen = loadptr(top)
    while True:
        node.next = <FenceNode*>seen
        if casptr(top, &seen, <uintptr_t>node):
            return

cdef inline void queue_push(FenceQueue* q, FenceNode* node) noexcept nogil:
    """Let a block wait for an fd; the queue owns both from here on."""
    add64(&q.pending, 1)
    stack_push(&q.incoming, node)

cdef inline void queue_append(FenceQueue* q, FenceNode* node) noexcept nogil:
    node.next = NULL
    if q.last != NULL:
        q.last.next = node
    else:
        q.first = node
    q.last = node

cdef inline void queue_collect(FenceQueue* q) noexcept nogil:
    """Move what was pushed to the back of the queue. Under core.lock."""
    cdef FenceNode* node = <FenceNode*>swapptr(&q.incoming, 0)
    cdef FenceNode* next
    while node != NULL:
        next = node.next
        queue_append(q, node)
        node = next

cdef inline int queue_take(FenceQueue* q, FenceNode** batch) noexcept nogil:
    """Take up to FENCE_BATCH nodes from the front. Under core.lock."""
    cdef int n = 0
    queue_collect(q)
    while n < FENCE_BATCH and q.first != NULL:
        batch[n] = q.first
        q.first = batch[n].next
        n += 1
    if q.first == NULL:
        q.last = NULL
    return n

cdef inline int queue_fds(FenceQueue* q, int* fds, int most) noexcept nogil:
    """Copy the fds at the front, to sleep on. Under core.lock."""
    cdef int n = 0
    cdef FenceNode* node
    queue_collect(q)
    node = q.first
    while n < most and node != NULL:
        fds[n] = node.fd
        node = node.next
        n += 1
    return n

cdef inline void nodes_look(FenceNode** batch, int n, short* seen) noexcept nogil:
    """Ask the kernel about a batch in one call. No lock is held: it is a system call."""
    cdef pollfd fds[64]
    cdef int i
    for i in range(n):
        fds[i].fd = batch[i].fd
        fds[i].events = POLLIN
        fds[i].revents = 0
    if poll(fds, n, 0) < 0:
        for i in range(n):
            fds[i].revents = 0
    for i in range(n):
        seen[i] = fds[i].revents


cdef enum:
    SIGNALLED = 1           # in place of a list of waiting blocks

cdef inline bint fence_attach(uintptr_t* waiting, FenceNode* node) noexcept nogil:
    """Make a block wait; False when the fence has been set already."""
    cdef uintptr_t seen = loadptr_acquire(waiting)
    while seen != SIGNALLED:
        node.next = <FenceNode*>seen
        if casptr(waiting, &seen, <uintptr_t>node):
            return True
    return False

cdef inline void fence_signal(uintptr_t* waiting) noexcept nogil:
    """Set a fence: every waiting block loses the reference the fence held."""
    cdef FenceNode* node = <FenceNode*>swapptr(waiting, SIGNALLED)
    cdef FenceNode* next
    if <uintptr_t>node == SIGNALLED:
        return
    while node != NULL:
        next = node.next
        block_unref(node.block)
        free(node)
        node = next


cdef class Fence:
    cdef object __weakref__
    cdef uintptr_t _waiting     # atomic: SIGNALLED, or a stack of FenceNode
    cdef uint32_t _turn         # atomic, a futex: 1 once set
    cdef uint32_t _fd           # atomic: an eventfd + 1, made on demand
    cdef int _pid               # whose eventfd it is: a forked child must not signal its parent's
