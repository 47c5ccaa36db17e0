"""Descriptions of checkpoints that lie: their checksums fit, what they say does not. Restoring reports damage or works;
nothing else is raised, nothing is read outside the files, and no memory is taken for what is not there."""

from __future__ import annotations

import json
import os
import random
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import rich_tree
from fuzz_surfaces import spoil

import pario
from pario.checkpoint.finding import problems
from pario.checkpoint.store import sum_of
from pario.comm import memory

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


def two_saved(folder: Path) -> Path:
    """The folder of the newer one."""
    with pario.Checkpointer("self", slow=folder) as ckpt:
        for step in (1, 2):
            ckpt.save(step, [np.arange(3)]).wait()
    return next(folder.glob("step-000000000002-*"))


def check_older(folder: Path, path: Path, why: str, caplog: pytest.LogCaptureFixture) -> None:
    """That in place of the spoilt one the older one is restored, and soon."""
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with pario.Checkpointer("self", slow=folder) as ckpt:
        assert ckpt.restore()[0].tolist() == [0, 1, 2]
        assert why in caplog.text
        with pytest.raises(pario.FileError, match=why):
            ckpt.restore(2)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB
    assert time.monotonic() - began < 20
    assert "fit here" in why or any(why in each for each in problems(str(path)))


@pytest.mark.parametrize("name", ["manifest.json", "node-00000.json"])
def test_a_description_of_900_mb_is_not_read(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    made = two_saved(tmp_path)
    os.truncate(made / name, 900_000_000)
    check_older(tmp_path, made, "a description of 900,000,000 bytes", caplog)


def test_a_description_of_many_values_is_not_made_objects(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = two_saved(tmp_path)
    rest = b' "body": [' + b"0," * 11_000_000 + b"0]}"
    (made / "manifest.json").write_bytes(b'{"xxh3": "%016x",\n' % sum_of(rest) + rest)
    check_older(tmp_path, made, "11,000,001 values", caplog)


def test_arrays_for_which_there_is_no_memory_are_damage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = two_saved(tmp_path)
    part, manifest = (json.loads((made / name).read_bytes())["body"] for name in ("node-00000.json", "manifest.json"))
    block = 64 << 20
    blocks = [[k * block, block] for k in range(64)]
    part |= {"layout": 1, "size": 64 * block, "blocks": blocks, "pieces": [[0, [0], [64 * block], 0]]}
    part["sums"] = [f"{sum_of(bytes(block)):016x}"] * 64
    manifest["arrays"] = [["[0]", "|u1", [64 * block], "array"]]
    (made / "node-00000.h5").write_bytes(b"")
    os.truncate(made / "node-00000.h5", 64 * block)
    manifest["parts"] = [forged(made / "node-00000.json", part)]
    forged(made / "manifest.json", manifest)
    monkeypatch.setattr(memory.machine, "memory", lambda **_: (1 << 32, 1 << 30))
    check_older(tmp_path, made, "it does not fit here", caplog)  # 4 GiB of zeros, in a sparse file with right sums


@pytest.mark.parametrize("dtype", ["|V0", "<U0"])
def test_elements_without_bytes_are_damage(tmp_path: Path, dtype: str) -> None:
    made = two_saved(tmp_path)
    part, manifest = (json.loads((made / name).read_bytes())["body"] for name in ("node-00000.json", "manifest.json"))
    part["pieces"][0][3] += 4  # in the middle of a block
    manifest["arrays"][0][1] = dtype
    manifest["parts"] = [forged(made / "node-00000.json", part)]
    forged(made / "manifest.json", manifest)
    with pario.Checkpointer("self", slow=tmp_path) as ckpt:
        assert ckpt.restore()[0].tolist() == [0, 1, 2]  # the older one
        with pytest.raises(pario.CorruptedError):
            ckpt.restore(2)
