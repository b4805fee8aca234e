/* Hammers a pool through the C door from native threads that Python never saw.
 *
 * What may not happen, and how it is seen:
 *   - a block is handed out twice at a time: every descriptor index has an "owned" byte, taken and given by
 *     atomic exchange; and the owner writes a pattern into the block that it finds again before it lets go
 *   - a stale token is followed: released tokens are released again now and then, and must be refused
 *   - books that do not balance: looked at while everything runs
 *   - blocks that are lost: at the end nothing is in use or retired
 *   - a closed pool that serves: after stress_closed() every acquire must fail
 *   - a thread that hangs: each shows that it gets on; and where nobody looks at that, stress_patience() sets an alarm
 *   - a forked child that is not as it should be: its pools must be empty, serve, and give all back
 *
 * stress_run() returns 0, or a bit set of what went wrong; it prints the first finding of each kind. Meanwhile the
 * pools may be used by others, trimmed, closed, and the process forked.
 */
#define _GNU_SOURCE
#include "zcpool.h"
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { TWICE = 1, OVERWRITTEN = 2, STALE_FOLLOWED = 4, UNBALANCED = 8, LOST = 16, REFUSED = 32, NO_THREAD = 64,
       SERVED = 128, HUNG = 256, CHILD = 512 };
enum { KEEP = 64, MAIL = 64, OWNED = 1 << 24, POOLS = 8, THREADS = 64, PATIENCE = 30 /* seconds */, FOUND_STATUS = 3 };
enum { CHILD_LOOKS = 1, CHILD_SERVES = 2 };

typedef struct {
    const zc_api *api;
    const zc_pool *pools;
    int n_pools;
    uint64_t ops;           /* of each thread in a round */
    uint64_t largest;       /* bytes */
    int fast;               /* use the inlined path */
    int trims;              /* every so many operations, about; 0: never */
    int forks;              /* CHILD_LOOKS or CHILD_SERVES, now and then; 0: never */
    uint64_t mail[MAIL];    /* tokens on their way from one thread to another; atomic */
    uint32_t found;         /* atomic bit set */
    uint64_t failures;      /* atomic: acquires that found nothing */
    unsigned char *owned;   /* by index; atomic */
} shared;

typedef struct {
    shared *s;
    uint64_t random;
    zc_cache *caches[POOLS];
    uint64_t done;          /* atomic: operations */
    uint32_t ended;         /* atomic */
} worker;

static uint32_t closed; /* atomic: all pools have been closed */
static unsigned unwatched_seconds; /* seconds that may pass where no thread is watched; 0: for ever */

static uint64_t next_random(worker *w)
{
    w->random ^= w->random << 13;
    w->random ^= w->random >> 7;
    w->random ^= w->random << 17;
    return w->random;
}

static void found(shared *s, uint32_t what, const char *text, uint64_t value)
{
    if (!(__atomic_fetch_or(&s->found, what, __ATOMIC_SEQ_CST) & what))
        fprintf(stderr, "stress: %s: %llx\n", text, (unsigned long long)value);
}

/* Patterns are plain accesses on purpose: a sanitizer then sees an ordering that the pool does not give. */
static void mark(const zc_block *b, uint64_t token)
{
    size_t n = b->nbytes / 8;
    if (n) {
        ((uint64_t *)b->data)[0] = token;
        ((uint64_t *)b->data)[n - 1] = token;
    }
}

static int marked(const zc_block *b, uint64_t token)
{
    size_t n = b->nbytes / 8;
    return !n || (((uint64_t *)b->data)[0] == token && ((uint64_t *)b->data)[n - 1] == token);
}

