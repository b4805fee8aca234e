"""The pages in docs/: every example runs, the Cython backend compiles and works, and links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from snippets import ROOT, Program, check, files, programs

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))


@pytest.mark.parametrize(
    "program", [found for page in PAGES for found in programs(page)], ids=lambda program: program.name
)
def test_the_example_does_what_it_says(program: Program) -> None:
    check(program)


def test_every_page_is_in_the_contents() -> None:
    contents = (ROOT / "mkdocs.yml").read_text()
    assert PAGES
    for page in PAGES:
        assert page.name in contents


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    anchors = {other: {_slug(heading) for heading in _headings(other)} for other in [ROOT / "README.md", *PAGES]}
    for link in re.findall(r"\]\((?!https?://)([^)]+)\)", page.read_text()):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors[target], link


@pytest.mark.skipif(sys.platform != "linux", reason="memfd_create is of Linux")
def test_the_cython_backend_compiles_and_works(tmp_path: Path) -> None:
    pytest.importorskip("Cython")
    pytest.importorskip("setuptools")
    shown = files(DOCS / "backends.md")
    for name in ("setup.py", "memfd.pyx", "use_memfd.py"):
        (tmp_path / name).write_text(shown[name])
    for command in (["setup.py", "-q", "build_ext", "--inplace"], ["-W", "error", "use_memfd.py"]):
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["True", "1048576", "hello"]


def _headings(page: Path) -> list[str]:
    return re.findall(
        r"^#+ (.+)$", re.sub(r"```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE), re.MULTILINE
    )


def _slug(heading: str) -> str:
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.lower())).strip("-")
