// A library of native code that knows nothing of Python: it finds the table by dlopen and dlsym, and works in
// std::threads that Python never saw. Functions return 0, or the line of what was wrong.
#include "zcpool.h"
#include "zcpool.h"

#include <atomic>
#include <chrono>
#include <cstring>
#include <dlfcn.h>
#include <poll.h>
#include <string>
#include <sys/eventfd.h>
#include <thread>
#include <unistd.h>
#include <vector>

#define CHECK(condition)          \
    do {                          \
        if (!(condition))         \
            return __LINE__;      \
    } while (0)

namespace {

const zc_api *api;

template <class F> int in_thread(F work)
{
    int line = 0;
    std::thread([&] { line = work(); }).join();
    return line;
}

bool balanced(const zc_stats &s)
{
    return s.reserved_bytes == s.in_use_bytes + s.cached_bytes + s.retired_bytes + s.slack_bytes;
}

bool eventually(bool (*condition)(zc_pool), zc_pool pool)
{
    for (int i = 0; i < 10000; i++, std::this_thread::sleep_for(std::chrono::milliseconds(1)))
        if (condition(pool))
            return true;
    return false;
}

bool nothing_retired(zc_pool pool)
{
    zc_stats s;
    return api->stats(pool, &s) == 0 && s.retired_blocks == 0;
}

bool said(const char *words) { return std::strstr(api->error(), words) != nullptr; }

// A thread that waits until it is told what to do next, step by step: it lives across what Python does meanwhile.
struct Guest {
    std::thread thread;
    std::atomic<int> step{0}, done{0}, line{0};
    zc_pool pool = 0;
    std::vector<zc_token_t> held;
    zc_cache *cache = nullptr;
} *guest;

int guest_step(Guest &g, int step)
{
    const std::size_t sizes[] = {1, 64, 1000, 100000, 3 << 20, 20 << 20};
    zc_stats s;
    switch (step) {
    case 1: // while the pool is open
        for (std::size_t n : sizes) {
            const zc_block *b = api->acquire(g.pool, n);
            CHECK(b && b->nbytes == n && b->capacity >= n);
            std::memset(b->data, 0x5a, n);
            g.held.push_back(zc_token(b));
        }
        g.cache = api->cache(g.pool);
        CHECK(g.cache);
        CHECK(zc_release_fast(api, g.cache, zc_acquire_fast(api, g.cache, g.pool, 500)) == 0);
        CHECK(api->stats(g.pool, &s) == 0 && balanced(s) && s.in_use_blocks == 6);
        return 0;
    case 2: // after close()
        CHECK(!api->acquire(g.pool, 64) && said("closed"));
        CHECK(!api->acquire_with(g.pool, 64, 4096, ZC_EXCLUSIVE, -1) && said("closed"));
        CHECK(!zc_acquire_fast(api, g.cache, g.pool, 500) && said("closed"));
        CHECK(api->stats(g.pool, &s) == 0 && balanced(s) && s.in_use_blocks == 6 && s.cached_bytes == 0);
        for (zc_token_t token : g.held) {
            const zc_block *b = api->find(token);
            CHECK(b && static_cast<unsigned char *>(b->data)[b->nbytes - 1] == 0x5a);
        }
        CHECK(api->release(g.held.back()) == 0);
        g.held.pop_back();
        CHECK(api->stats(g.pool, &s) == 0 && balanced(s) && s.in_use_blocks == 5);
        return 0;
    case 3: // after the Pool object is gone: the pool's number is dead, its blocks are not
        CHECK(api->stats(g.pool, &s) == -1 && said("has ended"));
        CHECK(!api->acquire(g.pool, 64) && said("has ended"));
        CHECK(!api->acquire_with(g.pool, 64, 0, 0, -1) && said("has ended"));
        CHECK(!zc_acquire_fast(api, g.cache, g.pool, 500) && said("has ended"));
        CHECK(api->trim(g.pool, 0) == 0 && said("has ended"));
        CHECK(!api->cache(g.pool) && said("has ended"));
        for (std::size_t i = 0; i < g.held.size(); i++) {
            const zc_block *b = api->find(g.held[i]);
            CHECK(b && static_cast<unsigned char *>(b->data)[b->nbytes - 1] == 0x5a);
            if (i == 1) { // a signalled fence, of a pool that nobody asks any more
                int fd = eventfd(1, EFD_CLOEXEC);
                CHECK(fd >= 0 && api->release_after(g.held[i], fd) == 0);
            } else
                CHECK(i % 2 ? api->release(g.held[i]) == 0 : zc_release_fast(api, g.cache, b) == 0);
            CHECK(api->release(g.held[i]) == -1);
        }
        g.held.clear();
        return 0;
    }
    return __LINE__;
}

} // namespace

