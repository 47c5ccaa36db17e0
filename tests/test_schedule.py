"""The schedule of the tests themselves: what runs side by side, in which lane, and what of a product by default."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from lanes import JOBS
from pairwise import chosen, pairwise

HERE = Path(__file__).resolve().parent

INNER = """
import time
from pathlib import Path
import pytest
pytestmark = pytest.mark.side_by_side
@pytest.fixture(scope="module")
def shared():
    return "shared"
@pytest.mark.parametrize("seconds", [0.5, 0.51, 0.52])
def test_sleeps(seconds, tmp_path, shared):
    assert shared == "shared" and not list(tmp_path.iterdir())
    (tmp_path / "mine").touch()
    begin = time.monotonic()
    time.sleep(seconds)
    Path(__file__).with_name(f"{seconds}.slept").write_text(f"{begin} {time.monotonic()}")
def test_fails(tmp_path):
    assert tmp_path.name == "another"
def test_skips():
    pytest.skip("on purpose")
@pytest.mark.full
def test_not_asked_for():
    raise SystemExit
"""


def inner(folder: Path, text: str) -> str:
    """What pytest says of a file beside the conftest.py of all tests."""
    (folder / "conftest.py").write_text("from side_by_side import side_by_side  # noqa: F401\n")
    (folder / "test_inner.py").write_text(text)
    words = ["-m", "pytest", "-rA", "-p", "no:cacheprovider", "-n", "0", "-c", str(HERE.parent / "pyproject.toml")]
    done = subprocess.run(
        [sys.executable, *words, f"--rootdir={folder}", str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(HERE)},
    )
    return done.stdout + done.stderr


def test_side_by_side_each_is_reported_in_its_turn(tmp_path: Path) -> None:
    said = inner(tmp_path, INNER)
    assert "1 failed, 3 passed, 1 skipped, 1 deselected in " in said, said
    assert 'assert tmp_path.name == "another"' in said
    assert "AssertionError: assert 'test_fails" in said, said
    slept = [tuple(map(float, path.read_text().split())) for path in sorted(tmp_path.glob("*.slept"))]
    assert len(slept) == 3
    overlapping = [a[0] < b[1] and b[0] < a[1] for a, b in itertools.combinations(slept, 2)]
    assert any(overlapping), slept


def test_what_belongs_to_one_test_does_not_go_into_a_thread(tmp_path: Path) -> None:
    said = inner(tmp_path, "import pytest\n@pytest.mark.side_by_side\ndef test_it(monkeypatch): pass\n")
    assert "it cannot take monkeypatch" in said


def test_lanes_are_files_that_exist() -> None:
    assert {name for name in JOBS if (HERE / name).exists()} == JOBS


@pytest.mark.parametrize("sizes", [(3, 2, 3), (5, 3, 8), (2, 2, 2, 2), (1, 4, 2)])
def test_every_pair_is_chosen(sizes: tuple[int, ...]) -> None:
    rows = chosen(sizes)
    for a, b in itertools.combinations(range(len(sizes)), 2):
        assert {(row[a], row[b]) for row in rows} == set(itertools.product(range(sizes[a]), range(sizes[b])))
    assert len(rows) < max(2, 2 * sorted(sizes)[-1] * sorted(sizes)[-2])


def test_the_rest_of_a_product_is_for_the_full_run() -> None:
    rows = pairwise("abc", [1, 2], [True, False])
    assert [row.values for row in rows] == list(itertools.product("abc", [1, 2], [True, False]))
    quick = [row.values for row in rows if not row.marks]
    assert len(quick) == 6
    assert all([mark.name for mark in row.marks] == ["full"] for row in rows if row.values not in quick)
