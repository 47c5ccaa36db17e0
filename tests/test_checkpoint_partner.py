"""Jobs of several nodes that lose one of them, or two neighbours, before the drain: what a restart finds."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from launch import run_job

JOB = str(Path(__file__).resolve().parent / "partner_job.py")
LIMIT_S = 60


def said(folder: Path) -> int:
    """The newest step of which the job has said that its copies stand."""
    with suppress(FileNotFoundError):
        return int((folder / "said").read_text())
    return -1


def lose_a_node(folder: Path, rng: random.Random, ranks: int, nodes: int, options: dict[str, Any]) -> None:
    lost = rng.randrange(nodes)
    env = {"MPIR_CVAR_NUM_CLIQUES": str(nodes), "PYTHONPATH": os.path.dirname(os.path.dirname(JOB))}

    def kill(_: int) -> None:
        """All processes of a node at once, when two steps have copies, while one is copied."""
        end = time.monotonic() + LIMIT_S
        while said(folder) < 2 and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(rng.random() * 0.1)
        for path in folder.glob(f"pid-{lost}-*"):
            os.kill(int(path.read_text()), signal.SIGKILL)

    job = run_job(ranks, [JOB, str(folder), "save", json.dumps(options)], limit_s=LIMIT_S, env=env, meanwhile=kill)
    known = said(folder)
    assert job.status, job.output
    assert known >= 2, job.output
    shutil.rmtree(folder / f"fast-{lost}")
    job = run_job(ranks, [JOB, str(folder), "restart", str(lost)], limit_s=LIMIT_S, env=env)
    assert job.status == 0, job.output
    first, second = next(line.split()[1:] for line in job.output.splitlines() if line.startswith("found"))
    assert int(first) >= known
    assert int(second) == 0
    missing = re.findall(r"the parts of nodes? ([\d, ]+) are on no fast tier", job.output)
    assert str(lost) in missing[-1].split(", ")  # the copy of the other one's part lies on a third node


def test_a_node_is_killed_and_its_fast_tier_is_gone(tmp_path: Path) -> None:
    lose_a_node(tmp_path, random.Random(1), 3, 3, {})


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, {"incremental": True}, {"compress": "zstd"}], ids=str)
def test_nodes_are_killed_at_many_moments(tmp_path: Path, options: dict[str, Any]) -> None:
    rng = random.Random(2)
    for k in range(int(os.environ.get("PARIO_KILLS", "7"))):
        (tmp_path / str(k)).mkdir()
        lose_a_node(tmp_path / str(k), rng, 5, 4, options)
        shutil.rmtree(tmp_path / str(k))
