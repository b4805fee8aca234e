/* What a hit and a release may not do: enter the kernel, allocate, or wait for a lock.
 *
 * quiet_run() lets one thread look at the books of a pool again and again, so that it nearly always holds the pool's
 * lock, and another acquire and release what is cached under seccomp's strict mode, in which any system call but read,
 * write and exit ends the thread: waiting for the lock would be one (futex), and so would growing the heap.
 *
 * With this library preloaded, allocations of the process are counted while `counting` is set.
 */
#define _GNU_SOURCE
#include "zcpool.h"
#include <linux/seccomp.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

static const zc_api *api;
static zc_pool the_pool;
static int finished; /* atomic */
static int stopped;  /* atomic */
static int looks;    /* atomic */

static void *look(void *unused)
{
    zc_stats s;
    while (!__atomic_load_n(&stopped, __ATOMIC_ACQUIRE)) {
        api->stats(the_pool, &s);
        __atomic_fetch_add(&looks, 1, __ATOMIC_RELAXED);
    }
    return unused;
}

static void *hit(void *sizes)
{
    const size_t *size = (const size_t *)sizes;
    const zc_block *b;
    int i, j;
    for (i = 0; size[i]; i++) /* the first acquire makes the thread's cache */
        if ((b = api->acquire(the_pool, size[i])))
            api->release(zc_token(b));
    if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT) != 0)
        return NULL;
    for (j = 0; j < 200000 || __atomic_load_n(&looks, __ATOMIC_RELAXED) < 20; j++)
        for (i = 0; size[i]; i++)
            if ((b = api->acquire(the_pool, size[i])))
                api->release(zc_token(b));
    __atomic_store_n(&finished, 1, __ATOMIC_RELEASE);
    for (;;)
        syscall(SYS_exit, 0); /* of this thread alone; the C library's own way out would do more */
}

/* 1 when the quiet thread came through, 0 when it was ended by a system call (or took half a minute). */
int quiet_run(const zc_api *table, zc_pool pool, const size_t *sizes)
{
    pthread_t looker, hitter;
    int i;
    api = table;
    the_pool = pool;
    finished = stopped = looks = 0;
    if (pthread_create(&looker, NULL, look, NULL) || pthread_create(&hitter, NULL, hit, (void *)sizes))
        return 0;
    for (i = 0; i < 3000 && !__atomic_load_n(&finished, __ATOMIC_ACQUIRE); i++)
        usleep(10000);
    __atomic_store_n(&stopped, 1, __ATOMIC_RELEASE);
    pthread_join(looker, NULL);
    return finished;
}

int counting;   /* set from Python */
long counted;   /* atomic */

void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_memalign(size_t, size_t);

static void count(void)
{
    if (counting)
        __atomic_fetch_add(&counted, 1, __ATOMIC_RELAXED);
}

void *malloc(size_t n)
{
    count();
    return __libc_malloc(n);
}

void *calloc(size_t n, size_t size)
{
    count();
    return __libc_calloc(n, size);
}

int posix_memalign(void **p, size_t alignment, size_t n)
{
    count();
    *p = __libc_memalign(alignment, n);
    return *p ? 0 : 12;
}
