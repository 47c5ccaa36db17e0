"""What others may have made, damaged at random: every surface takes it or refuses it (fuzz_surfaces.py). And the page
on security: what it says of tests.

`pytest -m hostile` runs everything that plays somebody hostile; the surfaces are fuzzed for longer by hand.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from fuzz_surfaces import SURFACES, fuzz

pytestmark = pytest.mark.hostile
HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "limits.md"


def test_a_few_hundred_messages_to_each_surface() -> None:
    for name in SURFACES:
        taken = fuzz(name, 200, seed=0)
        assert taken < 200, f"{name} takes everything"


@pytest.mark.full
@pytest.mark.parametrize("name", SURFACES)
def test_twenty_thousand_messages_to_each_surface(name: str) -> None:
    taken = fuzz(name, 20_000, seed=1)
    assert 50 < taken < 20_000, "some are good enough to get further"


def test_each_row_of_the_threat_table_names_tests_that_exist() -> None:
    table = PAGE.read_text().split("## Threats", 1)[1].split("\n## ", 1)[0]
    rows = [line for line in table.splitlines() if line.startswith("|")][2:]
    assert len(rows) >= 20
    for row in rows:
        named = re.findall(r"`(test_\w+)\.py(?:::(test_\w+))?`", row)
        assert named, f"no test: {row}"
        for file, name in named:
            (path,) = HERE.rglob(f"{file}.py")
            tree = ast.parse(path.read_text())
            found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
            assert not name or name in found, f"{file}.py has no {name}"
        assert any(name for _, name in named), f"a file is no test: {row}"


def test_whoever_looks_for_it_finds_the_page() -> None:
    assert "docs/limits.md" in (HERE.parent / "SECURITY.md").read_text()
