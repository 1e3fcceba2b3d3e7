"""docs/reliability.md names tests that exist, that carry the id of their row, and that run."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = re.findall(
    r"^\| (T\d+b?) \|(.*)\|$", (ROOT / "docs" / "reliability.md").read_text(), flags=re.MULTILINE
)
NAMED = [
    (row, file, name) for row, rest in ROWS for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", rest)
]


@cache
def functions(file):
    """The module-level functions of a file: name to source."""
    text = (ROOT / file).read_text()
    return {
        node.name: ast.get_source_segment(text, node)
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef)
    }


def test_every_row_has_a_test():
    assert [row for row, _ in ROWS] == list(dict.fromkeys(row for row, _ in ROWS))
    assert {row for row, _ in ROWS} == {row for row, _, _ in NAMED}
    assert all(rest.count("|") == 2 for _, rest in ROWS)


@pytest.mark.parametrize("row, file, name", NAMED, ids=lambda value: str(value).rpartition("/")[2])
def test_a_named_test_exists_and_runs(row, file, name):
    source = functions(file).get(name)
    assert source is not None
    assert re.search(rf"\b{row}\b", source)
    if not name.startswith("test_"):  # a check, which a test hands to the ranks by its name
        assert re.search(rf'"{name}"', (ROOT / file).read_text())