static uint64_t take(worker *w)
{
    shared *s = w->s;
    uint64_t r = next_random(w);
    /* Mostly a few small classes, so that threads meet; some of every size. */
    size_t nbytes = r & 7 ? 256u << (r >> 8) % 3 : 1 + (r >> 8) % s->largest;
    int which = (int)((r >> 56) % (unsigned)s->n_pools);
    zc_pool pool = s->pools[which];
    uint32_t must_fail = __atomic_load_n(&closed, __ATOMIC_ACQUIRE);
    const zc_block *b;
    if (s->fast)
        b = zc_acquire_fast(s->api, w->caches[which], pool, nbytes);
    else if ((r >> 40) % 64 == 0)
        b = s->api->acquire_with(pool, nbytes, 64u << (r >> 48) % 7, (r >> 52) & ZC_EXCLUSIVE, 1000000);
    else
        b = s->api->acquire(pool, nbytes);
    if (!b) {
        __atomic_fetch_add(&s->failures, 1, __ATOMIC_RELAXED);
        return 0;
    }
    if (must_fail)
        found(s, SERVED, "a closed pool has served, index", zc_index(b));
    if (__atomic_exchange_n(&s->owned[zc_index(b)], 1, __ATOMIC_RELAXED))
        found(s, TWICE, "handed out twice, index", zc_index(b));
    mark(b, zc_token(b));
    return zc_token(b);
}

static zc_cache *cache_of(worker *w, const zc_block *b)
{
    int i;
    for (i = 0; i < w->s->n_pools; i++)
        if (w->caches[i] && w->caches[i]->core == b->core)
            return w->caches[i];
    return NULL;
}

static void drop(worker *w, uint64_t token)
{
    shared *s = w->s;
    const zc_api *api = s->api;
    const zc_block *b = api->find(token);
    uint64_t r = next_random(w) % 64;
    int fd = -1;
    if (!b) {
        found(s, REFUSED, "a live token was refused", token);
        return;
    }
    if (!marked(b, token))
        found(s, OVERWRITTEN, "somebody wrote into a held block", token);
    if (r == 0 && api->pin(token) != 0)
        found(s, REFUSED, "pin of a live token was refused", token);
    if (r == 1)
        fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int early = fd >= 0 && next_random(w) & 1; /* signalled before the release: home at once, perhaps */
    if (early)
        eventfd_write(fd, 1);
    int signal_fd = fd >= 0 ? dup(fd) : -1;
    /* Given up before the release: whoever takes the block next must find it free. A pinned one stays owned. */
    if (r != 0 && (fd < 0 || early))
        __atomic_store_n(&s->owned[zc_index(b)], 0, __ATOMIC_RELAXED);
    if (fd >= 0            ? api->release_after(token, fd)
        : s->fast && r != 2 ? zc_release_fast(api, cache_of(w, b), b)
                            : api->release(token))
        found(s, REFUSED, "release of a live token was refused", token);
    if (r == 0 || fd >= 0) {
        if (r == 0 && !marked(b, token))
            found(s, OVERWRITTEN, "a pinned block was handed out", token);
        if (!early)
            __atomic_store_n(&s->owned[zc_index(b)], 0, __ATOMIC_RELAXED);
        if (r == 0 && api->unpin(token) != 0)
            found(s, REFUSED, "unpin was refused", token);
        if (signal_fd >= 0)
            eventfd_write(signal_fd, 1);
    }
    if (signal_fd >= 0)
        close(signal_fd);
    if (r == 2 && api->release(token) == 0)
        found(s, STALE_FOLLOWED, "a stale token was released", token);
}

static void look(shared *s, zc_pool pool)
{
    zc_stats st;
    if (s->api->stats(pool, &st) == 0
        && st.reserved_bytes != st.in_use_bytes + st.cached_bytes + st.retired_bytes + st.slack_bytes)
        found(s, UNBALANCED, "books do not balance, reserved", st.reserved_bytes);
}

