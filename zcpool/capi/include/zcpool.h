/* zcpool.h: the C door to a zcpool.Pool, for delegates, drivers' glue and other native code. C11 and C++17.
 *
 * A process that has Python and has imported zcpool holds one table of functions, zc_api. Get it
 *   - in an extension module:      zc_import()                       (with the GIL; needs <Python.h> first)
 *   - in any other native code:    zc_api_from(dlsym(dlopen(path, RTLD_NOW | RTLD_NOLOAD), "zcpool_get_api"))
 *                                  where path is zcpool.get_library()
 * and a pool as a number, pool.c_handle in Python. Everything below may then be called from any thread, with or
 * without the GIL; threads that Python never saw are served as well. Nothing throws.
 *
 *   const zc_block *b = api->acquire(pool, nbytes);      NULL: api->error() says why
 *   use b->data, b->nbytes ...
 *   api->release(zc_token(b));                           -1: the token is stale, nothing happened
 *
 * A token names one acquire of a block. Used after its release it is refused, whoever has the block by then. A
 * pool's number is refused in the same way after the pool has ended. Two threads that race to release one token
 * are a bug of theirs, which only ZCPOOL_DEBUG=1 catches.
 *
 * Layouts are fixed for one ZC_ABI; zc_import and zc_api_from refuse another one.
 */
#ifndef ZCPOOL_H
#define ZCPOOL_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define ZC_ABI 1
#define ZC_CAPSULE "zcpool._pool.c_api"
#define ZC_SMALL_CLASSES 95

/* States of a block, as its word has them. */
enum { ZC_CACHED = 1, ZC_IN_USE = 2, ZC_RETIRED = 3, ZC_HELD = 4 };

/* A pool: a number that dies with it. 0 is no pool. */
typedef uint64_t zc_pool;
/* One acquire of a block. 0 is none. */
typedef uint64_t zc_token_t;

struct zc_region;
struct zc_core;

/* A block, and its descriptor: 64 bytes that stay mapped for the life of the process. Callers read data,
 * capacity and nbytes while they hold the block; the rest is the pool's. */
typedef struct zc_block {
    uint64_t word;          /* generation, state and references; atomic */
    void *data;             /* for the CPU; an offset where the CPU does not see the memory */
    struct zc_block *next;
    uint32_t index;
    uint16_t cls;
    uint8_t kind;
    uint8_t bucket;         /* 0 small, 1 medium, 2 large, 3 huge */
    uint64_t capacity;      /* bytes granted */
    uint64_t nbytes;        /* bytes asked for */
    struct zc_region *region;
    struct zc_core *core;
} zc_block;

static inline zc_token_t zc_token(const zc_block *b)
{
    /* Only the holder's own references and state change meanwhile, never the generation. */
    return (__atomic_load_n(&b->word, __ATOMIC_RELAXED) & ~(uint64_t)0xffffff) | b->index;
}

/* Where a block lies, for importers of fds and for runtimes. */
typedef struct zc_place {
    int fd;                 /* the region's, owned by the backend; -1 where there is none */
    uint64_t offset;        /* bytes into the region */
    uint64_t region_bytes;
    void *region_data;
    void *cookie;           /* the backend's own: what its header says */
} zc_place;

typedef struct zc_stats {
    uint64_t in_use_bytes, in_use_blocks, cached_bytes, cached_blocks, retired_bytes, retired_blocks;
    uint64_t slack_bytes, reserved_bytes, handles, acquires, misses, failures;
    uint64_t backend_allocations, backend_frees;
} zc_stats;

enum { ZC_EXCLUSIVE = 1 };                          /* flags of acquire_with */
enum { ZC_TO_DEVICE = 1, ZC_FROM_DEVICE = 2 };      /* directions of sync */

typedef struct zc_cache zc_cache;

typedef struct zc_api {
    uint32_t abi;
    uint32_t size;          /* of this structure: fields are only ever added at its end */
    /* What is cached costs nanoseconds; a miss may call the backend. 1 <= nbytes. */
    const zc_block *(*acquire)(zc_pool pool, size_t nbytes);
    /* alignment: 0 or a power of two up to 2 MiB; timeout_ns: how long to wait at a limit, -1 for ever. */
    const zc_block *(*acquire_with)(zc_pool pool, size_t nbytes, size_t alignment, int flags, int64_t timeout_ns);
    int (*release)(zc_token_t token);
    /* The block goes home when the fd (sync_file, eventfd, pipe) has become readable. On success the pool owns and
     * closes the fd; on -1 nothing has happened. */
    int (*release_after)(zc_token_t token, int fd);
    /* A pinned block does not go home; pin before release, unpin with the same token any time after. */
    int (*pin)(zc_token_t token);
    int (*unpin)(zc_token_t token);
    int (*sync)(zc_token_t token, int direction);
    const zc_block *(*find)(zc_token_t token);      /* NULL: stale */
    int (*place)(zc_token_t token, zc_place *out);
    int (*stats)(zc_pool pool, zc_stats *out);
    size_t (*trim)(zc_pool pool, size_t keep_bytes);
    /* Why the last call of this thread failed; a static or thread-local text, never NULL. */
    const char *(*error)(void);
    /* The calling thread's cache of a pool, for the inlined path below; NULL: use acquire and release. It is valid
     * on this thread alone, until the thread ends. */
    zc_cache *(*cache)(zc_pool pool);
} zc_api;

typedef const zc_api *(*zc_get_api_fn)(uint32_t abi);

static inline const zc_api *zc_api_from(void *symbol)
{
    return symbol ? (__extension__ (zc_get_api_fn)symbol)(ZC_ABI) : (const zc_api *)0;
}

