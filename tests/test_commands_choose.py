"""`python -m pario data choose`: samples of a real LMDB, figures of the store, the choice explained."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from click.testing import CliRunner

from pario.codec import lz4, trial
from pario.codec.select import Store
from pario.commands import choose
from pario.commands.app import group


@pytest.fixture
def path(tmp_path: Path) -> Path:
    words = np.random.default_rng(3).choice([b"one ", b"two ", b"three "], 20_000)
    with lmdb.open(str(tmp_path), map_size=1 << 24) as env, env.begin(write=True) as txn:
        for k in range(200):
            txn.put(b"%08d" % k, b"".join(words[k * 100 : k * 100 + 100]))
    return tmp_path


def run(path: Path, *options: str) -> str:
    arguments = ["data", "choose", str(path), "--batch-size", "8", "--threads", "1", "--seconds", "0.01", *options]
    return CliRunner().invoke(group, arguments, catch_exceptions=False).output


def test_a_choice(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "CANDIDATES", ("raw", "lz4", "zstd:3"))
    monkeypatch.setattr(trial, "DICTIONARIES", ())
    out = run(path, "--step-ms", "10000")
    assert "200 records sampled" in out
    assert "/s in reads of" in out
    assert "page cache" in out
    chosen = [line for line in out.splitlines() if "<- chosen" in line]
    assert [line.split()[0] for line in chosen] == ["zstd:3"]
    assert "Choice: zstd:3, ratio" in out
    assert "Runner-up: lz4" in out
    assert "pack SRC DST --codec zstd:3" in out
    assert "Foretold: 1 records/s per node" in out
    assert "the highest ratio (--for capacity)" in out
    assert "not tried" not in out
    assert "codec" in out.splitlines()[3]


def test_for_speed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a store without cost, the codec that unpacks faster wins; the bytes of the file are told."""
    monkeypatch.setattr(trial, "CANDIDATES", ("raw", "lzma:6"))
    monkeypatch.setattr(trial, "DICTIONARIES", ())
    monkeypatch.setattr(choose, "_store", lambda path, seconds: (Store(float("inf"), 1e15), "not at all"))
    out = run(path, "--iteration", "10", "--for", "speed")
    assert "Choice: raw" in out
    assert "the least time of reading and unpacking (--for speed)" in out
    (told,) = re.findall(r"a file of ([\d.]+) KB", out)
    assert 0.8 < float(told) * 1e3 / (path / "data.mdb").stat().st_size < 1.2
    assert "Choice: lzma" in run(path, "--iteration", "10", "--for", "capacity")


def test_each_order_is_foretold(
    path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the codec that is chosen; and the bytes of the file."""
    monkeypatch.setattr(trial, "CANDIDATES", ("raw", "zstd:3"))
    monkeypatch.setattr(trial, "DICTIONARIES", ())
    asked, loader = list[object](), choose.Loader

    def counted(*given: Any, **more: Any) -> Any:
        asked.append(more["shuffle"])
        return loader(*given, **more)

    monkeypatch.setattr(choose, "Loader", counted)
    out = run(path, "--step-ms", "10000")
    assert set(asked[:-3]) == {"global"}, "each candidate"
    assert asked[-3:] == [False, "block", "global"], "the chosen one"
    orders = r'([\d,]+) in key order, ([\d,]+) in "block" order, ([\d,]+) in "global" order; a file of ([\d.]+) KB'
    (told,) = re.findall(orders, out)
    assert all(int(rate.replace(",", "")) > 0 for rate in told[:3])
    made = tmp_path_factory.mktemp("packed")
    pack = ["data", "pack", str(path), str(made), "--force", "--codec", "zstd:3", "--dictionary", "no"]
    assert CliRunner().invoke(group, pack, catch_exceptions=False).exit_code == 0
    made /= "data.mdb"
    assert 0.8 < float(told[3]) * 1e3 / made.stat().st_size < 1.2


def test_nothing_keeps_up(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "CANDIDATES", ("raw", "zstd:3"))
    monkeypatch.setattr(trial, "DICTIONARIES", ())
    out = run(path, "--step-ms", "1e-06", "--samples", "20")
    assert "20 records sampled" in out
    assert "No codec is admissible" in out
    assert "Choice" not in out
    assert " none " in out  # the limit


def test_codecs_that_are_not_tried_are_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "CANDIDATES", ("raw", "lz4"))
    monkeypatch.setattr(trial, "DICTIONARIES", ())
    monkeypatch.setattr(lz4, "_library", lambda: None)
    out = run(path, "--step-ms", "10000", "--samples", "20")
    assert "not tried: lz4. codec lz4 needs the package lz4" in out


def test_sync(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "CANDIDATES", ("raw",))
    monkeypatch.setattr(trial, "DICTIONARIES", ())
    out = run(path, "--step-ms", "1000", "--sync")
    assert "in turns" in out
    assert "Choice: raw, ratio 0.99" in out or "Choice: raw, ratio 1.00" in out


@pytest.mark.parametrize("given", [("--iteration", "-1", "--batch", "4"), ("--iteration", "1", "--batch", "0")])
def test_the_old_names_have_the_bounds_of_the_new_ones(given: tuple[str, ...]) -> None:
    done = CliRunner().invoke(group, ["data", "choose", "x.lmdb", *given])
    assert (done.exit_code, "not in the range" in done.output) == (2, True), done.output
