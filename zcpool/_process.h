/* State of the process that all pools share: the descriptor table, the per-thread table of caches, the pools,
 * the waiters' eventfds, and the fork handler. Included by exactly one extension module (_pool), since a
 * static in a header is one per module.
 *
 * Nothing here is ever freed: a late release, from a thread's destructor or at interpreter exit, must find it.
 */
#ifndef ZC_PROCESS_H
#define ZC_PROCESS_H

#include "_atomics.h"
#include <Python.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#if defined(__linux__)
#include <sys/eventfd.h>
#endif

#define ZC_CHUNK_SHIFT 12 /* descriptors in a chunk: 4096, 256 KiB hot and 128 KiB cold */
#define ZC_CHUNK (1u << ZC_CHUNK_SHIFT)
#define ZC_CHUNK_ALIGN (512u * 1024) /* so that a hot descriptor finds its cold half by masking */
#define ZC_CHUNKS 4096 /* times 4096 is the 24-bit index of a list head */
#define ZC_POOLS 4096
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

typedef struct zc_thread {
    uint32_t n;      /* entries of caches */
    void **caches;   /* by pool id: this thread's cache of that pool, or NULL */
} zc_thread;

static struct {
    char *chunks[ZC_CHUNKS];
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
    pthread_key_t thread_key;
    pthread_once_t once;
    void (*drain_cache)(void *cache);
    void (*forked)(void);
} zc_process = {.once = PTHREAD_ONCE_INIT};

/* A thread that has none of its own yet, or no longer: every look-up misses, nothing is allocated. */
static zc_thread zc_no_thread = {0, NULL};
static ZC_TLS zc_thread *zc_self = &zc_no_thread;
static ZC_TLS int zc_thread_ended = 0;

static inline void *zc_thread_cache(uint32_t pool)
{
    zc_thread *t = zc_self;
    return ZC_LIKELY(pool < t->n) ? t->caches[pool] : NULL;
}

static void zc_thread_end(void *arg)
{
    zc_thread *t = (zc_thread *)arg;
    uint32_t i;
    zc_self = &zc_no_thread;
    zc_thread_ended = 1; /* later destructors of this thread use the shared lists */
    for (i = 0; i < t->n; i++)
        if (t->caches[i])
            zc_process.drain_cache(t->caches[i]);
    free(t->caches);
    free(t);
}

/* Registers a cache for the calling thread. 0 on success; on failure the thread does without. */
static inline int zc_thread_adopt(uint32_t pool, void *cache)
{
    zc_thread *t = zc_self;
    if (zc_thread_ended)
        return -1;
    if (t == &zc_no_thread) {
        t = (zc_thread *)calloc(1, sizeof *t);
        if (!t)
            return -1;
        if (pthread_setspecific(zc_process.thread_key, t) != 0) {
            free(t);
            return -1;
        }
        zc_self = t;
    }
    if (pool >= t->n) {
        uint32_t n = pool + 16;
        void **caches = (void **)realloc(t->caches, n * sizeof *caches);
        if (!caches)
            return -1;
        memset(caches + t->n, 0, (n - t->n) * sizeof *caches);
        t->caches = caches;
        t->n = n;
    }
    t->caches[pool] = cache;
    return 0;
}

static inline void *zc_self_id(void) { return zc_self; }

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

static void zc_process_init(void)
{
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

/* A number that no pool of this process has had: a thread cache and a pool's number are told apart by it alone. */
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
    return zc_process.chunks[index >> ZC_CHUNK_SHIFT] + (size_t)(index & (ZC_CHUNK - 1)) * 64;
}

static inline void *zc_cold(void *hot)
{
    uintptr_t chunk = (uintptr_t)hot & ~(uintptr_t)(ZC_CHUNK_ALIGN - 1);
    return (void *)(chunk + (size_t)ZC_CHUNK * 64 + ((uintptr_t)hot - chunk) / 2);
}

/* Adds a chunk under grow_lock; returns its first index, or 0 when there is no memory or no room. Index 0
 * means "none" in list heads, so the first chunk starts at 1. */
static inline uint32_t zc_grow_descriptors(void)
{
    uint32_t n = zc_load_u32(&zc_process.n_chunks);
    void *chunk;
    if (n == ZC_CHUNKS || posix_memalign(&chunk, ZC_CHUNK_ALIGN, (size_t)ZC_CHUNK * 96) != 0)
        return 0;
    memset(chunk, 0, (size_t)ZC_CHUNK * 96);
    zc_process.chunks[n] = (char *)chunk;
    zc_store_release_u32(&zc_process.n_chunks, n + 1);
    return n ? n << ZC_CHUNK_SHIFT : 1;
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
