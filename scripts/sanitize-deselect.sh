# shellcheck shell=bash disable=SC2154  # `kind` comes from sanitize.sh
# Sourced by sanitize.sh: what is left out under which sanitizer, and why.
case $kind in
address)
    without "the allocator of AddressSanitizer does not let go of its locks in a forked child (seen with gcc 12 and
        clang 14), which then waits for ever when another thread was allocating" \
        tests/test_fork.py::test_children_of_a_busy_process_never_hang \
        tests/test_fork.py::test_children_forked_by_busy_threads_never_hang \
        tests/test_fork.py::test_children_of_a_process_busy_in_a_python_backend_never_hang \
        tests/test_fork.py::test_children_at_the_limit_of_a_busy_pool_never_hang \
        tests/test_c_door.py::test_a_fork_in_the_midst_of_native_threads \
        tests/test_native_stress.py::test_a_fork_in_the_middle
    ;;
esac
case $kind in
address | thread)
    without "it counts calls of malloc with a library of its own, in the place of the runtime, which is malloc here" \
        tests/test_quiet.py::test_a_hit_in_python_allocates_nothing
    ;;
esac
case $kind in
thread)
    without "it ends a thread that makes a system call, and the runtime's own locks make some (seen with strace)" \
        tests/test_quiet.py::test_a_hit_and_a_release_enter_no_kernel_while_others_hold_the_lock
    ;;
esac
