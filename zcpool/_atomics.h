/* C11-style atomics, a futex lock, a trylock and a poll for readiness.
 *
 * The fields themselves are plain integers, reached only through these functions, so that the structures
 * that hold them compile as C and as C++. The __atomic builtins are what gcc and clang lower <stdatomic.h>
 * to, and ThreadSanitizer understands them.
 *
 * Naming: load/store are relaxed unless they say acquire or release; add, sub, swap and cas are sequentially
 * consistent, because the Dekker-like handshakes of the core (push, then look at a flag; set the flag, then
 * look at the list) need a total order, and on x86-64 a locked instruction gives it anyway.
 */
#ifndef ZC_ATOMICS_H
#define ZC_ATOMICS_H

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#endif

#define ZC_LIKELY(x) __builtin_expect(!!(x), 1)
#define ZC_UNLIKELY(x) __builtin_expect(!!(x), 0)

static inline int zc_likely(int x) { return ZC_LIKELY(x); }
static inline int zc_unlikely(int x) { return ZC_UNLIKELY(x); }

#define ZC_DEFINE_ATOMIC(T, N)                                                                             \
    static inline T zc_load_##N(const T *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }               \
    static inline T zc_load_acquire_##N(const T *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }       \
    static inline T zc_load_seq_##N(const T *p) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }           \
    static inline void zc_store_##N(T *p, T v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }               \
    static inline void zc_store_seq_##N(T *p, T v) { __atomic_store_n(p, v, __ATOMIC_SEQ_CST); }           \
    static inline void zc_store_release_##N(T *p, T v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }       \
    static inline T zc_add_##N(T *p, T v) { return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST); }           \
    static inline T zc_sub_##N(T *p, T v) { return __atomic_fetch_sub(p, v, __ATOMIC_SEQ_CST); }           \
    static inline T zc_or_##N(T *p, T v) { return __atomic_fetch_or(p, v, __ATOMIC_SEQ_CST); }             \
    static inline T zc_and_##N(T *p, T v) { return __atomic_fetch_and(p, v, __ATOMIC_SEQ_CST); }           \
    static inline T zc_swap_##N(T *p, T v) { return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST); }         \
    static inline int zc_cas_##N(T *p, T *expected, T desired)                                             \
    {                                                                                                      \
        return __atomic_compare_exchange_n(p, expected, desired, 0, __ATOMIC_SEQ_CST, __ATOMIC_ACQUIRE);   \
    }                                                                                                      \
    /* A counter with one writer: a plain addition that readers may watch without tearing. */              \
    static inline void zc_bump_##N(T *p, T v)                                                              \
    {                                                                                                      \
        __atomic_store_n(p, (T)(__atomic_load_n(p, __ATOMIC_RELAXED) + v), __ATOMIC_RELAXED);              \
    }

ZC_DEFINE_ATOMIC(uint64_t, u64)
ZC_DEFINE_ATOMIC(uint32_t, u32)
ZC_DEFINE_ATOMIC(uintptr_t, ptr)

static inline void zc_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb");
#endif
}

/* Fetches a cache line that will be written. Never faults. */
static inline void zc_prefetch(void *p) { __builtin_prefetch(p, 1, 3); }

/* ---- a one-word trylock --------------------------------------------------------------------------- */

static inline int zc_trylock(uint32_t *lock)
{
    /* Acquire: what the last holder wrote is visible inside. */
    return __atomic_exchange_n(lock, 1u, __ATOMIC_ACQUIRE) == 0;
}

static inline void zc_tryunlock(uint32_t *lock) { __atomic_store_n(lock, 0u, __ATOMIC_RELEASE); }

/* A turn of waiting for somebody who needs nanoseconds, but may have been preempted. Never with the GIL held. */
static inline void zc_spin(int *spins)
{
    if (++*spins < 64)
        zc_pause();
    else
        sched_yield();
}

/* Waits for a trylock, whose owner never waits inside. */
static inline void zc_spinlock(uint32_t *lock)
{
    int spins = 0;
    while (!zc_trylock(lock))
        while (zc_load_u32(lock))
            zc_spin(&spins);
}

/* Takes a flag that was 1 down to 0; true for whoever did. With a GIL all callers hold it, and a plain
 * load and store save the locked instruction on the hot path. */
static inline int zc_claim(uint32_t *flag)
{
#ifdef Py_GIL_DISABLED
    return (int)zc_swap_u32(flag, 0);
#else
    uint32_t was = zc_load_u32(flag);
    zc_store_u32(flag, 0);
    return (int)was;
#endif
}

/* The interpreter is being torn down: modules lose their contents, and nobody reads warnings any more. */
#if defined(PY_VERSION_HEX) && PY_VERSION_HEX >= 0x030D0000
#define zc_is_finalizing() Py_IsFinalizing()
#else
#define zc_is_finalizing() _Py_IsFinalizing()
#endif

/* ---- a futex lock: 0 free, 1 held, 2 held and somebody sleeps (Drepper, "Futexes are tricky") ------ */

static inline void zc_futex_wait(uint32_t *word, uint32_t seen, int64_t timeout_ns)
{
#if defined(__linux__)
    struct timespec ts;
    ts.tv_sec = (time_t)(timeout_ns / 1000000000);
    ts.tv_nsec = (long)(timeout_ns % 1000000000);
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, timeout_ns < 0 ? NULL : &ts, NULL, 0);
#else
    (void)timeout_ns;
    if (zc_load_seq_u32(word) == seen)
        usleep(50);
#endif
}

static inline void zc_futex_wake_all(uint32_t *word)
{
#if defined(__linux__)
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
#else
    (void)word;
#endif
}

static inline int zc_mutex_trylock(uint32_t *m)
{
    uint32_t free_ = 0;
    return zc_cas_u32(m, &free_, 1);
}

/* Never call it with the GIL held: the holder may be waiting for nothing, but it may be preempted. */
static inline void zc_mutex_lock(uint32_t *m)
{
    if (ZC_LIKELY(zc_mutex_trylock(m)))
        return;
    while (zc_swap_u32(m, 2) != 0)
        zc_futex_wait(m, 2, -1);
}

static inline void zc_mutex_unlock(uint32_t *m)
{
    if (zc_swap_u32(m, 0) == 2)
        zc_futex_wake_all(m);
}

/* ---- fds ----------------------------------------------------------------------------------------- */

/* 0 usable as a fence, else why not: 1 not open, 2 a regular file or directory (always readable). */
static inline int zc_fd_check(int fd)
{
    struct stat st;
    if (fd < 0 || fstat(fd, &st) != 0)
        return 1;
    return (S_ISREG(st.st_mode) || S_ISDIR(st.st_mode)) ? 2 : 0;
}

static inline int zc_fd_dup(int fd) { return fcntl(fd, F_DUPFD_CLOEXEC, 0); }

static inline int64_t zc_now_ns(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
}

#endif
