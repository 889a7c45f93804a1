"""Who may import what, by walking the source, and by looking at what a fresh interpreter loaded."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "kvferry"
FILES = sorted(SRC.rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def importers(package: str) -> set[str]:
    return {
        str(path.relative_to(SRC))
        for path in FILES
        if any(name == package or name.startswith(package + ".") for name in imports(path))
    }


def test_only_the_connector_imports_vllm() -> None:
    # bench/baseline.py is a vLLM plugin that quiets upstream's connectors for a fair comparison.
    others = {file for file in importers("vllm") if not file.startswith(("connector/", "render/"))}
    # bench/vllm_serve.py starts vLLM's load generator.
    assert others <= {"bench/baseline.py", "bench/vllm_serve.py"}


def test_only_the_fabric_imports_nixl() -> None:
    for package in ("nixl", "nixl_cu12", "nixl_cu13"):
        assert importers(package) <= {"transfer/nixl.py"}


@pytest.mark.parametrize("path", sorted((SRC / "protocol").glob("*.py")), ids=lambda path: path.name)
def test_protocol_is_pure(path: Path) -> None:
    banned = {"socket", "threading", "time", "logging", "asyncio", "zmq", "os", "random", "torch", "vllm", "aiohttp"}
    assert not {name.split(".")[0] for name in imports(path)} & banned
    layers = {name for name in imports(path) if name.startswith("kvferry.")}
    assert all(name.startswith("kvferry.protocol") or name in ("kvferry.ids", "kvferry.errors") for name in layers)


ROUTER = {
    "http": set(),
    "requests": set(),
    "seen": set(),
    "choice": {"requests"},
    "engines": {"choice", "requests", "http"},
    "dispatch": {"engines", "choice", "requests", "http", "seen"},
    "render": {"dispatch", "engines", "choice", "requests", "http", "seen"},
    "admin": {"dispatch", "engines", "http", "seen"},
}
"""Each package of the router -> those that it may import."""


@pytest.mark.parametrize("package", ROUTER)
def test_the_routers_packages_import_one_way(package: str) -> None:
    assert set(ROUTER) == {path.parent.name for path in (SRC / "router").glob("*/__init__.py")}
    wanted = {
        name.split(".")[2]
        for path in (SRC / "router" / package).glob("*.py")
        for name in imports(path)
        if name.startswith("kvferry.router.")
    }
    assert (wanted & set(ROUTER)) - {package} <= ROUTER[package]


def test_the_command_line_is_light() -> None:
    heavy = ("torch", "vllm", "transformers", "zmq", "aiohttp")
    code = f"import sys, kvferry.cli; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))
def test_files_stay_small(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 600
