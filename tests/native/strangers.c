/* Threads that go on asking for blocks of a pool whose number they were told, also when it has ended. */
#include "zcpool.h"
#include <pthread.h>

enum { THREADS = 4 };

static const zc_api *api;
static zc_pool told;
static uint32_t stop;
static uint64_t served;
static pthread_t threads[THREADS];

static void *ask(void *seed)
{
    uint32_t random = (uint32_t)(uintptr_t)seed;
    while (!__atomic_load_n(&stop, __ATOMIC_RELAXED)) {
        const zc_block *b;
        zc_stats stats;
        random = random * 1103515245u + 12345u;
        b = api->acquire(__atomic_load_n(&told, __ATOMIC_ACQUIRE), (random >> 28 ? 1 : 10) * (1 + (random >> 8) % 300000));
        if (b) {
            __atomic_fetch_add(&served, 1, __ATOMIC_RELAXED);
            *(char *)b->data = 1;
            api->release(zc_token(b));
        } else if (random >> 30 == 0)
            api->stats(__atomic_load_n(&told, __ATOMIC_ACQUIRE), &stats);
    }
    return NULL;
}

int strangers_come(const zc_api *table)
{
    uintptr_t i;
    api = table;
    __atomic_store_n(&stop, 0, __ATOMIC_RELAXED);
    for (i = 0; i < THREADS; i++)
        if (pthread_create(&threads[i], NULL, ask, (void *)(i + 1)) != 0)
            return -1;
    return 0;
}

void strangers_hear(zc_pool pool) { __atomic_store_n(&told, pool, __ATOMIC_RELEASE); }

uint64_t strangers_go(void)
{
    int i;
    __atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
    for (i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    return served;
}
