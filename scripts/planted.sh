#!/usr/bin/env bash
# Is the stress test worth anything? Builds variants of the extension below build/planted, each with one fault planted
# by a macro, and runs tests/native/hammer.py on each: planted faults must be found, and what is no fault must pass.
# With arguments, only the variants of those names. SECONDS_EACH (default 20) is the time a variant gets.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=$(command -v "${PYTHON:-.venv/bin/python}")
case $PYTHON in /*) ;; *) PYTHON=$PWD/$PYTHON ;; esac
seconds=${SECONDS_EACH:-20}
wanted=" $* "
src=$PWD/build/planted/src
failed=0
tried=0

mkdir -p "$src"
find "$src" -mindepth 1 -maxdepth 1 ! -name build -exec rm -rf {} +
tar -cf - --exclude=./build --exclude='./.venv*' --exclude=./.git --exclude=./.hypothesis --exclude='*.so' . | tar -xf - -C "$src"
cd "$src"

try() { # try NAME OUTCOME MACRO...: build with the macros and hammer; OUTCOME is found or nothing
    local name=$1 outcome=$2 variant said first outcome_is status=0
    shift 2
    case $wanted in "  " | *" $name "*) ;; *) return 0 ;; esac
    tried=1
    variant=build/$(IFS=- && echo "$*")
    if [ -d build/default/cython ] && [ ! -d "$variant" ]; then # the macros are the C compiler's: Cython need not run again
        mkdir -p "$variant"
        cp -a build/default/cython "$variant"
    fi
    ZCPOOL_DEFINES="$*" "$PYTHON" setup.py --quiet build_ext --inplace
    said=$(PYTHONPATH=$src:$src/tests timeout --kill-after=5 $((seconds + 120)) "$PYTHON" -m native.hammer "$seconds" 2>&1) || status=$?
    first=$(printf '%s\n' "$said" | grep -m 1 '^stress: ' || true)
    said=${first:-${said##*$'\n'}}
    case $status in # what is broken may also crash, before anything is said, or hang after it
    0) outcome_is=nothing ;;
    3) outcome_is=found ;;
    124 | 137) said="$said; then it hung" outcome_is=${first:+found} ;;
    134 | 139) said="$said; it crashed" outcome_is=found ;;
    *) outcome_is=broken ;;
    esac
    if [ "$outcome" = "$outcome_is" ]; then
        printf 'as it should be: %s: %s (status %d)\n' "$name" "$said" "$status"
    else
        printf 'NOT AS IT SHOULD BE: %s, %s expected: %s (status %d)\n' "$name" "$outcome" "$said" "$status"
        failed=1
    fi
}

try none nothing
try narrow-tags nothing ZC_TAG_BITS=4 # wraps all the time; a popper would have to sleep through exactly one wrap
try fenced nothing ZC_NO_MEMBARRIER # owners enter their caches by a locked exchange
try no-tags found ZC_TAG_BITS=0 ZC_PLANT_WINDOW
try double-push found ZC_PLANT_DOUBLE_PUSH=1
try lost-steal found ZC_PLANT_LOST_STEAL=1
((tried)) || { echo "planted.sh: no variant $*: there are none, narrow-tags, fenced, no-tags, double-push, lost-steal" >&2; exit 2; }
exit $failed
