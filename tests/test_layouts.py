"""Datasets as projects publish them (layouts.py): the lines of docs/your-dataset.md give every sample once and right,
in every order. test_mpi_layouts.py does the same on several ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import layouts
import pytest
from layouts import LAYOUTS, LONGER

SHUFFLES = [False, "global", "block"]
FULL = pytest.mark.full
PAGE = Path(__file__).resolve().parent.parent / "docs" / "your-dataset.md"

trusts_the_file = pytest.mark.filterwarnings(r"ignore:Pickle\(allow_pickle=True\)")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """written(name) -> the folder in which the lines find their dataset; written once."""
    known: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in known:
            folder = tmp_path_factory.mktemp(name)
            layouts.write(LAYOUTS[name], folder)
            known[name] = folder
        return known[name]

    return get


@trusts_the_file
@pytest.mark.parametrize(
    ("name", "shuffle"),
    [
        pytest.param(name, shuffle, marks=() if i % 3 == j else FULL)
        for i, name in enumerate(LAYOUTS)
        for j, shuffle in enumerate(SHUFFLES)
    ],
)
def test_every_sample_once_and_right(
    written: Callable[[str], Path], name: str, shuffle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, folder = LAYOUTS[name], written(name)
    right = layouts.truth(layout, folder)
    assert len(right) == layout.samples
    monkeypatch.chdir(folder)
    with layouts.load(layout, shuffle) as loader:
        assert loader.records == layout.samples
        epochs = [[i for batch in loader for i in layouts.check(batch, right)] for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(right)
    assert (epochs[0] == epochs[1]) == (shuffle is False)


def test_what_describes_a_dataset_is_named(
    written: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(written("tape"))
    with caplog.at_level(logging.WARNING, "pario"), layouts.load(LAYOUTS["tape"], "global"):
        assert "left out of the epochs: 'num_examples', which is a record about the dataset" in caplog.text


def test_three_lines_are_enough() -> None:
    lines = {name: layouts.lines_of(layout) for name, layout in LAYOUTS.items()}
    assert {name: n for name, n in lines.items() if n > 3} == LONGER
    assert len(lines) - len(LONGER) >= 20


def test_the_page_shows_these_lines() -> None:
    page = PAGE.read_text()
    shown = [row for row in page.splitlines() if row.startswith("| ") and "pario.Loader(" in row]
    assert shown == [row_of(layout) for name, layout in LAYOUTS.items() if name not in LONGER]
    for name in LONGER:
        assert f"```python\nimport pario\n{LAYOUTS[name].lines}\n```\n" in page


def row_of(layout: layouts.Layout) -> str:
    lines = "<br>".join(f"`{line}`" for line in layout.lines.splitlines())
    return f"| {layout.dataset} | {layout.keys} | {layout.values} | {lines} |"
