"""The PyTorch-style example runs unmodified both ways, with the same records."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from required import framework

ROOT = Path(__file__).parents[1]
LESSON = str(ROOT / "examples" / "pytorch_style.py")


def run(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("example") / "set")
    assert "150 records" in run(LESSON, "--make", "--records", "150", "--bytes", "9000", "--epochs", "1", path)
    return path


def told(output: str) -> list[str]:
    """What does not depend on the clock or on who reads."""
    found = re.findall(r"epoch \d+: .*, checksum \w+; \w+", output)
    assert len(found) == len(re.findall(r": [\d,]+ records/s, [\d,]+ MB/s", output)) == 3
    return found


def test_both_ways(made: str) -> None:
    theirs = run(LESSON, made, "--cold")
    mine = run("-m", "pario", "run", LESSON, made, "--cold")
    assert told(mine) == told(theirs)
    assert told(mine)[0].startswith("epoch 0: 150 records, 1,350,000 bytes")
    assert [line.rsplit(" ", 1)[1] for line in told(mine)] == ["cold", "warm", "warm"]
    assert "pario.lmdb" in mine
    assert "pario" not in theirs


def test_the_data_file_itself(made: str) -> None:
    file = os.path.join(made, "data.mdb")
    assert told(run("-m", "pario", "run", LESSON, file)) == told(run(LESSON, file))


@pytest.mark.frameworks
def test_under_a_data_loader(made: str) -> None:
    framework("torch")
    words = (made, "--workers", "2")
    assert told(run("-m", "pario", "run", LESSON, *words)) == told(run(LESSON, *words)) == told(run(LESSON, made))
