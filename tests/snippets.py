"""The examples in the documents: found, run, and held to what they say they print.

The Python blocks of one section are one program, run in an interpreter of its own. A line ``print(...)  # text``
says what it prints; a block whose first line is a comment with a file name is a file for the reader, not a program.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tokenize
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]

_FENCE = re.compile(r"```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_FILE = re.compile(r"# (\S+\.\w+)\n")


class Program(NamedTuple):
    name: str
    code: str


def files(page: Path) -> dict[str, str]:
    """Return the files that a page shows, by name."""
    named = ((_FILE.match(code), code) for _, code in _FENCE.findall(page.read_text()))
    return {match[1]: code for match, code in named if match}


def programs(page: Path) -> list[Program]:
    """Return the Python examples of a page, one program for each section."""
    found = []
    text = page.read_text()
    prose = _FENCE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    headings = [*_HEADING.finditer(prose)]
    ends = [*(match.start() for match in headings[1:]), len(text)]
    for heading, end in zip(headings, ends):
        blocks = _FENCE.findall(text[heading.end() : end])
        code = "\n".join(code for language, code in blocks if language == "python" and not _FILE.match(code))
        if code:
            found.append(Program(f"{page.name}: {heading[1]}", code))
    return found


def expected_output(code: str) -> list[str]:
    """Return what the comments behind ``print(...)`` say."""
    lines = code.splitlines()
    tokens = tokenize.generate_tokens(io.StringIO(code).readline)
    comments = [token for token in tokens if token.type == tokenize.COMMENT]
    return [token.string[1:].strip() for token in comments if lines[token.start[0] - 1].lstrip().startswith("print(")]


def check(program: Program) -> None:
    """Run an example: it succeeds, prints what its comments say, and warns of nothing."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program.code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.curdir for path in sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == expected_output(program.code)