#ifdef Py_PYTHON_H
/* With the GIL; NULL with an ImportError or ValueError set. */
static inline const zc_api *zc_import(void)
{
    zc_get_api_fn get = __extension__ (zc_get_api_fn)PyCapsule_Import(ZC_CAPSULE, 0);
    const zc_api *api = get ? get(ZC_ABI) : (const zc_api *)0;
    if (get && !api)
        PyErr_Format(PyExc_ImportError, "the installed zcpool does not speak ABI %d of zcpool.h", ZC_ABI);
    return api;
}
#endif

/* ---- the inlined fast path ---------------------------------------------------------------------------
 *
 *   zc_cache *c = api->cache(pool);                      once per thread
 *   const zc_block *b = zc_acquire_fast(api, c, pool, nbytes);
 *   zc_release_fast(api, c, b);
 *
 * For blocks of less than 1 MiB that this thread's cache holds; everything else goes through the table.
 */

typedef struct zc_slot {
    zc_block *head;
    uint16_t count;
    uint16_t limit;         /* blocks */
    uint16_t batch;         /* how many blocks the next refill takes */
    uint16_t unused;
} zc_slot;

/* What both ways look at inside the trylock: the pool's state, and which pool it is. */
typedef struct zc_gate {
    uint32_t flags;
    uint32_t serial;
} zc_gate;

#define ZC_GATE_ACQUIRE 3u  /* bits of flags that close the fast way out, */
#define ZC_GATE_RELEASE 15u /* and those that close the one back */

struct zc_cache {
    uint32_t lock;          /* a trylock; guards everything below */
    uint32_t unused;
    const zc_gate *gate;
    struct zc_core *core;
    void *owner;
    struct zc_cache *next;
    uint64_t granule;       /* bytes; sizes are rounded to it before they are classified */
    uint64_t bytes;
    uint64_t bytes_limit;
    uint64_t acquires[4];   /* by bucket; written by the owner alone */
    uint64_t lent[4];       /* by bucket; likewise */
    zc_slot slots[ZC_SMALL_CLASSES];
};

static inline int zc_cache_enter(zc_cache *c)
{
    return __atomic_exchange_n(&c->lock, 1u, __ATOMIC_ACQUIRE) == 0;
}

static inline void zc_cache_leave(zc_cache *c) { __atomic_store_n(&c->lock, 0u, __ATOMIC_RELEASE); }

/* Eight classes to a doubling from 512 bytes up, steps of 64 below. */
static inline unsigned zc_class(uint64_t nbytes)
{
    uint64_t last = nbytes - 1;
    unsigned top;
    if (last < 512)
        return (unsigned)(last >> 6);
    top = 63u - (unsigned)__builtin_clzll(last);
    return 8 * (top - 8) + (unsigned)((last >> (top - 3)) & 7);
}

/* Acquire with the thread's own cache: a few nanoseconds when it holds a block of the class. */
static inline const zc_block *zc_acquire_fast(const zc_api *api, zc_cache *c, zc_pool pool, size_t nbytes)
{
    if (c && nbytes - 1 < ((size_t)1 << 20) && zc_cache_enter(c)) {
        unsigned cls = zc_class((nbytes + c->granule - 1) & ~(c->granule - 1));
        zc_slot *s = &c->slots[cls < ZC_SMALL_CLASSES ? cls : 0];
        zc_block *b = s->head;
        if (b && cls < ZC_SMALL_CLASSES
            && !(__atomic_load_n(&c->gate->flags, __ATOMIC_RELAXED) & ZC_GATE_ACQUIRE)
            && __atomic_load_n(&c->gate->serial, __ATOMIC_RELAXED) == pool >> 12) {
            s->head = (zc_block *)__atomic_load_n((uintptr_t *)&b->next, __ATOMIC_RELAXED);
            s->count--;
            c->bytes -= b->capacity;
            __atomic_store_n(&c->acquires[0], c->acquires[0] + 1, __ATOMIC_RELAXED);
            zc_cache_leave(c);
            __atomic_store_n(&b->word, (b->word & ~(uint64_t)0xffffff) | ((uint64_t)ZC_HELD << 20), __ATOMIC_RELAXED);
            __atomic_store_n(&b->nbytes, (uint64_t)nbytes, __ATOMIC_RELAXED);
            return b;
        }
        zc_cache_leave(c);
    }
    return api->acquire(pool, nbytes);
}

/* Release with the thread's own cache. The caller holds b: a stale block is caught only by the table's release. */
static inline int zc_release_fast(const zc_api *api, zc_cache *c, const zc_block *held)
{
    zc_block *b = (zc_block *)(uintptr_t)held;
    uint64_t word = __atomic_load_n(&b->word, __ATOMIC_RELAXED);
    if (c && c->core == b->core && b->cls < ZC_SMALL_CLASSES && !b->kind
        && (word & 0xffffff) == ((uint64_t)ZC_HELD << 20) && zc_cache_enter(c)) {
        zc_slot *s = &c->slots[b->cls];
        if (!(__atomic_load_n(&c->gate->flags, __ATOMIC_RELAXED) & ZC_GATE_RELEASE) && s->count < s->limit
            && c->bytes + b->capacity <= c->bytes_limit) {
            __atomic_store_n(&b->word, (word & ~(uint64_t)0xffffff) + (1u << 24) + ((uint64_t)ZC_CACHED << 20),
                             __ATOMIC_RELAXED);
            __atomic_store_n((uintptr_t *)&b->next, (uintptr_t)s->head, __ATOMIC_RELAXED);
            s->head = b;
            s->count++;
            c->bytes += b->capacity;
            zc_cache_leave(c);
            return 0;
        }
        zc_cache_leave(c);
    }
    return api->release(zc_token(b));
}

#ifdef __cplusplus
}
#endif
#endif
