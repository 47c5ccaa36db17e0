"""D3 of tf_study.py: checkpoints straight to a slow store, to a fast one, through a burst buffer, and none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.measure import Section


def plan(folder: Path, rounds: int) -> Iterator[Any]:
    yield from ()


def section(runs: dict[str, Any], into: Section, pick: Any, ratio: Any) -> Section:
    return into


def figure(pyplot: Any, runs: dict[str, Any], pick: Any, paper: float) -> Any:
    raise NotImplementedError
