"""All benchmarks, one after the other: `python benchmarks [--quick] [--out FOLDER]`.

    budgets.py   the budgets of the Python level                       budgets.json
    race         zcpool against other allocators, in C                 race.json, race.png
    test_*.py    zcpool against what Python has, and steady loops      pytest.json

Ends with 1 when a budget is broken or a test fails.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def commands(out: Path, *, quick: bool) -> dict[str, list[str]]:
    """Return what to run, by name."""
    budgets = ["--rounds", "100"] if quick else []
    race = ["--quick"] if quick else []
    pytest = ["--benchmark-max-time=0.1", "--benchmark-min-rounds=3"] if quick else ["--benchmark-max-time=0.5"]
    return {
        "budgets": [str(HERE / "budgets.py"), "--json", f"{out}/budgets.json", *budgets],
        "race": [str(HERE / "race"), "--json", f"{out}/race.json", "--png", f"{out}/race.png", *race],
        "pytest": ["-m", "pytest", str(HERE), "--benchmark-only", f"--benchmark-json={out}/pytest.json", "-q", *pytest],
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks", description="All benchmarks, one after the other.")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds: a first impression")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), metavar="FOLDER", help="for JSON and PNG")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    failed = []
    for name, command in commands(options.out, quick=options.quick).items():
        print(f"\n==== {name}\n", flush=True)
        if subprocess.run([sys.executable, *command], check=False).returncode:
            failed.append(name)
    print(f"\nfigures in {options.out}" + (f"; not everything kept or passed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
