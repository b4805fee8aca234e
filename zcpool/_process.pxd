# Declarations of _process.h. Only _pool compiles this in: the state exists once.
from libc.stdint cimport int64_t, uint32_t, uint64_t

from zcpool._block cimport ThreadCache

cdef extern from "_process.h" nogil:
    enum:
        CHUNK "ZC_CHUNK"
        CHUNK_SHIFT "ZC_CHUNK_SHIFT"
        POOLS "ZC_POOLS"
        POOL_BITS "ZC_POOL_BITS"
        SLOTS "ZC_SLOTS"
        INDEX_BITS "ZC_INDEX_BITS"
        TAG_BITS "ZC_TAG_BITS"
        PLANT_DOUBLE_PUSH "ZC_PLANT_DOUBLE_PUSH"
        PLANT_LOST_STEAL "ZC_PLANT_LOST_STEAL"

    struct Process:
        void* pools[4096]
        uint32_t n_pools
        uint32_t n_chunks
        uint32_t pools_lock
        uint32_t grow_lock
        uint32_t generation
        uint64_t nobody
        uint32_t fenced
        uint32_t python_work
        uint32_t orphans
        uint64_t free_descriptors
        int (*chores)(void*) noexcept
        const void* (*acquire)(uint64_t pool, size_t nbytes) noexcept nogil
        int (*release)(uint64_t token) noexcept nogil

    Process process "zc_process"

    ctypedef void (*drain_fn)(void* cache) noexcept nogil
    ctypedef void (*forked_fn)() noexcept nogil

    void process_start "zc_process_start"(drain_fn drain, forked_fn forked) noexcept
    void* thread_cache "zc_thread_cache"(uint32_t pool) noexcept
    int thread_adopt "zc_thread_adopt"(uint32_t pool, void* cache) noexcept
    void* thread_id "zc_self_id"() noexcept

    ThreadCache* last_cache "zc_get_last_cache"() noexcept
    void set_last_cache "zc_set_last_cache"(ThreadCache* cache) noexcept
    void fence_all_threads "zc_fence_all_threads"() noexcept

    void backend_enter "zc_backend_enter"() noexcept
    void backend_leave "zc_backend_leave"() noexcept
    bint in_backend "zc_in_backend"() noexcept

    uint32_t next_serial "zc_next_serial"() noexcept
    char* error_text "zc_error_text"() noexcept
    void* gil_leave "zc_gil_leave"() noexcept
    void gil_return "zc_gil_return"(void* left) noexcept

    bint chores_due "zc_chores_due"() noexcept
    void call_python "zc_call_python"() noexcept

    void window "zc_window"() noexcept
    void* descriptor "zc_descriptor"(uint32_t index) noexcept
    void* cold_half "zc_cold"(void* hot) noexcept
    uint32_t grow_descriptors "zc_grow_descriptors"() noexcept

    int slot_take "zc_slot_take"() noexcept
    void slot_give "zc_slot_give"(int slot) noexcept
    void slots_wake "zc_slots_wake"(uint64_t mask) noexcept
    int slot_wait "zc_slot_wait"(int slot, const int* fences, int n_fences, int64_t timeout_ns) noexcept
