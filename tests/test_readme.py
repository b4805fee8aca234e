"""README.md: every example runs, and what it points at exists."""

from __future__ import annotations

import re

import pytest
from snippets import ROOT, Program, check, programs

README = ROOT / "README.md"


@pytest.mark.parametrize("program", programs(README), ids=lambda program: program.name)
def test_the_example_does_what_it_says(program: Program) -> None:
    check(program)


def test_there_are_examples() -> None:
    assert len(programs(README)) >= 5


def test_what_it_tells_to_run_is_in_the_makefile() -> None:
    targets = re.findall(r"make (\w+)\b(?=`|  )", README.read_text())
    assert {"demo", "test"} <= set(targets)
    makefile = (ROOT / "Makefile").read_text()
    for target in targets:
        assert f"\n{target}:" in makefile