extern "C" {

// The way of all native code that is not an extension module.
int open_door(const char *path)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
    CHECK(library);
    api = zc_api_from(dlsym(library, "zcpool_get_api"));
    CHECK(api && api->abi == ZC_ABI && api->size >= sizeof(zc_api));
    CHECK(!zc_api_from(nullptr));
    CHECK(!zc_api_from(dlsym(library, "there_is_no_such_function")));
    return 0;
}

int other_abi(const char *path)
{
    auto get = reinterpret_cast<zc_get_api_fn>(dlsym(dlopen(path, RTLD_NOW | RTLD_NOLOAD), "zcpool_get_api"));
    CHECK(get);
    CHECK(!get(0) && !get(ZC_ABI + 1) && !get(~0u));
    CHECK(get(ZC_ABI) == get(ZC_ABI));
    return 0;
}

// Acquires and releases of all sizes in several threads at once.
int many_threads(zc_pool pool, int n_threads, int rounds)
{
    std::vector<int> lines(n_threads);
    std::vector<std::thread> threads;
    for (int t = 0; t < n_threads; t++)
        threads.emplace_back([&, t] {
            lines[t] = [&]() -> int {
                for (int i = 0; i < rounds; i++) {
                    std::size_t n = static_cast<std::size_t>(1 + i * 7919 % 300000);
                    const zc_block *b = api->acquire(pool, n);
                    CHECK(b && b->nbytes == n && b->capacity >= n && b->data);
                    std::memset(b->data, t, n);
                    zc_token_t token = zc_token(b);
                    CHECK(api->find(token) == b);
                    CHECK(static_cast<unsigned char *>(b->data)[n - 1] == t);
                    CHECK(api->release(token) == 0);
                    CHECK(api->release(token) == -1);
                }
                return 0;
            }();
        });
    for (auto &thread : threads)
        thread.join();
    for (int line : lines)
        if (line)
            return line;
    return 0;
}

int after_an_eventfd(zc_pool pool, int64_t nbytes)
{
    return in_thread([=]() -> int {
        zc_stats s;
        int fd = eventfd(0, EFD_CLOEXEC);
        int signal = dup(fd);
        CHECK(fd >= 0 && signal >= 0);
        const zc_block *b = api->acquire(pool, static_cast<std::size_t>(nbytes));
        CHECK(b);
        void *data = b->data;
        zc_token_t token = zc_token(b);
        CHECK(api->release_after(token, fd) == 0);
        CHECK(api->release(token) == -1);           // it has been released
        CHECK(api->stats(pool, &s) == 0 && s.retired_blocks == 1 && balanced(s));
        const zc_block *other = api->acquire(pool, static_cast<std::size_t>(nbytes));
        CHECK(other && other->data != data);        // the device may still be writing
        CHECK(api->release(zc_token(other)) == 0);
        CHECK(eventfd_write(signal, 1) == 0);
        CHECK(eventually(nothing_retired, pool));
        CHECK(api->find(token) == nullptr);
        CHECK(close(signal) == 0);
        return close(fd) == 0 ? __LINE__ : 0;       // the pool has closed it
    });
}

