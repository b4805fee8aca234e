# Declarations of _atomics.h: what each function promises is written there.
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t

cdef extern from "_atomics.h" nogil:
    bint likely "zc_likely"(bint x) noexcept
    bint unlikely "zc_unlikely"(bint x) noexcept

    uint64_t load64 "zc_load_u64"(const uint64_t* p) noexcept
    uint64_t load64_acquire "zc_load_acquire_u64"(const uint64_t* p) noexcept
    uint64_t load64_seq "zc_load_seq_u64"(const uint64_t* p) noexcept
    void store64 "zc_store_u64"(uint64_t* p, uint64_t v) noexcept
    void store64_seq "zc_store_seq_u64"(uint64_t* p, uint64_t v) noexcept
    void store64_release "zc_store_release_u64"(uint64_t* p, uint64_t v) noexcept
    uint64_t add64 "zc_add_u64"(uint64_t* p, uint64_t v) noexcept
    uint64_t sub64 "zc_sub_u64"(uint64_t* p, uint64_t v) noexcept
    uint64_t or64 "zc_or_u64"(uint64_t* p, uint64_t v) noexcept
    uint64_t and64 "zc_and_u64"(uint64_t* p, uint64_t v) noexcept
    bint cas64 "zc_cas_u64"(uint64_t* p, uint64_t* expected, uint64_t desired) noexcept
    void bump64 "zc_bump_u64"(uint64_t* p, uint64_t v) noexcept

    uint32_t load32 "zc_load_u32"(const uint32_t* p) noexcept
    uint32_t load32_acquire "zc_load_acquire_u32"(const uint32_t* p) noexcept
    uint32_t load32_seq "zc_load_seq_u32"(const uint32_t* p) noexcept
    void store32 "zc_store_u32"(uint32_t* p, uint32_t v) noexcept
    void store32_release "zc_store_release_u32"(uint32_t* p, uint32_t v) noexcept
    uint32_t add32 "zc_add_u32"(uint32_t* p, uint32_t v) noexcept
    uint32_t sub32 "zc_sub_u32"(uint32_t* p, uint32_t v) noexcept
    uint32_t or32 "zc_or_u32"(uint32_t* p, uint32_t v) noexcept
    uint32_t and32 "zc_and_u32"(uint32_t* p, uint32_t v) noexcept
    uint32_t swap32 "zc_swap_u32"(uint32_t* p, uint32_t v) noexcept
    bint cas32 "zc_cas_u32"(uint32_t* p, uint32_t* expected, uint32_t desired) noexcept

    uintptr_t loadptr "zc_load_ptr"(const uintptr_t* p) noexcept
    uintptr_t loadptr_acquire "zc_load_acquire_ptr"(const uintptr_t* p) noexcept
    void storeptr "zc_store_ptr"(uintptr_t* p, uintptr_t v) noexcept
    void storeptr_release "zc_store_release_ptr"(uintptr_t* p, uintptr_t v) noexcept
    uintptr_t swapptr "zc_swap_ptr"(uintptr_t* p, uintptr_t v) noexcept
    bint casptr "zc_cas_ptr"(uintptr_t* p, uintptr_t* expected, uintptr_t desired) noexcept

    bint is_finalizing "zc_is_finalizing"() noexcept
    bint claim "zc_claim"(uint32_t* flag) noexcept

    bint trylock "zc_trylock"(uint32_t* lock) noexcept
    void tryunlock "zc_tryunlock"(uint32_t* lock) noexcept
    void spinlock "zc_spinlock"(uint32_t* lock) noexcept
    void prefetch "zc_prefetch"(void* p) noexcept
    void spin "zc_spin"(int* spins) noexcept

    bint mutex_trylock "zc_mutex_trylock"(uint32_t* m) noexcept
    void mutex_lock "zc_mutex_lock"(uint32_t* m) noexcept
    void mutex_unlock "zc_mutex_unlock"(uint32_t* m) noexcept
    void futex_wait "zc_futex_wait"(uint32_t* word, uint32_t seen, int64_t timeout_ns) noexcept
    void futex_wake_all "zc_futex_wake_all"(uint32_t* word) noexcept

    int fd_check "zc_fd_check"(int fd) noexcept
    int fd_dup "zc_fd_dup"(int fd) noexcept
    int64_t now_ns "zc_now_ns"() noexcept
