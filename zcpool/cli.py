"""The ``zcpool`` command."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["CommandError", "main"]


class _Command(NamedTuple):
    module: str  # has add_arguments(parser) and run(args) -> exit code; imported only when the command is called
    summary: str


_COMMANDS = {
    "demo": _Command("zcpool.demo", "find a face with a real network, frame after frame, in memory of the pool"),
}


class CommandError(Exception):
    """A reason to stop that is the user's to mend: printed in one line, without a traceback.

    Parameters
    ----------
    message : str
        What is wrong and what to do.
    exit_code : int, optional
        2 for something missing or mistyped, 1 for a command that ran and failed.
    """

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments; those of the process by default.

    Returns
    -------
    int
        The exit code: 0 for success, 1 for a command that failed, 2 for something missing or mistyped.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    # The options before a command take no values, so the first word is the command. Only its module is imported.
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    try:
        parser = _parser(chosen)
        args = parser.parse_args(arguments)
        if args.command is None:
            parser.print_help(sys.stderr)
            return 2
        code: int = importlib.import_module(_COMMANDS[args.command].module).run(args)
        return code
    except CommandError as error:
        print(f"zcpool {chosen}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except SystemExit as stop:  # argparse, after --help, --version or a mistake
        return stop.code if isinstance(stop.code, int) else 2


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="zcpool", description="Zero-copy memory pools for neural accelerators.")
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="command")
    for name, command in _COMMANDS.items():
        subparser = commands.add_parser(name, help=command.summary, description=command.summary)
        if name == chosen:
            importlib.import_module(command.module).add_arguments(subparser)
    return parser


class _Version(argparse.Action):
    """Like argparse's own, but the version is looked up only when somebody asks."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from zcpool import __version__

        print(f"zcpool {__version__}")
        parser.exit()