int pinned(zc_pool pool)
{
    return in_thread([=]() -> int {
        zc_stats s;
        const zc_block *b = api->acquire(pool, 5000);
        CHECK(b);
        zc_token_t token = zc_token(b);
        CHECK(api->pin(token) == 0 && api->pin(token) == 0);
        CHECK(api->release(token) == 0);
        CHECK(api->release(token) == -1);
        CHECK(api->stats(pool, &s) == 0 && s.retired_blocks == 1 && s.in_use_blocks == 0 && balanced(s));
        CHECK(api->find(token) == b);               // the device's, still
        std::memset(b->data, 1, b->nbytes);
        CHECK(api->pin(token) == 0 && api->unpin(token) == 0);
        CHECK(api->unpin(token) == 0);
        CHECK(api->stats(pool, &s) == 0 && s.retired_blocks == 1);
        CHECK(in_thread([=] { return api->unpin(token); }) == 0);
        CHECK(api->stats(pool, &s) == 0 && s.retired_blocks == 0 && balanced(s));
        CHECK(api->unpin(token) == -1 && api->pin(token) == -1 && !api->find(token));
        return 0;
    });
}

// A waiter for the pool's only block, woken by a release of another thread, long before its timeout.
int woken(zc_pool pool, int64_t nbytes, int64_t timeout_ns)
{
    std::atomic<bool> waits{false};
    const zc_block *b = api->acquire_with(pool, static_cast<std::size_t>(nbytes), 0, 0, 0);
    CHECK(b);
    CHECK(!api->acquire_with(pool, static_cast<std::size_t>(nbytes), 0, 0, 0) && said("limit"));
    auto start = std::chrono::steady_clock::now();
    CHECK(!api->acquire_with(pool, static_cast<std::size_t>(nbytes), 0, 0, 20'000'000) && said("limit"));
    CHECK(std::chrono::steady_clock::now() - start >= std::chrono::milliseconds(20));
    const zc_block *got = nullptr;
    std::thread waiter([&] {
        waits = true;
        got = api->acquire_with(pool, static_cast<std::size_t>(nbytes), 0, 0, timeout_ns);
    });
    while (!waits)
        std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    start = std::chrono::steady_clock::now();
    CHECK(api->release(zc_token(b)) == 0);
    waiter.join();
    CHECK(got);
    CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(10));
    CHECK(api->release(zc_token(got)) == 0);
    return 0;
}

// Waiters for the pool's only block when the pool is closed: they are told, and do not sleep on.
int told_of_the_end(zc_pool pool, int64_t nbytes, void (*close_pool)())
{
    std::atomic<int> refused{0}, began{0};
    const zc_block *b = api->acquire(pool, static_cast<std::size_t>(nbytes));
    CHECK(b);
    std::vector<std::thread> waiters;
    for (int i = 0; i < 3; i++)
        waiters.emplace_back([&] {
            began++;
            if (!api->acquire_with(pool, static_cast<std::size_t>(nbytes), 0, 0, -1) && said("closed"))
                refused++;
        });
    while (began < 3)
        std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    close_pool();
    for (auto &waiter : waiters)
        waiter.join();
    CHECK(refused == 3);
    CHECK(api->release(zc_token(b)) == 0);
    return 0;
}

// Threads that end leave nothing behind that trim cannot give back.
int end_with_caches(zc_pool pool, int n_threads, int64_t nbytes)
{
    for (int t = 0; t < n_threads; t++) {
        int line = in_thread([=]() -> int {
                  std::vector<zc_token_t> held;
                  zc_cache *c = api->cache(pool);
                  CHECK(c);
                  for (int i = 0; i < 16; i++) {
                      const zc_block *b = zc_acquire_fast(api, c, pool, static_cast<std::size_t>(nbytes));
                      CHECK(b);
                      held.push_back(zc_token(b));
                  }
                  for (zc_token_t token : held)
                      CHECK(zc_release_fast(api, c, api->find(token)) == 0);
                  return 0;
              });
        if (line)
            return line;
    }
    return 0;
}

// One thread's error text is its own.
int errors_are_of_the_thread(zc_pool pool)
{
    CHECK(!api->acquire(pool, 0));
    std::string mine = api->error();
    CHECK(!mine.empty());
    int line = in_thread([&]() -> int {
        CHECK(api->error() && said("nothing has failed"));
        CHECK(api->release(0) == -1);
        CHECK(said("stale") && mine != api->error());
        return 0;
    });
    CHECK(mine == api->error());
    return line;
}

