"""The source keeps its shape: imports go one way, modules and functions stay small."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "embedsvc"
MODULES = sorted(PACKAGE.rglob("*.py"))

# Lower numbers know nothing of higher ones; equal numbers only of their own package.
LAYERS = {
    "errors": 0,
    "fields": 0,
    "config": 1,
    "configfile": 2,
    "terminal": 3,
    "changes": 3,
    "models": 2,
    "metrics": 2,
    "totals": 3,
    "engine": 3,
    "tuning": 4,
    "routing": 4,
    "tokenization": 4,
    "calls": 4,
    "keys": 4,
    "vectors": 4,
    "vector_cache": 4,
    "loading": 5,
    "deployment": 6,
    "intake": 5,
    "traffic": 7,
    "service": 8,
    "verification": 9,
    "recommendation": 9,
    "http": 9,
    "supervisor": 10,
    "bench": 10,
    "cli": 11,
    "reference": 12,
}
VAGUE_NAMES = {"utils", "util", "common", "base", "helpers", "helper", "manager", "misc"}
MAX_MODULE_LINES = 320
MAX_FUNCTION_LINES = 40


def part_of(name: str) -> str:
    """Return the layer's name of a dotted module, e.g. `engine` of `embedsvc.engine.policy`."""
    return name.split(".")[1] if "." in name else ""


def imports_of(path: Path) -> set[str]:
    """Return the dotted names inside the package that a module imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.startswith("embedsvc.")}


def relative(path: Path) -> str:
    """Return the path as shown in test ids."""
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_imports_go_one_way(path: Path) -> None:
    """A module imports its own package and lower layers only."""
    dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    own = part_of(dotted)
    if own == "__init__":
        return
    imported = {part_of(name) for name in imports_of(path)} - {own, "__version__"}

    assert {name for name in imported if LAYERS[name] >= LAYERS[own]} == set()


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_module_names_say_something(path: Path) -> None:
    """No module or package has a name that fits everything."""
    assert VAGUE_NAMES.isdisjoint(path.relative_to(PACKAGE).with_suffix("").parts)


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_modules_and_functions_are_small(path: Path) -> None:
    """Modules and functions stay within the limits of the house style."""
    text = path.read_text()
    functions = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    long = [f.name for f in functions if (f.end_lineno or 0) - f.lineno >= MAX_FUNCTION_LINES]

    assert long == []
    assert len(text.splitlines()) <= MAX_MODULE_LINES
