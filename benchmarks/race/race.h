/* What every contest shares: the contenders, the three things one does with them, and turns.
 *
 * A contest is written once, as an inline function of a kind that is a constant, and compiled three times: with a
 * malloc and a free called through pointers, with zcpool's table of functions, and with the fast path inlined from
 * zcpool.h. So the loop, what it touches and what the compiler must not assume are the same for all.
 */
#ifndef RACE_H
#define RACE_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "zcpool.h"

#define INLINE static inline __attribute__((always_inline))

enum kind { PEER, TABLE, INLINED };

typedef struct contender {
    int kind;
    int unused;
    void *(*malloc)(size_t);
    void (*free)(void *);
    const zc_api *api;
    zc_pool pool;
} contender;

/* What a turn does. The same for all contenders, but for the number of repetitions. */
typedef struct job {
    const size_t *sizes; /* bytes; taken one after the other, and again from the first */
    size_t size_count;
    size_t touch_bytes; /* a byte is written in each so many; 0: in the first only */
    size_t batch;       /* blocks handed over at a time */
    const struct op *ops;
    size_t op_count;
    void **slots; /* a trace's and Larson's live blocks */
    size_t slot_count;
} job;

/* One step of a trace: acquire so many bytes into a slot, or, with 0 bytes, release what is in it. */
typedef struct op {
    uint64_t slot;
    uint64_t nbytes;
} op;

/* The calling thread's cache, where a kind has one. */
INLINE zc_cache *cache_of(const enum kind kind, const contender *c)
{
    return kind == INLINED ? c->api->cache(c->pool) : NULL;
}

/* Acquire a block: a pointer to the memory, or to the pool's block. */
INLINE void *take(const enum kind kind, const contender *c, zc_cache *cache, size_t nbytes)
{
    const void *held = kind == PEER    ? c->malloc(nbytes)
                       : kind == TABLE ? (const void *)c->api->acquire(c->pool, nbytes)
                                       : (const void *)zc_acquire_fast(c->api, cache, c->pool, nbytes);
    if (!held) {
        fprintf(stderr, "race: no memory for %zu bytes\n", nbytes);
        abort();
    }
    return (void *)(uintptr_t)held;
}

/* Release it. */
INLINE void give(const enum kind kind, const contender *c, zc_cache *cache, void *held)
{
    if (kind == PEER)
        c->free(held);
    else if (kind == TABLE)
        c->api->release(zc_token(held));
    else
        zc_release_fast(c->api, cache, held);
    __asm__ volatile("" ::: "memory"); /* nothing is known any more, neither of sizes nor of pointers */
}

/* Write to it, as its user would. */
INLINE void touch(const enum kind kind, void *held, size_t nbytes, size_t step)
{
    volatile char *data = kind == PEER ? held : ((zc_block *)held)->data;
    data[0] = 1;
    if (step)
        for (size_t i = step; i < nbytes; i += step)
            data[i] = 1;
}

/* Call the copy of a contest that was compiled for the contender. */
#define FOR_KIND(contest, c, ...)                                                                                     \
    ((c)->kind == PEER    ? contest(PEER, c, __VA_ARGS__)                                                             \
     : (c)->kind == TABLE ? contest(TABLE, c, __VA_ARGS__)                                                            \
                          : contest(INLINED, c, __VA_ARGS__))

static inline double now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e9 * (double)t.tv_sec + (double)t.tv_nsec;
}

/* A turn: so many repetitions of a job; returns nanoseconds for one, or how many times one thread's rate. */
typedef double turn(const contender *c, const job *job, size_t number);

turn turn_pairs, turn_scaling, turn_handoff, turn_larson, turn_trace;

#endif
