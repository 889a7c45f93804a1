"""Each kind of request that broke routers of this sort has a test that names it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROWS = (
    [f"C{row:02}" for row in range(1, 13)]
    + [f"C{row:02}" for row in range(14, 24)]
    + [f"C{row:02}" for row in (26, 27, 28, 29, 30, 31, 34, 35, 37, 38, 44, 59, 62, 65, 67, 71, 72)]
)


def test_every_row_of_the_router_is_a_test() -> None:
    named: set[str] = set()
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                said = f"{node.name.upper()} {ast.get_docstring(node) or ''}"
                named |= set(re.findall(r"(?<![A-Z0-9])C\d\d(?!\d)", said.replace("_", " ")))
                for first, last in re.findall(r"C(\d\d) to C(\d\d)", said):
                    named |= {f"C{row:02}" for row in range(int(first), int(last) + 1)}
    assert sorted(set(ROWS) - named) == []
