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
#define ZC_CACHED_CLASSES 96 /* those of at most 1 MiB */

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
    uint16_t cls;
    uint8_t kind;
    uint8_t bucket;         /* 0 small, 1 medium, 2 large, 3 huge */
    uint16_t slot;          /* of a thread cache, where the block is kept: bytes from its beginning */
    uint16_t unused;
    uint64_t capacity;      /* bytes granted */
    uint64_t nbytes;        /* bytes asked for; atomic */
    struct zc_region *region;
    struct zc_core *core;
} zc_block;

/* The place of a descriptor among all there can be: they lie in one array at a multiple of its size, 1 GiB. */
static inline uint32_t zc_index(const zc_block *b) { return (uint32_t)((uintptr_t)b >> 6) & 0xffffff; }

static inline zc_token_t zc_token(const zc_block *b)
{
    /* Only the holder's own references and state change meanwhile, never the generation. */
    return (__atomic_load_n(&b->word, __ATOMIC_RELAXED) & ~(uint64_t)0xffffff) | zc_index(b);
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
 * For blocks of up to 1 MiB that this thread's cache holds; everything else goes through the table.
 *
 * A cache is its owner's, a thread's, which must not pay a locked instruction to enter it: they cost more than all
 * the rest of a hit. So the owner says `busy` and then looks whether it is kept out; a visitor keeps it out and then
 * looks whether it is busy. Either must do the first before the second, and only the visitor, which is rare, pays for
 * that: between the two it makes every thread of the process pass a full barrier (membarrier). What the owner wrote
 * inside is released with `busy = 0`, and what a visitor wrote with what opens the cache again. Where there is no
 * membarrier (ZC_FENCED) the owner goes the other way, and pays there.
 */

typedef struct zc_slot {
    zc_block *hot;          /* the block that came last, if there is one: most often it is the next to go; or ZC_SHUT */
    zc_block *head;         /* the others, last in first out */
    uint64_t taken;         /* acquires; atomic, written by the owner alone */
    uint16_t count;         /* blocks, of the others */
    uint16_t limit;         /* of the others */
    uint16_t most;          /* what limit may become */
    uint16_t batch;         /* how many the next refill takes */
} zc_slot;

#define ZC_SHUT ((zc_block *)1)
#define ZC_NEAR_PLACES 128

#define ZC_KEPT_OUT 1u      /* bits of zc_cache.closed: a visitor is inside or about to be */
#define ZC_FENCED 2u        /* whoever enters needs a fence: then `pool` and `open` are never set */

struct zc_cache {
    uint32_t busy;          /* atomic; the owner is inside */
    uint32_t closed;        /* atomic, changed under the pool's lock, like the next two */
    zc_pool pool;           /* whose requests are served here; nobody's while they are not */
    struct zc_core *open;   /* whose blocks are taken back here; NULL while they are not */
    struct zc_core *core;   /* whose cache it is */
    void *owner;
    struct zc_cache *next;
    /* Guarded by `busy`, and the pool's lock. */
    uint64_t granted;       /* bytes that all blocks would have if every slot were full */
    uint32_t denied;
    uint32_t unused;
    uint64_t acquires[4];   /* by bucket, of blocks that are not kept here; atomic, written by the owner alone */
    uint64_t lent[4];       /* by bucket; likewise */
    uint64_t lent_all;
    uint32_t keeps_big;     /* the pool is this thread's alone so far: larger blocks are kept, too */
    zc_block *big[8];
    zc_slot slots[ZC_CACHED_CLASSES + 1]; /* by class; the last one is for blocks that are not kept, and stays shut */
    /* Which slot is for what size, in bytes from the beginning of the cache: a look takes less than finding the class.
     * By 64 bytes up to 8 KiB, and then by 1 KiB up to 1 MiB. */
    uint16_t places[ZC_NEAR_PLACES + 1024];
};

/* Compilers think these too long, and then a call costs more than what is in them. */
#define ZC_FAST static inline __attribute__((always_inline))

ZC_FAST void zc_cache_enter(zc_cache *c)
{
    __atomic_store_n(&c->busy, 1u, __ATOMIC_RELAXED);
    __atomic_signal_fence(__ATOMIC_SEQ_CST); /* the compiler keeps the order; the processor is made to by visitors */
}

ZC_FAST void zc_cache_leave(zc_cache *c) { __atomic_store_n(&c->busy, 0u, __ATOMIC_RELEASE); }

#if defined(__SANITIZE_THREAD__)
#define ZC_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define ZC_TSAN 1
#endif
#endif

/* Adds to a word that nobody else writes, while statistics and holders of stale tokens look on. Written as an atomic
 * load and store it is three instructions instead of one, which is too many here; 64 bits are not torn either way. */
ZC_FAST void zc_bump(uint64_t *p, uint64_t v)
{
#if defined(ZC_TSAN) || !defined(__x86_64__)
    __atomic_store_n(p, __atomic_load_n(p, __ATOMIC_RELAXED) + v, __ATOMIC_RELAXED);
#else
    *p += v;
#endif
}

ZC_FAST zc_block *zc_cache_hand_out(zc_cache *c, zc_slot *s, zc_block *b, size_t nbytes, unsigned state)
{
    zc_bump(&s->taken, 1);
    zc_cache_leave(c);
    zc_bump(&b->word, (uint64_t)(state - ZC_CACHED) << 20);
    __atomic_store_n(&b->nbytes, (uint64_t)nbytes, __ATOMIC_RELAXED);
    return b;
}

/* Where blocks of last + 1 bytes, at most 1 MiB, are kept. For who is inside. */
ZC_FAST zc_slot *zc_cache_slot(zc_cache *c, size_t last)
{
    uint16_t place;
    if (last < 64 * ZC_NEAR_PLACES) {
        place = c->places[last >> 6];
    } else {
        __asm__(""); /* a branch: sizes repeat, and a choice between both indices takes longer */
        place = c->places[ZC_NEAR_PLACES + (last >> 10)];
    }
    return (zc_slot *)(void *)((char *)c + place);
}

/* NULL: nothing is here, or the other way is to be taken. 0 bytes are nowhere. */
ZC_FAST zc_block *zc_cache_take(zc_cache *c, zc_pool pool, size_t nbytes, unsigned state)
{
    zc_slot *s;
    zc_block *b;
    if (nbytes - 1 >= (size_t)1 << 20)
        return (zc_block *)0;
    zc_cache_enter(c);
    if (__builtin_expect(__atomic_load_n(&c->pool, __ATOMIC_ACQUIRE) == pool, 1)) {
        s = zc_cache_slot(c, nbytes - 1);
        b = s->hot;
        if (__builtin_expect(b > ZC_SHUT, 1)) {
            s->hot = (zc_block *)0;
            return zc_cache_hand_out(c, s, b, nbytes, state);
        }
        b = s->head;
        if (b) {
            /* Relaxed: whoever has a stale view of a list may look at the link. */
            s->head = (zc_block *)__atomic_load_n((uintptr_t *)&b->next, __ATOMIC_RELAXED);
            s->count--;
            return zc_cache_hand_out(c, s, b, nbytes, state);
        }
    }
    zc_cache_leave(c);
    return (zc_block *)0;
}

/* What a word in `state` and without references becomes when its block goes home. */
ZC_FAST uint64_t zc_renew(uint64_t word, unsigned state)
{
    return word + (1u << 24) - ((uint64_t)(state - ZC_CACHED) << 20);
}

/* Takes back a block, held without references, whose word becomes `renewed`: CACHED, in the next generation, so that
 * tokens die. 0: nothing has happened. */
ZC_FAST int zc_cache_give(zc_cache *c, zc_block *b, uint64_t renewed)
{
    zc_slot *s = (zc_slot *)(void *)((char *)c + b->slot);
    zc_cache_enter(c);
    if (__builtin_expect(__atomic_load_n(&c->open, __ATOMIC_ACQUIRE) != b->core, 0)) {
        zc_cache_leave(c);
        return 0;
    }
    if (__builtin_expect(s->hot != (zc_block *)0, 0)) {
        if (s->count >= s->limit) {
            zc_cache_leave(c);
            return 0;
        }
        __atomic_store_n((uintptr_t *)&s->hot->next, (uintptr_t)s->head, __ATOMIC_RELAXED);
        s->head = s->hot;
        s->count++;
    }
    __atomic_store_n(&b->word, renewed, __ATOMIC_RELAXED);
    s->hot = b;
    zc_cache_leave(c);
    return 1;
}

/* Acquire with the thread's own cache: a few nanoseconds when it holds a block of the class. */
ZC_FAST const zc_block *zc_acquire_fast(const zc_api *api, zc_cache *c, zc_pool pool, size_t nbytes)
{
    zc_block *b = c ? zc_cache_take(c, pool, nbytes, ZC_HELD) : (zc_block *)0;
    return __builtin_expect(b != (zc_block *)0, 1) ? b : api->acquire(pool, nbytes);
}

/* Release with the thread's own cache. The caller holds b: a stale block is caught only by the table's release. */
ZC_FAST int zc_release_fast(const zc_api *api, zc_cache *c, const zc_block *held)
{
    zc_block *b = (zc_block *)(uintptr_t)held;
    uint64_t word = __atomic_load_n(&b->word, __ATOMIC_RELAXED);
    if (__builtin_expect(c && (word & 0xffffff) == (uint64_t)ZC_HELD << 20 && zc_cache_give(c, b, zc_renew(word, ZC_HELD)), 1))
        return 0;
    return api->release(zc_token(b));
}

#ifdef __cplusplus
}
#endif
#endif
