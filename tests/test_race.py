"""The race of benchmarks/race: what it measures is what it says. No test depends on how long anything takes."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from race import memory, native, peers, traces
from race.measure import Contest, Effort, hold, run, two_cpus
from race.patterns import PATTERNS, Case
from race.verdict import BROKEN, EVEN, KEPT, UNKNOWN, Budget, Figure, budget_of, judge

import zcpool

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the race is run on Linux"),
    pytest.mark.skipif("ZCPOOL_SANITIZE" in os.environ, reason="a library that is not instrumented hides its locks"),
]

RACE = Path(native.__file__).parent
KIB, MIB = 1 << 10, 1 << 20
SHORT = Effort(rounds=5, least_rounds=2, seconds=0.01, turn_ns=1000)
PATTERN = {pattern.name: pattern for pattern in PATTERNS}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return native.compile_race(tmp_path_factory.mktemp("race"))


@pytest.fixture(scope="module")
def library(path: Path) -> ctypes.CDLL:
    return native.open_race(path)


@pytest.fixture
def pool() -> Iterator[zcpool.Pool]:
    with zcpool.Pool() as pool:
        yield pool
        assert pool.stats().in_use_blocks == 0  # every contest gives back what it took


@pytest.fixture
def contenders(pool: zcpool.Pool) -> list[peers.Contender]:
    (glibc,), _ = peers.open_peers(("glibc",))
    return [glibc, *peers.our_ways(pool)]


def small_cases(name: str) -> list[Case]:
    return PATTERN[name].cases((256, 600_000))


# ---- contests --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pair", "touched", "handoff", "larson", "traces"])
def test_every_contender_runs_every_round(library, contenders, name):
    pattern = PATTERN[name]
    with two_cpus(library) as two:
        if pattern.two_threads and not two:
            pytest.skip("one CPU")
        for case in small_cases(name):
            contest = hold(library, pattern, case, contenders, SHORT)
            assert set(contest.samples) == {"glibc", peers.TABLE, peers.INLINED}
            for samples in contest.samples.values():
                assert SHORT.least_rounds <= len(samples) <= SHORT.rounds
                assert min(samples) > 0


def test_both_ways_acquire_from_the_pool(library, pool, contenders):
    job = partial(native.make_job, (4096,))
    for contender in contenders:
        before = pool.stats().acquires
        run(library, "turn_pairs", [contender], [job()], SHORT)
        assert (pool.stats().acquires > before) == (contender.name in peers.OURS)


def test_live_blocks_are_distinct_and_released_in_the_end(library, pool, contenders):
    """A trace of acquires alone leaves its blocks in the slots."""
    count = 50
    ops = (native.COp * count)(*((slot, 1000 + slot) for slot in range(count)))
    for contender in contenders:
        job = native.make_job(ops=ops, slot_count=count)
        value, once = ctypes.c_double(), ctypes.c_size_t(1)
        struct = ctypes.byref(contender.struct)
        turn = native.address(library.turn_trace)
        library.race_run(turn, struct, ctypes.byref(job), ctypes.byref(once), 1, 1, ctypes.byref(value))
        assert len(set(job.slots[:count])) == count
        assert pool.stats().in_use_blocks == (count if contender.name in peers.OURS else 0)
        library.race_clear(struct, ctypes.byref(job))
        assert job.slots[:count] == [None] * count
        assert pool.stats().in_use_blocks == 0


def test_every_page_is_touched(path):
    """Resident memory says so: what is held at the peak is at least what is live."""
    trace = traces.pipeline(1)
    held = memory.measure("glibc", trace.name, path)
    assert held.reserved is None
    assert held.charged == held.resident > trace.peak_bytes * 0.95
    held = memory.measure(peers.TABLE, trace.name, path)
    assert held.charged == held.reserved
    assert held.reserved >= trace.peak_bytes


# ---- traces ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2])
def test_traces_balance(seed):
    for trace in traces.all_traces(seed):
        live: dict[int, int] = {}
        peak = 0
        for slot, nbytes in trace.ops:
            if nbytes:
                assert slot not in live
                live[slot] = nbytes
                peak = max(peak, sum(live.values()))
            else:
                del live[slot]
        assert not live
        assert peak == trace.peak_bytes >= 64 * MIB
        assert max(slot for slot, _ in trace.ops) < trace.slots


def test_traces_are_the_same_for_a_seed():
    assert traces.all_traces(1) == traces.all_traces(1)
    assert traces.all_traces(1) != traces.all_traces(2)


# ---- verdicts --------------------------------------------------------------------------------------------------


def contest(pattern: str, nbytes: int, **samples: list[float]) -> Contest:
    names = {"table": peers.TABLE, "inlined": peers.INLINED}
    return Contest(pattern, "", nbytes, {names.get(name, name): values for name, values in samples.items()})


def test_ratios_are_taken_within_rounds():
    """A neighbour made the second round slow for all: the ratio does not see it."""
    (row,) = judge(contest("pair", 256, glibc=[10, 80, 10], tcmalloc=[5, 40, 5], table=[5.25, 42, 5.25]))
    assert row.fastest == "tcmalloc"
    assert row.ratio == Figure(1.05, 1.05, 1.05)
    assert row.verdict == KEPT


def test_controls_are_no_peers():
    (row,) = judge(contest("pair", 256, **{peers.FLOOR: [1, 1]}, glibc=[10, 10], table=[20, 20]))
    assert row.fastest == "glibc"
    assert row.ratio.median == 2
    assert row.verdict == BROKEN


@pytest.mark.parametrize(
    ("pattern", "way", "nbytes", "limit"),
    [
        ("pair", peers.TABLE, 256 * KIB, 1.1),
        ("pair", peers.TABLE, 512 * KIB, 0.5),
        ("pair", peers.TABLE, MIB, 0.5),
        ("pair", peers.TABLE, 2 * MIB, 1.0),
        ("pair", peers.INLINED, 256 * KIB, 0.65),
        ("mixed", peers.INLINED, 0, 0.05),
        ("handoff", peers.TABLE, 256, 1.0),
        ("threads", peers.TABLE, 256, 1.8),
        ("memory", peers.TABLE, 64 * MIB, 1.1),
    ],
)
def test_budgets(pattern, way, nbytes, limit):
    assert budget_of(pattern, way, nbytes).limit == limit


@pytest.mark.parametrize(
    ("budget", "figure", "verdict"),
    [
        (Budget(1.0), Figure(1.0, 0.9, 1.2), KEPT),
        (Budget(1.0), Figure(1.01, 0.9, 1.2), BROKEN),
        (Budget(1.0, even=True), Figure(1.01, 0.9, 1.2), EVEN),
        (Budget(1.0, even=True), Figure(1.2, 1.01, 1.3), BROKEN),
        (Budget(1.8, at_least=True), Figure(1.8, 1.7, 1.9), KEPT),
        (Budget(1.8, at_least=True), Figure(1.79, 1.7, 1.9), BROKEN),
    ],
)
def test_verdicts(budget, figure, verdict):
    assert budget.verdict(figure) == verdict


def test_mixed_sizes_are_held_against_those_that_give_memory_back():
    (row,) = judge(contest("mixed", 0, mimalloc=[1, 1], glibc=[100, 100], jemalloc=[50, 50], table=[2, 2]))
    assert (row.fastest, row.ratio.median, row.verdict) == ("jemalloc", 0.04, KEPT)


def test_without_two_cores_scaling_is_not_measured():
    (row,) = judge(contest("threads", 256, glibc=[], table=[]))
    assert row.verdict == UNKNOWN


def test_memory_is_one_figure():
    (row,) = judge(contest("memory", 100 * MIB, glibc=[110.0], mimalloc=[150.0], table=[120.0]))
    assert row.fastest == "glibc"
    assert row.ratio.median == pytest.approx(120 / 110)
    assert row.verdict == KEPT


# ---- as a command ----------------------------------------------------------------------------------------------


def race(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(RACE), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_command_writes_what_it_prints(tmp_path):
    pytest.importorskip("rich")
    done = race("--only", "pair", "--sizes", "4KiB", "--rounds", "5", "--json", tmp_path / "race.json")
    assert done.returncode in (0, 1), done.stderr
    result = json.loads((tmp_path / "race.json").read_text())
    assert done.returncode == any(row["verdict"] == BROKEN for row in result["rows"])
    assert [row["way"] for row in result["rows"]] == [peers.TABLE, peers.INLINED]
    assert "4 KiB" in done.stdout
    assert result["complete"] == ("incomplete" not in done.stdout)


def test_a_missing_peer_is_said(monkeypatch, capsys):
    pytest.importorskip("rich")
    from race import report

    absent = peers.Peer("absent", "apt install libabsent", lambda: "libabsent.so.7", "malloc", "free", str)
    monkeypatch.setattr(peers, "PEERS", (absent,))
    found, missing = peers.open_peers()
    assert not found
    report.conclude(report.make_console(), [], missing)
    said = capsys.readouterr().out
    assert "incomplete" in said
    assert "absent" in said
    assert "apt install libabsent" in said


def test_an_unknown_pattern_is_refused():
    pytest.importorskip("rich")
    done = race("--only", "marathon")
    assert done.returncode == 2
    assert "no pattern marathon" in done.stderr
