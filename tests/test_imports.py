"""The house rules that reading the code can check: who imports whom, what is imported when, sizes, leftovers."""

import ast
import importlib
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ALLOWED = {
    "formats": {"formats"},
    "calib": {"calib", "formats"},
    "compress": {"compress", "calib", "formats"},
    "runtime": {"runtime", "formats"},
    "recipes": {"recipes"},
}
MAY_RUN_MODELS = {"compress/pipeline.py", "compress/cli.py", "compress/cli_models.py"}
FILES = sorted(path for package in ALLOWED for path in (ROOT / package).rglob("*.py"))
REGISTRIES = {
    "formats.grids": "GRIDS",
    "formats.containers": "CONTAINERS",
    "formats.arch": "ARCHITECTURES",
    "compress.algorithms": "ALGORITHMS",
    "runtime.linear": "KERNELS",
    "runtime.blocks": "ATTENTION",
}


def imported(tree: ast.AST) -> set[str]:
    """Top-level packages that a module imports, wherever the statement stands."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names.add((node.module or "").split(".")[0])
    return names


def forbidden(path: str, source: str) -> set[str]:
    package = path.split("/")[0]
    allowed = ALLOWED[package] | ({"runtime"} if path in MAY_RUN_MODELS else set())
    return (imported(ast.parse(source)) & ALLOWED.keys()) - allowed


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path):
    relative = path.relative_to(ROOT).as_posix()
    assert not forbidden(relative, path.read_text(encoding="utf-8"))


def test_the_rule_itself_notices_a_wrong_import():
    assert forbidden("formats/x.py", "def f():\n    from calib.text import load_text") == {"calib"}
    assert forbidden("compress/plan.py", "import runtime.engine") == {"runtime"}
    assert not forbidden("compress/pipeline.py", "import runtime.engine")
    assert forbidden("runtime/x.py", "import compress.recipe, formats.errors") == {"compress"}


def test_the_command_starts_without_heavy_libraries():
    heavy = "torch transformers numba datasets pydantic matplotlib lm_eval fastapi gguf numpy yaml".split()  # noqa: SIM905
    code = f"import sys, compress.cli; print(sorted(set({heavy!r}) & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("module", REGISTRIES)
def test_every_registered_name_exists(module):
    registry = getattr(importlib.import_module(module), REGISTRIES[module])
    for name in registry:
        assert registry[name] is not None


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_is_left_unfinished(path):
    text = path.read_text(encoding="utf-8")
    left = re.findall(r"\b(?:TODO|FIXME|XXX|HACK)\b|raise NotImplementedError|/work/", text)
    assert not left


def test_sizes():
    """Information, not a verdict: what is larger than it should be."""
    lines = {path: path.read_text(encoding="utf-8").count("\n") for path in FILES}
    print(f"product code: {sum(lines.values())} lines in {len(lines)} files")
    large = [f"{path.relative_to(ROOT)}: {count} lines" for path, count in lines.items() if count > 400]
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno > 80:
                large.append(f"{path.relative_to(ROOT)}: {node.name} is longer than 80 lines")
    if sum(lines.values()) > 10_000:
        large.append(f"product code: {sum(lines.values())} lines (budget 10000)")
    if large:
        warnings.warn("; ".join(large), stacklevel=1)
