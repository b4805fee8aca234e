# Sourced by sanitize.sh: what is left out under which sanitizer, and why.
case $kind in
address)
    without "its allocator keeps no lock over a fork (seen in libasan of gcc 12): children of a process with busy
        threads then wait for it for ever" \
        tests/test_fork.py::test_children_of_a_busy_process_never_hang \
        tests/test_fork.py::test_children_forked_by_busy_threads_never_hang \
        tests/test_fork.py::test_children_of_a_process_busy_in_a_python_backend_never_hang \
        tests/test_fork.py::test_children_at_the_limit_of_a_busy_pool_never_hang \
        tests/test_c_door.py::test_a_fork_in_the_midst_of_native_threads \
        tests/test_native_stress.py::test_a_fork_in_the_middle
    ;;
thread)
    without "4096 pools, looked through for each new one: quadratic, and minutes when instrumented" \
        tests/test_lifetime.py::test_more_pools_than_there_is_room_for_is_a_memory_error_that_passes
    ;;
undefined) ;;
esac
