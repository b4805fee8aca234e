/* State of the process that all pools share: the descriptor table, the per-thread table of caches, the pools,
 * the waiters' eventfds, and the fork handler. Included by exactly one extension module (_pool), since a
 * static in a header is one per module.
 *
 * Nothing here is ever freed: a late release, from a thread's destructor or at interpreter exit, must find it.
 */
#ifndef ZC_PROCESS_H
#define ZC_PROCESS_H

#include "_atomics.h"
#include "zcpool.h"
#include <Python.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#if defined(__linux__)
#include <sys/eventfd.h>
#endif

#define ZC_CHUNK_SHIFT 12 /* descriptors made at a time: 4096, 256 KiB hot and 128 KiB cold */
#define ZC_CHUNK (1u << ZC_CHUNK_SHIFT)
#define ZC_INDEX_BITS 24 /* of a list head and of a token */
/* All hot descriptors there can be, 64 bytes each. Reserved at a multiple of itself, so that a descriptor and its index
 * are told from each other by a shift and a mask, without a look at memory. */
#define ZC_DESCRIPTORS_BYTES ((size_t)64 << ZC_INDEX_BITS)
#define ZC_POOL_BITS 12
#define ZC_POOLS (1 << ZC_POOL_BITS)
#define ZC_SLOTS 64

/* Bits of the ABA tag in a list head. 40 by default: at 1e8 pushes a second it wraps in three hours, and a
 * stale popper would have to sleep through exactly one wrap. Narrowed by a test so that it wraps. */
#ifndef ZC_TAG_BITS
#define ZC_TAG_BITS 40
#endif

/* Faults that `make planted` plants, to see that the stress test finds them; nothing in any other build. */
#ifndef ZC_PLANT_DOUBLE_PUSH
#define ZC_PLANT_DOUBLE_PUSH 0 /* a block goes home twice, now and then */
#endif
#ifndef ZC_PLANT_LOST_STEAL
#define ZC_PLANT_LOST_STEAL 0 /* what was stolen from a cache is forgotten */
#endif
#ifdef ZC_PLANT_WINDOW /* a popper sleeps between its look and its swap, now and then */
static inline void zc_window(void)
{
    static __thread unsigned turn;
    if (++turn % 64 == 0)
        sched_yield();
}
#else
static inline void zc_window(void) {}
#endif

/* Initial-exec TLS is one load from the thread pointer; musl refuses it in libraries loaded by dlopen. */
#if defined(__GLIBC__)
#define ZC_TLS __thread __attribute__((tls_model("initial-exec")))
#else
#define ZC_TLS __thread
#endif

/* What a thread has: in thread-local storage itself, so that a hit follows one pointer less. */
typedef struct zc_thread {
    uint32_t n;      /* entries of caches; 0 also when the thread is ending: its late releases go to the shared lists */
    uint32_t ended;
    void **caches;   /* by pool id: this thread's cache of that pool, or NULL */
} zc_thread;

static struct {
    uintptr_t descriptors;      /* where they begin: the hot ones, then the cold halves */
    uint32_t max_chunks;
    uint32_t n_chunks;          /* atomic, published with release */
    uint32_t grow_lock;
    void *pools[ZC_POOLS];      /* control blocks by id; type-stable, never freed */
    uint32_t n_pools;           /* atomic */
    uint32_t pools_lock;
    uint32_t serials;           /* atomic: numbers of pools given so far */
    uint64_t slot_mask;         /* atomic: which wait slots are taken */
    int slot_fd[ZC_SLOTS];      /* eventfds, made on demand, kept for the process */
    uint64_t free_descriptors __attribute__((aligned(64))); /* a list head, see _freelist.pxd */
    uint32_t python_work __attribute__((aligned(64))); /* atomic: there are regions to free or pools to bury */
    uint32_t orphans;            /* atomic: ended pools wait for fences, which somebody must look at */
    int (*chores)(void *);       /* what a Python entry point then does, with the GIL */
    uint32_t generation;        /* forks behind us */
    uint64_t nobody;            /* no pool's number, of which 44 bits are used, and not to be guessed */
    uint32_t fenced;            /* atomic: no membarrier, whoever enters a thread cache needs a fence of its own */
    pthread_key_t thread_key;
    pthread_once_t once;
    void (*drain_cache)(void *cache);
    void (*forked)(void);
    /* Of the C door, what does not hit: out of line, so that a hit has no frame. */
    const void *(*acquire)(uint64_t pool, size_t nbytes);
    int (*release)(uint64_t token);
} zc_process = {.once = PTHREAD_ONCE_INIT};

