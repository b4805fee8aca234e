/* Turns: who runs when. And the contests of one thread: pairs of acquire and release, and traces. */
#include "race.h"

static uint64_t next_random(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state >> 33;
}

/* Let contenders take turns, in each round in an order of its own, so that who runs after whom evens out.
 * values[round * count + who] is what the turn returned. jobs[who] is the job of a contender: they differ in what is
 * live, if anything is. At most 16 take part. */
void race_run(turn *turn, const contender *contenders, const job *jobs, const size_t *numbers, size_t count,
              size_t rounds, double *values)
{
    size_t order[16];
    uint64_t state = 1;
    for (size_t i = 0; i < count; i++)
        order[i] = i;
    for (size_t round = 0; round < rounds; round++) {
        for (size_t i = count; i > 1; i--) {
            size_t other = next_random(&state) % i, last = order[i - 1];
            order[i - 1] = order[other];
            order[other] = last;
        }
        for (size_t i = 0; i < count; i++) {
            size_t who = order[i];
            values[round * count + who] = turn(&contenders[who], &jobs[who], numbers[who]);
        }
    }
}

INLINE double pairs(const enum kind kind, const contender *c, const job *job, size_t number)
{
    zc_cache *cache = cache_of(kind, c);
    double start = now_ns();
    for (size_t i = 0; i < number; i++)
        for (size_t k = 0; k < job->size_count; k++) {
            size_t nbytes = job->sizes[k];
            void *held = take(kind, c, cache, nbytes);
            touch(kind, held, nbytes, job->touch_bytes);
            give(kind, c, cache, held);
        }
    return (now_ns() - start) / (double)(number * job->size_count);
}

double turn_pairs(const contender *c, const job *job, size_t number)
{
    FOR_KIND(pairs, c, job, 1); /* what the turn before has thrown out of the processor's caches is back */
    return FOR_KIND(pairs, c, job, number);
}

INLINE double trace(const enum kind kind, const contender *c, const job *job, size_t number)
{
    zc_cache *cache = cache_of(kind, c);
    void **slots = job->slots;
    double start = now_ns();
    for (size_t i = 0; i < number; i++)
        for (const op *o = job->ops, *end = o + job->op_count; o < end; o++) {
            if (o->nbytes) {
                void *held = take(kind, c, cache, o->nbytes);
                touch(kind, held, o->nbytes, job->touch_bytes);
                slots[o->slot] = held;
            } else {
                give(kind, c, cache, slots[o->slot]);
                slots[o->slot] = NULL;
            }
        }
    return (now_ns() - start) / (double)(number * job->op_count);
}

double turn_trace(const contender *c, const job *job, size_t number) { return FOR_KIND(trace, c, job, number); }

INLINE void clear(const enum kind kind, const contender *c, const job *job)
{
    for (size_t i = 0; i < job->slot_count; i++)
        if (job->slots[i]) {
            give(kind, c, cache_of(kind, c), job->slots[i]);
            job->slots[i] = NULL;
        }
}

/* Release what a contest has left in its slots. */
void race_clear(const contender *c, const job *job) { FOR_KIND(clear, c, job); }

/* What no allocator does: calls through pointers that name some memory, and calls that are nothing but arithmetic. */
static _Thread_local char somewhere[64] __attribute__((tls_model("initial-exec")));

void *nothing_malloc(size_t nbytes)
{
    (void)nbytes;
    return somewhere;
}

/* Four chains at once keep a core so busy that a second thread of it gets nothing done. */
void *busy_malloc(size_t nbytes)
{
    uint64_t a = nbytes, b = nbytes + 1, c = nbytes + 2, d = nbytes + 3;
    for (int i = 0; i < 32; i++) {
        a = a * 3 + 1;
        b = b * 5 + 1;
        c = (c << 3) ^ a;
        d = (d << 5) + b;
    }
    return somewhere + ((a ^ b ^ c ^ d) & 1);
}

void nothing_free(void *data) { (void)data; }
