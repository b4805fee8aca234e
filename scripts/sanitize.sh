#!/usr/bin/env bash
# The tests under a sanitizer: sanitize.sh address|thread|undefined [arguments of pytest]
#
# Everything is copied to build/SANITIZER/src and built in place there, so that no other build is touched; the native
# code of the tests is built with the same sanitizer. PYTHON names the interpreter that has the test dependencies;
# ZCPOOL_STRESS_SECONDS and ZCPOOL_STRESS_OPS say how long the stress tests take.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=$(command -v "${PYTHON:-.venv/bin/python}")
CC=${CC:-gcc}
kind=${1:?address, thread or undefined}
shift
root=$PWD
case $PYTHON in /*) ;; *) PYTHON=$root/$PYTHON ;; esac
src=$root/build/$kind/src

mkdir -p "$src"
find "$src" -mindepth 1 -maxdepth 1 ! -name build -exec rm -rf {} +
tar -cf - --exclude=./build --exclude='./.venv*' --exclude=./.git --exclude=./.hypothesis --exclude='*.so' . | tar -xf - -C "$src"
cd "$src"

export ZCPOOL_SANITIZE=$kind CC
[ "$kind" != undefined ] || export ZCPOOL_CFLAGS="-fno-sanitize-recover=undefined ${ZCPOOL_CFLAGS:-}"
"$PYTHON" setup.py --quiet build_ext --inplace

deselected=()
without() { # without REASON TEST...: these tests cannot say anything under this sanitizer
    shift
    local name
    for name; do deselected+=(--deselect "$name"); done
}

runtime() { # the runtime comes first in the process; C++ code that throws needs its library beside it
    local lib
    for lib in "$1" libstdc++.so.6; do
        lib=$("$CC" -print-file-name="$lib")
        [ "${lib#/}" = "$lib" ] || printf '%s ' "$lib"
    done
}

launcher=()
preload=
case $kind in
address)
    preload=$(runtime libasan.so)
    # Leaks are the interpreter's; the pool's own books are checked by the tests. Refused sizes are tested.
    export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:detect_stack_use_after_return=1:abort_on_error=1
    export PYTHONMALLOC=malloc # else objects lie in the interpreter's arenas, which hide what is freed
    ;;
thread)
    preload=$(runtime libtsan.so)
    export TSAN_OPTIONS="suppressions=$root/scripts/tsan.supp:die_after_fork=0:halt_on_error=0:exitcode=66:second_deadlock_stack=1:allocator_may_return_null=1:log_path=$root/build/thread/report"
    rm -f "$root"/build/thread/report*
    launcher=(setarch "$(uname -m)" -R) # the runtime of gcc 12 cannot live with much address space randomization
    export ZCPOOL_STRESS_OPS=${ZCPOOL_STRESS_OPS:-2000}
    ;;
undefined)
    export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
    ;;
*)
    echo "sanitize.sh: $kind is neither address, thread nor undefined" >&2
    exit 2
    ;;
esac
. "$root/scripts/sanitize-deselect.sh"

status=0
env LD_PRELOAD="$preload" PYTHONPATH="$src" "${launcher[@]}" "$PYTHON" -m pytest -p no:cacheprovider \
    "${deselected[@]}" "$@" || status=$?
if [ "$kind" = thread ] && compgen -G "$root/build/thread/report*" >/dev/null; then
    cat "$root"/build/thread/report* # of every process, also of those whose status nobody looked at
    status=66
fi
exit $status
