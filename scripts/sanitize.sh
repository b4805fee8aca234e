#!/usr/bin/env bash
# The tests under a sanitizer:   sanitize.sh address|thread|undefined [arguments of pytest]
# The stress program under one:  sanitize.sh address|thread|undefined hammer [seconds]
# Whether one can run here:      sanitize.sh address|thread|undefined works
#
# Everything is copied to build/SANITIZER/src and built in place there, so that no other build is touched; the native
# code of the tests is built with the same sanitizer. PYTHON names the interpreter that has the test dependencies;
# ZCPOOL_STRESS_SECONDS and ZCPOOL_STRESS_OPS say how long the stress tests take, ZCPOOL_DEFINES what is defined.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=$(command -v "${PYTHON:-.venv/bin/python}")
case $PYTHON in /*) ;; *) PYTHON=$PWD/$PYTHON ;; esac
export CC=${CC:-gcc}
kind=${1:?address, thread or undefined}
shift
root=$PWD
build=$root/build/$kind
[ "${1-}" != hammer ] || build=$build-hammer

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
    preload="$build/dlopen.so $(runtime libasan.so)"
    # Leaks are the interpreter's; the pool's own books are checked by the tests. Refused sizes are tested.
    export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:detect_stack_use_after_return=1:abort_on_error=1:verify_asan_link_order=0:log_path=$build/report
    export PYTHONMALLOC=malloc # else objects lie in the interpreter's arenas, which hide what is freed
    ;;
thread)
    preload="$build/dlopen.so $(runtime libtsan.so)"
    export TSAN_OPTIONS="suppressions=$root/scripts/tsan.supp:die_after_fork=0:halt_on_error=0:exitcode=66:second_deadlock_stack=1:allocator_may_return_null=1:log_path=$build/report"
    # The runtime of gcc 12 cannot live with much address space randomization; some containers refuse to do without.
    launcher=(setarch "$(uname -m)" -R)
    "${launcher[@]}" true 2>/dev/null || launcher=()
    export ZCPOOL_STRESS_OPS=${ZCPOOL_STRESS_OPS:-2000}
    ;;
undefined)
    export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1:log_path=$build/report
    ;;
*)
    echo "sanitize.sh: $kind is neither address, thread nor undefined" >&2
    exit 2
    ;;
esac

mkdir -p "$build/src"
"$CC" -shared -fPIC -o "$build/dlopen.so" scripts/sanitize-dlopen.c -ldl
run=(env LD_PRELOAD="$preload" ${launcher[@]+"${launcher[@]}"} "$PYTHON")

for _ in 1 2 3 4 5 6 7 8; do # at random addresses, it may work once and not the next time
    "${run[@]}" -c pass && continue
    echo "sanitize.sh: the $kind sanitizer cannot run here; if it is for randomized addresses: allow personality()" \
        "(docker run --security-opt seccomp=unconfined), or set the sysctl vm.mmap_rnd_bits to 28" >&2
    exit 77
done
rm -f "$build"/report*
[ "${1-}" != works ] || exit 0

cd "$build/src"
find . -mindepth 1 -maxdepth 1 ! -name build -exec rm -rf {} +
tar -C "$root" -cf - --exclude=./build --exclude='./.venv*' --exclude=./.git --exclude=./.hypothesis --exclude='*.so' . | tar -xf -

export ZCPOOL_SANITIZE=$kind
[ "$kind" != undefined ] || export ZCPOOL_CFLAGS="-fno-sanitize-recover=undefined ${ZCPOOL_CFLAGS:-}"
"$PYTHON" setup.py --quiet build_ext --inplace

deselected=()
without() { # without REASON TEST...: these tests cannot say anything under this sanitizer
    shift
    local name
    for name; do deselected+=(--deselect "$name"); done
}
# shellcheck source=scripts/sanitize-deselect.sh
. "$root/scripts/sanitize-deselect.sh"

status=0
if [ "${1-}" = hammer ]; then
    PYTHONPATH=$PWD:$PWD/tests "${run[@]}" -m native.hammer "${@:2}" || status=$?
else
    PYTHONPATH=$PWD "${run[@]}" -m pytest -p no:cacheprovider ${deselected[@]+"${deselected[@]}"} "$@" || status=$?
fi
# The reports of every process, also of those whose status nobody looked at. A size that is refused is no fault.
if grep -hv 'AddressSanitizer failed to allocate' "$build"/report* 2>/dev/null; then
    status=66
fi
exit $status
