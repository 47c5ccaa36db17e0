"""Descriptions of checkpoints that lie: their checksums fit, what they say does not. Restoring reports damage or works;
nothing else is raised, nothing is read outside the files, and no memory is taken for what is not there."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from checkpoints import rich_tree
from fuzz_surfaces import spoil

import pario
from pario.checkpoint.manifest import sum_of

pytestmark = pytest.mark.hostile


def forged(path: Path, body: Any) -> str:
    """Write a description whose own checksum fits; returns that of the file."""
    rest = b' "body": ' + json.dumps(body).encode() + b"}\n"
    data = b'{"xxh3": "%016x",\n' % sum_of(rest) + rest
    path.write_bytes(data)
    return f"{sum_of(data):016x}"


def check_lies(folder: Path, count: int, seed: int, **options: Any) -> None:
    with pario.Checkpointer("self", slow=folder, keep=1, **options) as ckpt:
        for step in (1, 2):
            ckpt.save(step, rich_tree()).wait()
        (made,) = folder.glob("step-000000000002-*")
        paths = [made / "node-00000.json", made / "manifest.json"]
        bodies = [path.read_bytes() for path in paths]
        rng = random.Random(seed)
        damaged = 0
        for _ in range(count):
            part, manifest = (json.loads(body)["body"] for body in bodies)
            spoil(rng.choice([part, manifest]), rng)
            total = forged(paths[0], part)
            if manifest.get("parts") == json.loads(bodies[1])["body"]["parts"]:
                manifest["parts"] = [total]
            forged(paths[1], manifest)
            try:
                ckpt.restore()
            except pario.CorruptedError:
                damaged += 1
        assert count / 3 < damaged < count  # a version or a number of ranks may be anything


@pytest.mark.parametrize("options", [{}, {"incremental": True, "compress": "zstd"}], ids=str)
def test_lies_are_damage(tmp_path: Path, options: dict[str, Any]) -> None:
    check_lies(tmp_path, 40, seed=1, **options)


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, {"incremental": True, "compress": "zstd"}], ids=str)
def test_many_lies_are_damage(tmp_path: Path, options: dict[str, Any]) -> None:
    check_lies(tmp_path, 1000, seed=2, **options)