static ZC_TLS zc_thread zc_self;

/* The cache that the thread used last. Most often it is the next one, too; and then a hit need not follow the block to
 * its pool and the pool to the cache, which takes longer than all the rest. Never NULL: `zc_no_cache` lets nobody in. */
static zc_cache zc_no_cache = {.closed = ZC_KEPT_OUT};
static ZC_TLS zc_cache *zc_last_cache = &zc_no_cache;

static inline zc_cache *zc_get_last_cache(void) { return zc_last_cache; }
static inline void zc_set_last_cache(zc_cache *cache) { zc_last_cache = cache; }

static inline void *zc_thread_cache(uint32_t pool)
{
    return ZC_LIKELY(pool < zc_self.n) ? zc_self.caches[pool] : NULL;
}

static void zc_thread_end(void *arg)
{
    uint32_t i, n = zc_self.n;
    (void)arg;
    zc_self.n = 0;
    zc_self.ended = 1;
    zc_last_cache = &zc_no_cache;
    for (i = 0; i < n; i++)
        if (zc_self.caches[i])
            zc_process.drain_cache(zc_self.caches[i]);
    free(zc_self.caches);
    zc_self.caches = NULL;
}

/* Registers a cache for the calling thread. 0 on success; on failure the thread does without. */
static inline int zc_thread_adopt(uint32_t pool, void *cache)
{
    if (zc_self.ended || (!zc_self.n && pthread_setspecific(zc_process.thread_key, &zc_self) != 0))
        return -1;
    if (pool >= zc_self.n) {
        uint32_t n = pool + 16;
        void **caches = (void **)realloc(zc_self.caches, n * sizeof *caches);
        if (!caches)
            return -1;
        memset(caches + zc_self.n, 0, (n - zc_self.n) * sizeof *caches);
        zc_self.caches = caches;
        zc_self.n = n;
    }
    zc_self.caches[pool] = cache;
    return 0;
}

static inline void *zc_self_id(void) { return &zc_self; }

/* The child has one thread. It only stores: other threads' locks are abandoned, waiters' eventfds (shared with
 * the parent) are closed, and the core then disowns every region. */
static void zc_fork_child(void)
{
    int i;
    zc_process.grow_lock = 0;
    zc_process.pools_lock = 0;
    for (i = 0; i < ZC_SLOTS; i++) {
        if (zc_process.slot_fd[i] > 0)
            close(zc_process.slot_fd[i]);
        zc_process.slot_fd[i] = 0;
    }
    zc_process.slot_mask = 0;
    zc_process.generation++;
    zc_process.forked();
}

#if defined(__linux__) && defined(SYS_membarrier) && !defined(ZC_NO_MEMBARRIER)
#define ZC_MEMBARRIER(command) syscall(SYS_membarrier, command, 0, 0)
#else
#define ZC_MEMBARRIER(command) (-1L)
#endif
#define ZC_MEMBARRIER_PRIVATE_EXPEDITED (1 << 3) /* Linux 4.14 */
#define ZC_MEMBARRIER_REGISTER_PRIVATE_EXPEDITED (1 << 4)

/* Makes every thread of the process pass a full memory barrier. The kernel was asked at the start whether it can; one
 * that refuses later (a seccomp filter) is waited out: no store stays in a processor's buffer for so many timer ticks. */
static inline void zc_fence_all_threads(void)
{
    int saved = errno;
    if (ZC_MEMBARRIER(ZC_MEMBARRIER_PRIVATE_EXPEDITED) != 0) {
        zc_store_u32(&zc_process.fenced, 1);
        usleep(50000);
        errno = saved;
    }
}

static inline void zc_reserve_descriptors(void);

/* A number with its highest bit set that differs between processes. */
static inline uint64_t zc_random(void)
{
    uint64_t number = 0;
    int fd = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
    if (fd < 0 || read(fd, &number, sizeof number) != sizeof number)
        number = (uint64_t)zc_now_ns() * 0x9e3779b97f4a7c15u ^ (uintptr_t)&number << 16;
    if (fd >= 0)
        close(fd);
    return number | (uint64_t)1 << 63;
}

