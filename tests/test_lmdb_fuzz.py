"""Damaged files give right answers or errors of lmdb's tree; no crash, no hang (tests/lmdb_fuzz.py)."""

from __future__ import annotations

import os
import signal
import struct
from collections import Counter
from pathlib import Path

import lmdb_fuzz
import pytest
from lmdb_fuzz import Base, Shape, batch, examine, make_bases, records, run, tolerated, truth_by_py_lmdb

import pario.lmdb as ours

FILES = 450


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("fuzz")
    (place / "list").write_text("\n".join(make_bases(place)))
    return place


def names(folder: Path) -> list[str]:
    return (folder / "list").read_text().split()


def base_of(folder: Path, name: str) -> Base:
    assert name in names(folder)
    return Base.load(folder, name)


def test_damaged_files() -> None:
    reports = run(FILES, seed=20_000)
    seeds = [report for report in reports if "seed" in report]
    assert {report["seed"] for report in seeds} == set(range(20_000, 20_000 + FILES))
    findings = [report for report in seeds if report["wrong"] and not tolerated(report)]
    assert not findings, findings[:3]
    # The damage does damage, and not only to what the first look tells.
    errors = Counter(name for report in seeds for name in report["errors"])
    assert errors["CorruptedError"] > FILES // 5
    assert errors["InvalidError"] > FILES // 20
    assert sum(report["opened"] for report in seeds) > FILES // 2
    assert sum(bool(report["wrong"]) for report in seeds) < FILES // 20
    assert max(report["grown"] for report in reports if "grown" in report) < 128 << 20


def test_the_truth_is_py_lmdbs(folder: Path) -> None:
    """The walk that classifies the bytes, and the enlarged pages."""
    sizes, formats = set(), set()
    for name in names(folder):
        shape = Shape((folder / name).read_bytes())
        assert records(shape.items, shape.raw) == truth_by_py_lmdb(str(folder / name)), name
        sizes.add(shape.size)
        formats.add(shape.version)
        # Bytes of which the walk knows nothing are free: as anything else, they give the same records.
        filled = bytearray(shape.raw)
        for at in (shape.kind == 0).nonzero()[0].tolist():
            filled[at] = 0xA5
        (folder / "filled").write_bytes(filled)
        assert truth_by_py_lmdb(str(folder / "filled")) == records(shape.items, shape.raw), name
    assert sizes == {4096, 8192, 16384, 32768, 65536}
    assert formats == {1, 3}


@pytest.mark.parametrize("name", ["plain-1-4096", "named-3-16384"])
def test_a_changed_value_is_read_as_it_is(folder: Path, name: str) -> None:
    base = base_of(folder, name)
    damaged = bytearray(base.shape.raw)
    at = int((base.shape.kind == base.shape.names.index("value")).nonzero()[0][40])
    damaged[at] ^= 0xFF
    touched, wrong, answers = examine(base, bytes(damaged), str(folder / "damaged"))
    assert touched == {"value"}
    assert not wrong
    truth = records(base.shape.items, base.shape.raw)
    assert [name for name, pairs in truth.items() if answers[name, "iternext"] != pairs] != []


def test_a_wrong_answer_is_a_finding(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = base_of(folder, "named-1-4096")
    for what, instead in (
        ("getmulti", lambda *_, **__: []),
        ("count", lambda _: 1),
        ("iternext_dup", ours.Cursor.iternext),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(ours.Cursor, what, instead)
            _, wrong, _ = examine(base, base.shape.raw, str(folder / "damaged"))
            assert any(text.startswith(f"{what}: ") for text in wrong), what

    def failing(*_: object, **__: object) -> bytes:
        raise struct.error("not a word of lmdb")

    monkeypatch.setattr(ours.Transaction, "get", failing)
    _, wrong, _ = examine(base, base.shape.raw, str(folder / "damaged"))
    assert any("a foreign error: not a word" in text for text in wrong)
    assert not tolerated({"wrong": wrong, "touched": ["child"]})


def test_who_dies_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that crashes at seed 5 and hangs at seed 7: the others are done all the same."""
    script = tmp_path / "child.py"
    script.write_text(
        "import json, os, signal, sys, time\n"
        "for seed in range(*map(int, sys.argv[3:])):\n"
        "    print('at', seed, flush=True)\n"
        "    if seed == 5: os.kill(os.getpid(), signal.SIGSEGV)\n"
        "    if seed == 7:\n"
        "        signal.setitimer(signal.ITIMER_REAL, 0.1)\n"
        "        time.sleep(60)\n"
        "    print(json.dumps({'seed': seed, 'wrong': []}), flush=True)\n"
    )
    monkeypatch.setattr(lmdb_fuzz, "__file__", os.fspath(script))
    reports = batch(tmp_path, range(3, 10))
    assert [report["seed"] for report in reports] == list(range(3, 10))
    died = {report["seed"]: report["wrong"][0] for report in reports if "died" in report}
    assert set(died) == {5, 7}
    assert f"status {-signal.SIGSEGV}" in died[5]
    assert f"status {-signal.SIGALRM}" in died[7]
