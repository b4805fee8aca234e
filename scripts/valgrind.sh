#!/usr/bin/env bash
# Tests of the C door under memcheck, with the package as it is installed. Needs valgrind; arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=$(command -v "${PYTHON:-.venv/bin/python}")
[ $# -gt 0 ] || set -- tests/test_c_door.py -k 'block_is_what or token_dies or sequential or nonsense or limit or fence or pin or native_thread_lives or ended_threads or waiter'
export ZCPOOL_STRESS_SECONDS=${ZCPOOL_STRESS_SECONDS:-0} ZCPOOL_STRESS_OPS=${ZCPOOL_STRESS_OPS:-500}
# The interpreter's own allocator would hide what is freed. Leaks are the interpreter's; the books are checked by the
# tests. Undefined values are not looked for: the interpreter alone is said to use dozens, before any test runs.
exec env PYTHONMALLOC=malloc valgrind --quiet --error-exitcode=99 --leak-check=no --fair-sched=try --undef-value-errors=no \
    --suppressions=scripts/valgrind.supp "$PYTHON" -X faulthandler -m pytest -p no:cacheprovider -q "$@"