static void zc_process_init(void)
{
    zc_reserve_descriptors();
    zc_process.nobody = zc_random();
    zc_no_cache.pool = zc_process.nobody;
    zc_process.fenced = ZC_MEMBARRIER(ZC_MEMBARRIER_REGISTER_PRIVATE_EXPEDITED) != 0;
    pthread_key_create(&zc_process.thread_key, zc_thread_end);
    pthread_atfork(NULL, NULL, zc_fork_child);
}

static inline void zc_process_start(void (*drain_cache)(void *), void (*forked)(void))
{
    zc_process.drain_cache = drain_cache;
    zc_process.forked = forked;
    pthread_once(&zc_process.once, zc_process_init);
}

/* Backend calls this thread is inside of. A backend that uses the pool it serves must not wait for its own call. */
static ZC_TLS int zc_backend_depth = 0;

static inline void zc_backend_enter(void) { zc_backend_depth++; }
static inline void zc_backend_leave(void) { zc_backend_depth--; }
static inline int zc_in_backend(void) { return zc_backend_depth > 0; }

/* A number that no pool of this process has had. */
static inline uint32_t zc_next_serial(void) { return zc_add_u32(&zc_process.serials, 1) + 1; }

/* Asks for chores to be done with the GIL: by the next slow path that has it, or by the interpreter's own
 * pending calls. Needs no GIL, waits for nothing. */
static inline void zc_call_python(void)
{
    if (zc_swap_u32(&zc_process.python_work, 1) == 0 && Py_IsInitialized())
        Py_AddPendingCall(zc_process.chores, NULL);
}

/* What the C door says of the last failure of this thread. */
static ZC_TLS char zc_said[256] = "nothing has failed on this thread";

static inline char *zc_error_text(void) { return zc_said; }

/* PyGILState_Check() says yes to every thread once a subinterpreter has been made. */
static inline int zc_gil_held(void)
{
    PyThreadState *mine = PyGILState_GetThisThreadState();
#if PY_VERSION_HEX >= 0x030D0000
    return mine && mine == PyThreadState_GetUnchecked();
#else
    return mine && mine == _PyThreadState_UncheckedGet();
#endif
}

/* A thread that comes in by the C door may hold the GIL. Slow paths take locks, which must not be waited for
 * with it. */
static inline void *zc_gil_leave(void)
{
    return Py_IsInitialized() && zc_gil_held() ? PyEval_SaveThread() : NULL;
}

static inline void zc_gil_return(void *left)
{
    if (left)
        PyEval_RestoreThread((PyThreadState *)left);
}

static inline int zc_chores_due(void) {
    return (zc_load_u32(&zc_process.python_work) | zc_load_u32(&zc_process.orphans)) != 0;
}

/* ---- descriptors ---------------------------------------------------------------------------------- */

static inline void *zc_descriptor(uint32_t index)
{
    return (void *)(zc_process.descriptors | (uintptr_t)index << 6);
}

static inline void *zc_cold(void *hot)
{
    uintptr_t hot_bytes = (uintptr_t)zc_process.max_chunks << (ZC_CHUNK_SHIFT + 6);
    return (void *)(zc_process.descriptors + hot_bytes + ((uintptr_t)hot & (ZC_DESCRIPTORS_BYTES - 1)) / 2);
}

/* Adds a chunk under grow_lock; returns its first index, or 0 when there is no memory or no room. Index 0
 * means "none" in list heads, so the first chunk starts at 1. */
static inline uint32_t zc_grow_descriptors(void)
{
    uint32_t n = zc_load_u32(&zc_process.n_chunks);
    char *hot = (char *)zc_descriptor(n << ZC_CHUNK_SHIFT);
    if (n == zc_process.max_chunks || mprotect(hot, (size_t)ZC_CHUNK * 64, PROT_READ | PROT_WRITE) != 0
        || mprotect(zc_cold(hot), (size_t)ZC_CHUNK * 32, PROT_READ | PROT_WRITE) != 0)
        return 0;
    zc_store_release_u32(&zc_process.n_chunks, n + 1);
    return n ? n << ZC_CHUNK_SHIFT : 1;
}

