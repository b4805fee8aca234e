/* The contests of two threads: private blocks, blocks handed over, and Larson's server.
 *
 * The second thread lives as long as the process and sleeps between turns. In a turn it is woken first, and the clock
 * starts when both are there.
 */
#include "race.h"

#include <pthread.h>
#include <sched.h>
#include <semaphore.h>

#if defined(__x86_64__) || defined(__i386__)
#define RELAX() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define RELAX() __asm__ volatile("yield")
#else
#define RELAX() (void)0
#endif

typedef void work(const contender *c, const job *job, size_t number);

static struct {
    sem_t wake;
    work *work;
    const contender *contender;
    const job *job;
    size_t number;
    _Alignas(64) uint32_t ready, go, done;
} helper;

static void await(const uint32_t *flag)
{
    while (!__atomic_load_n(flag, __ATOMIC_ACQUIRE))
        RELAX();
}

static void set(uint32_t *flag, uint32_t value) { __atomic_store_n(flag, value, __ATOMIC_RELEASE); }

static int cpus[2];

/* Keep the calling thread on one of the two CPUs: threads that ran on the same one would measure the scheduler. */
static void pin(size_t which)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET((size_t)cpus[which], &set);
    sched_setaffinity(0, sizeof set, &set);
}

static void *help(void *unused)
{
    (void)unused;
    pin(1);
    for (;;) {
        while (sem_wait(&helper.wake))
            ;
        set(&helper.ready, 1);
        await(&helper.go);
        helper.work(helper.contender, helper.job, helper.number);
        set(&helper.done, 1);
    }
    return NULL;
}

/* Start the second thread, once for a process. The caller stays on the first CPU, by itself. */
int race_start_helper(int own_cpu, int other_cpu)
{
    pthread_t thread;
    cpus[0] = own_cpu;
    cpus[1] = other_cpu;
    return sem_init(&helper.wake, 0, 0) || pthread_create(&thread, NULL, help, NULL) || pthread_detach(thread);
}

/* Have it do its part as soon as helper.go is set; returns when it is there. */
static void call_helper(work *work, const contender *c, const job *job, size_t number)
{
    helper.work = work;
    helper.contender = c;
    helper.job = job;
    helper.number = number;
    helper.ready = helper.go = helper.done = 0;
    sem_post(&helper.wake);
    await(&helper.ready);
}

/* ---- private blocks ------------------------------------------------------------------------------------ */

static void some_pairs(const contender *c, const job *job, size_t number) { turn_pairs(c, job, number); }

/* The rate of two threads as a multiple of one's. */
double turn_scaling(const contender *c, const job *job, size_t number)
{
    double alone, start, both;
    turn_pairs(c, job, number / 8 + 1);
    alone = (double)number * turn_pairs(c, job, number);
    call_helper(some_pairs, c, job, number);
    start = now_ns();
    set(&helper.go, 1);
    some_pairs(c, job, number);
    await(&helper.done);
    both = now_ns() - start;
    return 2 * alone / both;
}

/* ---- handed over --------------------------------------------------------------------------------------- */

enum { DEPTH = 4, MOST = 64 };

/* A ring of batches, one producer and one consumer; each index has a cache line of its own. */
static struct {
    _Alignas(64) size_t made;
    _Alignas(64) size_t used;
    _Alignas(64) void *batches[DEPTH][MOST];
} ring;

INLINE void consume(const enum kind kind, const contender *c, const job *job, size_t number)
{
    zc_cache *cache = cache_of(kind, c);
    for (size_t used = 0; used < number; used++) {
        void **batch = ring.batches[used % DEPTH];
        while (__atomic_load_n(&ring.made, __ATOMIC_ACQUIRE) == used)
            RELAX();
        for (size_t i = 0; i < job->batch; i++) {
            touch(kind, batch[i], 1, 0);
            give(kind, c, cache, batch[i]);
        }
        __atomic_store_n(&ring.used, used + 1, __ATOMIC_RELEASE);
    }
}

INLINE void produce(const enum kind kind, const contender *c, const job *job, size_t number)
{
    zc_cache *cache = cache_of(kind, c);
    for (size_t made = 0; made < number; made++) {
        void **batch = ring.batches[made % DEPTH];
        while (made - __atomic_load_n(&ring.used, __ATOMIC_ACQUIRE) == DEPTH)
            RELAX();
        for (size_t i = 0; i < job->batch; i++) {
            batch[i] = take(kind, c, cache, job->sizes[0]);
            touch(kind, batch[i], job->sizes[0], job->touch_bytes);
        }
        __atomic_store_n(&ring.made, made + 1, __ATOMIC_RELEASE);
    }
}

static void consumer(const contender *c, const job *job, size_t number) { FOR_KIND(consume, c, job, number); }

static void producer(const contender *c, const job *job, size_t number) { FOR_KIND(produce, c, job, number); }

/* Blocks made here and released there: nanoseconds for one, the ring's share included. */
double turn_handoff(const contender *c, const job *job, size_t number)
{
    size_t batches = number / job->batch + 1;
    double start;
    ring.made = ring.used = 0;
    call_helper(consumer, c, job, batches);
    start = now_ns();
    set(&helper.go, 1);
    producer(c, job, batches);
    await(&helper.done);
    return (now_ns() - start) / (double)(batches * job->batch);
}

/* ---- Larson's server ----------------------------------------------------------------------------------- */

typedef struct generation {
    const contender *contender;
    const job *job;
    void **slots;
    size_t slot_count, number, cpu;
    uint64_t seed;
} generation;

INLINE void serve(const enum kind kind, const contender *c, const generation *g)
{
    zc_cache *cache = cache_of(kind, c);
    uint64_t x = g->seed;
    for (size_t i = 0; i < g->number; i++) {
        void **slot;
        size_t nbytes;
        x = x * 6364136223846793005u + 1442695040888963407u;
        slot = &g->slots[(x >> 33) % g->slot_count];
        nbytes = g->job->sizes[(x >> 20) % g->job->size_count];
        if (*slot)
            give(kind, c, cache, *slot);
        *slot = take(kind, c, cache, nbytes);
        touch(kind, *slot, nbytes, g->job->touch_bytes);
    }
}

static void *live(void *argument)
{
    const generation *g = argument;
    pin(g->cpu);
    FOR_KIND(serve, g->contender, g);
    return NULL;
}

/* Two threads replace blocks at random, and end; the next two inherit what they leave, crosswise. Nanoseconds for
 * a replacement by one thread while the other runs; making and ending threads is part of it. */
double turn_larson(const contender *c, const job *job, size_t number)
{
    static uint64_t turns;
    size_t half = job->slot_count / 2, cross = ++turns % 2;
    generation g[2];
    pthread_t threads[2];
    double start = now_ns();
    for (size_t i = 0; i < 2; i++) {
        g[i] = (generation){c, job, job->slots + half * (i ^ cross), half, number, i, turns * 2 + i};
        if (pthread_create(&threads[i], NULL, live, &g[i]))
            abort();
    }
    for (size_t i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    return (now_ns() - start) / (double)number;
}
