"""The project's own rules about its shape."""

import ast
import io
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

import fedstride as fs

ROOT = Path(__file__).parent.parent
METHODS = sorted(path for path in (ROOT / "fedstride" / "algorithms").glob("*.py") if path.name != "__init__.py")


def code_lines(path: Path) -> int:
    """Lines with code on them: no blanks, comments or docstrings."""
    source = path.read_text()
    used = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            used |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            used -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(used)


@pytest.mark.parametrize("path", METHODS, ids=lambda path: path.stem)
def test_a_method_is_one_short_file(path):
    limit = 130 if path.stem == "fedveca" else 80
    assert code_lines(path) < limit


def test_no_file_asks_for_a_method_by_name():
    for path in (ROOT / "fedstride").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert node.value not in fs.algorithms.names(), f"{path.name}:{node.lineno} names {node.value!r}"


def test_method_pages_are_up_to_date():
    done = subprocess.run([sys.executable, ROOT / "docs" / "generate.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", fs.algorithms.names())
def test_every_method_says_what_it_is(name):
    method = fs.algorithm.REGISTRY[name]
    assert "Rule:" in method.__doc__ and ("Paper:" in method.__doc__ or method.pooled)