static inline uintptr_t zc_reserve_addresses(uintptr_t hint, size_t nbytes)
{
    void *p = mmap((void *)hint, nbytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? 0 : (uintptr_t)p;
}

/* Reserves addresses, not memory, for 16 million descriptors; where addresses are rationed (ulimit -v), for fewer.
 * Without any, every look for a descriptor fails as it would without memory. */
static inline void zc_reserve_descriptors(void)
{
    const uintptr_t align = ZC_DESCRIPTORS_BYTES;
    int bits;
    for (bits = ZC_INDEX_BITS; bits >= ZC_CHUNK_SHIFT; bits -= 4) {
        size_t nbytes = (size_t)96 << bits;
        uintptr_t at = zc_reserve_addresses(0, nbytes + align), k;
        if (at) { /* give back what lies before and behind the aligned part */
            uintptr_t first = (at + align - 1) & ~(align - 1);
            if (first > at)
                munmap((void *)at, first - at);
            if (first < at + align)
                munmap((void *)(first + nbytes), at + align - first);
            at = first;
        }
        for (k = 4; !at && k < 64; k++) {
            at = zc_reserve_addresses(k * align, nbytes);
            if (at & (align - 1)) {
                munmap((void *)at, nbytes);
                at = 0;
            }
        }
        if (at) {
            zc_process.descriptors = at;
            zc_process.max_chunks = 1u << (bits - ZC_CHUNK_SHIFT);
            return;
        }
    }
}

/* ---- waiters: an eventfd each, so that a wake-up meant for one cannot be eaten by another ---------- */

static inline int zc_slot_take(void)
{
    uint64_t mask = zc_load_seq_u64(&zc_process.slot_mask);
    for (;;) {
        int i = ~mask ? __builtin_ctzll(~mask) : -1;
        if (i < 0)
            return -1;
        if (zc_cas_u64(&zc_process.slot_mask, &mask, mask | (1ull << i))) {
            if (zc_process.slot_fd[i] <= 0) {
#if defined(__linux__)
                int fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
#else
                int fd = -1;
#endif
                if (fd < 0) {
                    zc_and_u64(&zc_process.slot_mask, ~(1ull << i));
                    return -1;
                }
                __atomic_store_n(&zc_process.slot_fd[i], fd, __ATOMIC_RELEASE);
            }
            return i;
        }
    }
}

static inline void zc_slot_drain(int slot)
{
    uint64_t n;
    if (read(zc_process.slot_fd[slot], &n, sizeof n) < 0)
        (void)errno; /* EAGAIN: nothing was written */
}

static inline void zc_slot_give(int slot)
{
    zc_slot_drain(slot);
    zc_and_u64(&zc_process.slot_mask, ~(1ull << slot));
}

/* Wakes the waiters in mask. Late writes are spurious wake-ups, which waiters bear. */
static inline void zc_slots_wake(uint64_t mask)
{
    const uint64_t one = 1;
    int saved = errno;
    while (mask) {
        int i = __builtin_ctzll(mask);
        int fd = __atomic_load_n(&zc_process.slot_fd[i], __ATOMIC_ACQUIRE);
        mask &= mask - 1;
        if (fd > 0 && write(fd, &one, sizeof one) < 0)
            (void)errno; /* EAGAIN: already readable */
    }
    errno = saved;
}

/* Sleeps until the slot's eventfd (slot >= 0) or one of the fences is readable, or the time is over.
 * -1: interrupted by a signal. */
static inline int zc_slot_wait(int slot, const int *fences, int n_fences, int64_t timeout_ns)
{
    struct pollfd p[ZC_SLOTS];
    int n = 0, i, ms;
    if (slot >= 0) {
        p[n].fd = zc_process.slot_fd[slot];
        p[n].events = POLLIN;
        p[n++].revents = 0;
    }
    for (i = 0; i < n_fences && n < ZC_SLOTS; i++) {
        p[n].fd = fences[i];
        p[n].events = POLLIN;
        p[n++].revents = 0;
    }
    if (timeout_ns < 0)
        ms = -1;
    else if (timeout_ns > (int64_t)1000000000 * 1000000)
        ms = 1000000000;
    else
        ms = (int)((timeout_ns + 999999) / 1000000);
    if (poll(p, (nfds_t)n, ms) < 0)
        return errno == EINTR ? -1 : 0;
    if (slot >= 0)
        zc_slot_drain(slot);
    return 0;
}

#endif
