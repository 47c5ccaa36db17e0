"""`python -m pario data choose`: samples of a real LMDB, figures of the store, the choice explained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from click.testing import CliRunner

from pario.codec import lz4, trial
from pario.codec.select import Application, Candidate, Store, select
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
    assert "reads/s" in out
    assert "page cache" in out
    chosen = [line for line in out.splitlines() if "<- chosen" in line]
    assert [line.split()[0] for line in chosen] == ["zstd:3"]
    assert "Choice: zstd:3, ratio" in out
    assert "Runner-up: lz4" in out
    assert "pack SRC DST --codec zstd:3" in out
    assert "Foretold: 1 records/s per node" in out
    assert "not tried" not in out
    assert "codec" in out.splitlines()[3]


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
    monkeypatch.setattr(lz4, "_package", lambda: None)
    out = run(path, "--step-ms", "10000", "--samples", "20")
    assert "not tried: lz4. codec lz4 needs the package lz4" in out


def test_sync(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "CANDIDATES", ("raw",))
    monkeypatch.setattr(trial, "DICTIONARIES", ())
    out = run(path, "--step-ms", "1000", "--sync")
    assert "in turns" in out
    assert "Choice: raw, ratio 0.99" in out or "Choice: raw, ratio 1.00" in out


def test_the_plot_separates() -> None:
    """Letters left of the dots are admissible, those to their right are not."""
    store = Store(float("inf"), 1e8)
    app = Application(100, 1e6, 0.02, threads=2)
    given = [Candidate(f"c{k}", 1 + 0.4 * k, 1e-6 * 4**k, store) for k in range(7)]
    chosen = select(app, given, store)
    assert {verdict.admissible for verdict in chosen.verdicts} == {True, False}
    lines = choose._plot(chosen, store, 0.1)
    seen = 0
    for line in lines[1:15]:
        cells = line[9:]
        for k, verdict in enumerate(chosen.verdicts):
            for letter in (chr(97 + k), chr(65 + k)):
                if letter in cells and "." in cells:
                    assert (cells.index(letter) < cells.index(".")) == verdict.admissible
                    seen += 1
    assert seen >= 6


def test_sizes_of_reads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates whose records take the same blocks see the same store, measured once."""
    asked: list[int] = []

    def measured(pool: Any, fetcher: Any, size: int, nbytes: float, seconds: float) -> Store:
        asked.append(size)
        return Store(1000.0, 1000.0 * nbytes)

    monkeypatch.setattr(choose, "_measured", measured)
    found = [Candidate("a", 2.0, 1e-6), Candidate("b", 2.01, 1e-6), Candidate("c", 30.0, 1e-6)]
    raw, sized, _ = choose._stores(str(path), 60_000, found, 0.01)
    assert raw == Store(1000.0, 6e7)
    assert [round(one.store.nbytes) for one in sized if one.store] == [30_000_000, 29_850_746, 2_000_000]
    assert len(asked) == 3
    assert all(size % 4096 == 0 for size in asked)
