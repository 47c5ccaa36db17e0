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

import numpy as np
import pytest
from launch import run_job

import pario
from pario.checkpoint.partner import _BYTES, _WHICH, DESCRIBE, READ, Offers
from pario.comm.solo import Solo
from pario.wire.client import Client
from pario.wire.frames import Word

JOB = str(Path(__file__).resolve().parent / "partner_job.py")
LIMIT_S = 60


def test_only_what_is_offered_is_sent(tmp_path: Path) -> None:
    """Whoever knows the job's secret gets the files of the node's part, and no other byte."""
    with pario.Checkpointer("self", slow=tmp_path / "slow", fast=tmp_path / "fast") as ckpt:
        name = ckpt.save(3, {"a": np.arange(1000)})._attempt.name
    (run,) = (tmp_path / "fast").iterdir()
    offers = Offers(Solo(), str(run), b"s" * 32, 5.0)
    clients = [Client(offers.server.address, secret, 5.0) for secret in (b"s" * 32, b"other" * 8)]

    def kind_of(kind: int, body: bytes) -> int:
        return clients[0].call(kind, body)[0]

    try:
        which = _WHICH.pack(3, name.id.encode())
        size = next(run.glob("*/node-00000.h5")).stat().st_size
        whole = which + _BYTES.pack(0, 0, size)
        assert kind_of(DESCRIBE, which) == Word.LATER
        offers.put(name._replace(step=4), False)
        assert kind_of(DESCRIBE, _WHICH.pack(4, name.id.encode())) == Word.ABSENT
        with pytest.raises(OSError, match="closed"):
            kind_of(READ, whole)  # not described yet
        offers.put(name, True)
        assert [kind_of(DESCRIBE, which), kind_of(READ, whole)] == [Word.HERE, Word.HERE]
        for number, offset, nbytes in ((1, 0, 1), (0, 1, size), (0, size, 1), (0, 0, 9 << 20), (0, 1 << 63, 1)):
            with pytest.raises(OSError, match="closed"):
                kind_of(READ, which + _BYTES.pack(number, offset, nbytes))
        for kind, body in ((READ, which), (DESCRIBE, b""), (7, b"x"), (DESCRIBE, which[:-1])):
            with pytest.raises(OSError, match="closed"):
                kind_of(kind, body)
        for wrong in (b"../../../../etc/", b"\xff" * 16):
            assert kind_of(DESCRIBE, _WHICH.pack(3, wrong)) == Word.LATER
        with pytest.raises(OSError):
            clients[1].call(DESCRIBE, which)
    finally:
        for client in clients:
            client.close()
        offers.server.leave()


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
            with suppress(ProcessLookupError):  # mpiexec has seen the first one die, and was quicker
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
    """docs/checkpoints.md: PARIO_KILLS=200 for 30 in all."""
    rng = random.Random(2)
    for k in range(max(1, int(os.environ.get("PARIO_KILLS", "20")) // 20)):
        (tmp_path / str(k)).mkdir()
        lose_a_node(tmp_path / str(k), rng, 5, 4, options)
        shutil.rmtree(tmp_path / str(k))