// Calls from one thread while Python code does what it likes in others.
int spin(zc_pool pool, int64_t milliseconds, int64_t nbytes)
{
    return in_thread([=]() -> int {
        auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(milliseconds);
        for (std::size_t i = 0; std::chrono::steady_clock::now() < end; i++) {
            const zc_block *b = api->acquire(pool, static_cast<std::size_t>(nbytes) + i % 64 * 4096);
            CHECK(b);
            static_cast<unsigned char *>(b->data)[b->nbytes - 1] = 1;
            CHECK(api->release(zc_token(b)) == 0);
            if (i % 16 == 0)
                api->trim(pool, 0);
        }
        return 0;
    });
}

// ---- a thread that lives on while Python goes from one state to the next

void guest_begin(zc_pool pool)
{
    guest = new Guest;
    guest->pool = pool;
    guest->thread = std::thread([g = guest] {
        for (int done = 0;;) {
            int step = g->step.load();
            if (step < 0)
                return;
            if (step == done) {
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
                continue;
            }
            g->line = guest_step(*g, step);
            g->done = done = step;
        }
    });
}

int guest_do(int step)
{
    guest->step = step;
    while (guest->done != step)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return guest->line;
}

void guest_end()
{
    guest->step = -1;
    guest->thread.join();
    delete guest;
    guest = nullptr;
}

// The inlined ways in a thread of its own: cached blocks, foreign caches, big blocks, pins.
int inlined(zc_pool pool, zc_pool other)
{
    return in_thread([=]() -> int {
        zc_stats s;
        zc_cache *c = api->cache(pool), *d = api->cache(other);
        CHECK(c && d && c != d && api->cache(pool) == c);
        const zc_block *b = zc_acquire_fast(api, c, pool, 300);
        CHECK(b && b->nbytes == 300 && b->bucket == 0);
        void *data = b->data;
        CHECK(zc_release_fast(api, c, b) == 0);
        b = zc_acquire_fast(api, c, pool, 290);
        CHECK(b && b->data == data && b->nbytes == 290);        // last in, first out
        CHECK(zc_release_fast(api, d, b) == 0);                 // with the cache of another pool: the slow way
        CHECK(zc_release_fast(api, nullptr, zc_acquire_fast(api, nullptr, pool, 290)) == 0);
        b = zc_acquire_fast(api, c, other, 290);                // the number counts, not the cache
        CHECK(b);
        CHECK(api->stats(other, &s) == 0 && s.in_use_blocks == 1);
        CHECK(zc_release_fast(api, c, b) == 0);
        CHECK(api->stats(other, &s) == 0 && s.in_use_blocks == 0);
        CHECK(!zc_acquire_fast(api, c, pool, 0));
        CHECK(!zc_acquire_fast(api, c, pool, ~static_cast<std::size_t>(0)));
        for (std::size_t n : {std::size_t(1) << 20, (std::size_t(1) << 20) + 1, std::size_t(5) << 20}) {
            b = zc_acquire_fast(api, c, pool, n);
            CHECK(b && b->capacity >= n && b->bucket > 0);
            CHECK(zc_release_fast(api, c, b) == 0);
        }
        b = zc_acquire_fast(api, c, pool, 300);
        zc_token_t token = zc_token(b);
        CHECK(api->pin(token) == 0);
        CHECK(zc_release_fast(api, c, b) == 0);
        CHECK(api->stats(pool, &s) == 0 && s.retired_blocks == 1 && balanced(s));
        CHECK(api->unpin(token) == 0);
        CHECK(api->find(token) == nullptr);
        for (std::size_t n = 1; n <= 1 << 20; n += n / 7 + 1) {  // the header's classes are the pool's
            b = api->acquire(pool, n);
            std::size_t slot = reinterpret_cast<char *>(zc_cache_slot(c, n - 1)) - reinterpret_cast<char *>(c);
            CHECK(b && (b->slot == slot || b->slot == slot + sizeof(zc_slot)));  // the next one's if it lies free
            CHECK(api->release(zc_token(b)) == 0);
        }
        return 0;
    });
}
}