/* What a child does: no thread but the one that forked is here. Returns what is wrong. */
static int child(shared *s)
{
    static const size_t sizes[] = {10, 256, 512, 1000, 3 << 20};
    enum { SIZES = sizeof sizes / sizeof *sizes };
    const zc_block *held[SIZES];
    zc_stats st;
    int i, j;
    for (i = 0; i < s->n_pools; i++) {
        if (s->api->stats(s->pools[i], &st) || st.reserved_bytes || st.in_use_blocks || st.retired_blocks)
            return 1;
        if (s->forks != CHILD_SERVES || __atomic_load_n(&closed, __ATOMIC_ACQUIRE))
            continue;
        for (j = 0; j < SIZES; j++) {
            held[j] = s->api->acquire(s->pools[i], sizes[j]);
            if (!held[j])
                return 2;
            mark(held[j], zc_token(held[j]));
        }
        for (j = 0; j < SIZES; j++)
            if (!marked(held[j], zc_token(held[j])) || s->api->release(zc_token(held[j])))
                return 3;
        s->api->trim(s->pools[i], 0);
        if (s->api->stats(s->pools[i], &st) || st.reserved_bytes)
            return 4;
    }
    return 0;
}

static void fork_child(shared *s)
{
    int status = 0, i;
    pid_t pid = fork();
    if (pid == 0)
        _exit(child(s));
    if (pid < 0)
        return; /* no memory or too many processes: nothing was tried */
    for (i = 0; waitpid(pid, &status, WNOHANG) == 0; i++) {
        usleep(1000);
        if (i == PATIENCE * 1000) {
            kill(pid, SIGKILL);
            found(s, CHILD, "a child hangs", (uint64_t)pid);
        }
    }
    if (status)
        found(s, CHILD, "a child ended with the status", (uint64_t)status);
}

static void *work(void *arg)
{
    worker *w = (worker *)arg;
    shared *s = w->s;
    uint64_t kept[KEEP] = {0};
    uint64_t i;
    for (i = 0; i < (uint64_t)s->n_pools; i++)
        w->caches[i] = s->fast ? s->api->cache(s->pools[i]) : NULL;
    for (i = 0; i < s->ops; i++) {
        uint64_t r = next_random(w);
        uint64_t *place = &kept[r % KEEP];
        if (!*place)
            *place = take(w);
        else if ((r >> 8) % 4 == 0)
            *place = __atomic_exchange_n(&s->mail[(r >> 16) % MAIL], *place, __ATOMIC_ACQ_REL);
        else {
            drop(w, *place);
            *place = 0;
        }
        if (s->trims && (r >> 32) % (unsigned)s->trims == 0)
            s->api->trim(s->pools[(r >> 56) % (unsigned)s->n_pools], (r >> 20) & 1 ? 0 : 1 << 20);
        if ((r >> 32) % 1024 == 1)
            look(s, s->pools[(r >> 56) % (unsigned)s->n_pools]);
        if (s->forks && (r >> 32) % 8192 == 2)
            fork_child(s);
        __atomic_store_n(&w->done, i + 1, __ATOMIC_RELAXED);
    }
    for (i = 0; i < KEEP; i++)
        if (kept[i])
            drop(w, kept[i]);
    __atomic_store_n(&w->ended, 1, __ATOMIC_RELEASE);
    return NULL;
}

/* Waits until all have ended; no clock is asked, so that time in which the whole process is stopped does not count. */
static int all_end(worker *w, int threads)
{
    uint64_t last[THREADS] = {0}, done;
    int still[THREADS] = {0}, i, patience;
    alarm(0); /* who gets on may take as long as the machine is busy */
    for (i = 0; i < threads;) {
        usleep(1000);
        while (i < threads && __atomic_load_n(&w[i].ended, __ATOMIC_ACQUIRE))
            i++;
        if (i == threads)
            break;
        done = __atomic_load_n(&w[i].done, __ATOMIC_RELAXED);
        still[i] = done == last[i] ? still[i] + 1 : 0;
        last[i] = done;
        /* What is broken may well hang, too; who waits for a child has the child's patience. */
        patience = __atomic_load_n(&w[i].s->found, __ATOMIC_RELAXED) ? 1 : 2 * PATIENCE;
        if (still[i] >= patience * 1000) {
            found(w[i].s, HUNG, "a thread hangs, after so many operations", done);
            return 0;
        }
    }
    alarm(unwatched_seconds);
    return 1;
}

