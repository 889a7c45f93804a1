"""The docs name code that exists, and the drawn tables are the real ones."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = sorted(
    {
        (page.name, *match)
        for page in (ROOT / "docs").glob("*.md")
        for match in re.findall(r"`([\w/.]+\.py)::([\w.]+)`", page.read_text())
    }
)


def defined(tree: ast.Module) -> set[str]:
    """Top-level functions, classes and constants, and methods as Class.method."""
    out = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            out.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
            out |= {f"{node.name}.{method.name}" for method in methods}
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            out.add(node.target.id)
    return out


@pytest.mark.parametrize(("page", "file", "name"), NAMES)
def test_named_code_exists(page: str, file: str, name: str) -> None:
    path = ROOT / file
    assert path.is_file(), f"docs/{page} names {file}"
    assert name in defined(ast.parse(path.read_text())), f"docs/{page} names {file}::{name}"


def test_journey_names_enough() -> None:
    assert len([row for row in NAMES if row[0] == "journey.md"]) > 20


def test_states_are_current() -> None:
    page = runpy.run_path(str(ROOT / "scripts" / "draw_states.py"))["page"]()
    assert (ROOT / "docs" / "states.md").read_text() == page, "run `python scripts/draw_states.py`"


def test_failures_are_current() -> None:
    page = runpy.run_path(str(ROOT / "scripts" / "draw_failures.py"))["page"]()
    assert (ROOT / "docs" / "failures.md").read_text() == page, "run `python scripts/draw_failures.py`"


def test_the_contract_is_current() -> None:
    """The page says of each request what the suite checks, and each stated difference names a test that exists."""
    drawn = runpy.run_path(str(ROOT / "scripts" / "draw_contract.py"))
    assert (ROOT / "docs" / "contract.md").read_text() == drawn["page"](), "run `python scripts/draw_contract.py`"
    assert all((ROOT / where).is_file() for _, _, where in drawn["GENERAL"])


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))])
def test_links_resolve(page: str) -> None:
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", path.read_text()):
        assert (path.parent / target).exists(), f"{page} links to {target}"
