# Sourced by sanitize.sh: what is left out under which sanitizer, and why.
case $kind in
address) ;;
thread)
    without "4096 pools, looked through for each new one: quadratic, and minutes when instrumented" \
        tests/test_lifetime.py::test_more_pools_than_there_is_room_for_is_a_memory_error_that_passes
    ;;
undefined) ;;
esac