static void out_of_patience(int sig)
{
    static const char text[] = "stress: out of patience: something hangs while threads end or pools are emptied\n";
    (void)sig;
    (void)!write(2, text, sizeof text - 1);
    _exit(FOUND_STATUS);
}

/* From now on the process ends, as one in which something was found, when it spends so many seconds where no thread is
 * watched: while threads end, the last blocks are released, or Python empties the pools. */
void stress_patience(unsigned seconds)
{
    unwatched_seconds = seconds;
    signal(SIGALRM, out_of_patience);
    alarm(seconds);
}

static int64_t now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* All pools of the run have been closed: from here on no acquire may succeed. */
void stress_closed(int yes) { __atomic_store_n(&closed, (uint32_t)yes, __ATOMIC_RELEASE); }

/* Runs rounds of `threads` threads, new ones in every round, so that thread caches change hands, until `ms`
 * milliseconds are over; at least one round. */
int stress_run(const zc_api *api, const zc_pool *pools, int n_pools, int threads, int ms, uint64_t ops,
               uint64_t largest, int fast, int trims, int forks, uint64_t seed, uint64_t *rounds)
{
    shared *s = (shared *)calloc(1, sizeof *s);
    worker *w = (worker *)calloc((size_t)threads + 1, sizeof *w);
    pthread_t *t = (pthread_t *)calloc((size_t)threads, sizeof *t);
    int64_t end = now_ms() + ms;
    zc_stats st;
    int i, j, result;
    if (n_pools > POOLS)
        n_pools = POOLS;
    if (threads > THREADS)
        threads = THREADS;
    s->api = api;
    s->pools = pools;
    s->n_pools = n_pools;
    s->ops = ops;
    s->largest = largest;
    s->fast = fast;
    s->trims = trims;
    s->forks = forks;
    s->owned = (unsigned char *)calloc(OWNED, 1);
    *rounds = 0;
    do {
        for (i = 0; i < threads; i++) {
            w[i].s = s;
            w[i].done = w[i].ended = 0;
            w[i].random = seed * 2654435761u + (*rounds * (uint64_t)threads + (uint64_t)i + 1) * 0x9e3779b97f4a7c15ull;
            if (pthread_create(&t[i], NULL, work, &w[i]) != 0) {
                found(s, NO_THREAD, "no thread", (uint64_t)i);
                threads = i;
            }
        }
        if (!all_end(w, threads))
            return (int)s->found; /* nothing is freed: a thread may still come to life */
        for (i = 0; i < threads; i++)
            pthread_join(t[i], NULL);
        ++*rounds;
    } while (now_ms() < end && !s->found);
    if (s->found)
        return (int)s->found; /* who goes on with broken lists may hang */
    w[threads].s = s; /* this thread, without caches of its own: those of the others have ended with them */
    w[threads].random = seed | 1;
    for (i = 0; i < MAIL; i++)
        if (s->mail[i])
            drop(&w[threads], s->mail[i]);
    for (j = 0; j < n_pools; j++) {
        for (i = 0; i < 5000 && api->stats(pools[j], &st) == 0 && (st.retired_blocks || st.in_use_blocks); i++)
            usleep(1000); /* others may be using the pool, and a fence take a look to be seen */
        if (st.in_use_blocks || st.retired_blocks)
            found(s, LOST, "blocks still out at the end", st.in_use_blocks + st.retired_blocks);
        look(s, pools[j]);
    }
    result = (int)s->found;
    free(s->owned);
    free(t);
    free(w);
    free(s);
    return result;
}
