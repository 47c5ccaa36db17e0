"""Scripts that close nothing end with the right status, whatever they use and however they end (tests/exits.py).

The oracle is the system: the exit status of the process, the threads that the interpreter lists after all exit handlers
of pario, and what HDF5 says is open. PARIO_EXITS : how often `full` repeats each cell; the bar is 20.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from exits import FEATURES, WAYS, make_set
from launch import run_job
from pace import Pace

ROOT = Path(__file__).parents[1]
SCRIPT = str(ROOT / "tests" / "exits.py")
ENV = {"PYTHONPATH": str(ROOT)}
LIMIT_S = 10.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("exits")
    make_set(made)
    return made


def end_all(folder: Path, repeats: int, *cells: str) -> str:
    """What the runs print, if all end as they should."""
    command = [sys.executable, SCRIPT, str(folder), str(repeats), f"{LIMIT_S * Pace().slowness:g}", *cells]
    done = subprocess.run(command, env={**os.environ, **ENV}, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_scripts_that_close_nothing(folder: Path) -> None:
    cells = (
        "key:break",
        "ring:exception",
        "slow decoder:Ctrl-C",
        "Checkpointer, fast:sys.exit",
        "drop-in, will_read:break",
    )
    assert "5 cells x 1: 0 of 5 wrong" in end_all(folder, 1, *cells)


@pytest.mark.full
def test_every_feature(folder: Path) -> None:
    """All ways by one process: each feature runs once before, for its kernels."""
    repeats = int(os.environ.get("PARIO_EXITS", "1"))
    there = [each for each in FEATURES if each != "torch"]  # that import takes longest: tests of frameworks have it
    cells = [f"{each}:{way}" for way in WAYS for each in there]
    assert f"{len(cells)} cells x {repeats}: 0 of" in end_all(folder, repeats, *cells)


@pytest.mark.full
@pytest.mark.parametrize("way", ["break", "exception", "sys.exit", "whole epoch"])
@pytest.mark.parametrize("feature", ["key", "ring", "memory tier", "Reader, keys", "Checkpointer, fast"])
def test_on_two_ranks(folder: Path, feature: str, way: str) -> None:
    done = run_job(2, [SCRIPT, str(folder), f"{feature}:{way}"], limit_s=60, env=ENV)
    assert done.status == WAYS[way], done.output
    assert "threads run" not in done.output
    assert "HDF5 has" not in done.output
