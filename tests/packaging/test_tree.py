"""Rules that hold for every file of the repository."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = {".cfg", ".cpp", ".h", ".json", ".jsonl", ".md", ".py", ".sh", ".tmpl", ".toml", ".txt", ""}
# In two parts, so that this file does not contain what it looks for.
FOREIGN = re.compile(
    "|".join(
        [
            r"(?<![\w.~-])/" + r"(?:work|root|tmp/team)/",
            "py" + r"pi\.org",
            "python" + r"hosted\.org",
            r"\.\./" + "shared",
        ]
    )
)


def files() -> list[Path]:
    """Every file that is tracked, or new and not ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def module_level(tree: ast.Module) -> list[ast.AST]:
    """Everything of a module that runs when it is imported."""
    found: list[ast.AST] = []
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        found.append(node)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            waiting.extend(ast.iter_child_nodes(node))
    return found


def reads_environment(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"}


def test_no_file_names_a_machine() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in files()
        if path.suffix in TEXT
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if FOREIGN.search(line)
    ]
    assert found == []


def test_machine_pattern_finds_what_it_should() -> None:
    assert FOREIGN.search('open("/' + 'work/x")')
    assert not FOREIGN.search("https://example.org/" + "work/x")


def test_importing_core_reads_no_environment() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        for path in sorted(ROOT.glob("deepinfer_core/**/*.py"))
        if "templates" not in path.parts
        for node in module_level(ast.parse(path.read_text()))
        if reads_environment(node)
    ]
    assert found == []


def test_tests_are_no_packages() -> None:
    """The repository root is on the path of an editable install, and tests must not be."""
    assert list(ROOT.glob("tests/**/__init__.py")) == []
    assert list(ROOT.glob("plugins/*/tests/**/__init__.py")) == []


def test_scripts_are_executable() -> None:
    for name in ("dev", ".ci/run"):
        assert (ROOT / name).stat().st_mode & 0o111, name
