"""Damaged files give right answers or errors of lmdb's tree; no crash, no hang (tests/lmdb_fuzz.py)."""

from __future__ import annotations

import os
import signal
import struct
from collections import Counter
from pathlib import Path

import lmdb_fuzz
import pytest
from lmdb_fuzz import (
    BIGDATA,
    Base,
    Failed,
    Shape,
    batch,
    examine,
    make_bases,
    records,
    run,
    tolerated,
    truth_by_py_lmdb,
)

import pario.lmdb as ours
from pario.errors import InvalidError
from pario.fetch.posix import PosixFetcher
from pario.fetch.snapshot import read_snapshot

pytestmark = pytest.mark.hostile

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


@pytest.mark.full
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
    assert sum(bool(report["wrong"]) for report in seeds) < FILES // 50
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


@pytest.mark.parametrize("version", [1, 3])
@pytest.mark.parametrize(
    ("kind", "name", "change"),
    [
        ("plain", "node.dsize", -2),
        ("plain", "node.ksize", 2),
        ("plain", "page.lower", -2),
        ("plain", "page.upper", -2),
        ("deep", "separator bytes", -2),
        ("named", "page.pad", 1),
        ("named", "sub-page.lower", -2),
        ("named", "sub-page.pad", -1),
        ("named", "sub-page.upper", -2),
    ],
)
def test_numbers_of_a_page_contradict_each_other(folder: Path, version: int, kind: str, name: str, change: int) -> None:
    """A changed number that stays inside all bounds."""
    base = base_of(folder, f"{kind}-{version}-4096")
    # How many bytes of an overflow run are the value's is told nowhere else.
    inline = [at for at, _, what in base.shape.fields if what == name and not base.shape.number(at + 4, 2) & BIGDATA]
    places = inline if name == "node.dsize" else [at for at, _, what in base.shape.fields if what == name]
    for at in places[:: max(1, len(places) // 3)]:
        damaged = bytearray(base.shape.raw)
        number = int.from_bytes(damaged[at : at + 2], "little") + change
        damaged[at : at + 2] = (number & 0xFFFF).to_bytes(2, "little")
        touched, wrong, answers = examine(base, bytes(damaged), str(folder / "damaged"))
        assert touched == {name}
        assert not wrong
        assert "CorruptedError" in {answer.name for answer in answers.values() if isinstance(answer, Failed)}


@pytest.mark.parametrize("version", [1, 3])
@pytest.mark.parametrize(("kind", "name"), [("plain", "pointer"), ("named", "sub-pointer")])
def test_items_out_of_order(folder: Path, version: int, kind: str, name: str) -> None:
    base = base_of(folder, f"{kind}-{version}-4096")
    places = [at for at, _, what in base.shape.fields if what == name]
    at = next(at for at in places if at + 2 in places)
    damaged = bytearray(base.shape.raw)
    damaged[at : at + 4] = damaged[at + 2 : at + 4] + damaged[at : at + 2]
    touched, wrong, answers = examine(base, bytes(damaged), str(folder / "damaged"))
    assert touched == {name}
    assert not wrong
    texts = {answer.text for answer in answers.values() if isinstance(answer, Failed)}
    assert any("order" in text and "mdb_set_compare" in text for text in texts), texts


def test_a_run_is_the_one_that_was_looked_for(folder: Path) -> None:
    """Data format 3 says twice which transaction wrote an overflow run, and of how many pages."""
    base = base_of(folder, "long_values-3-4096")
    places = [at for at, _, what in base.shape.fields if what == "run.pgno"]
    damaged = bytearray(base.shape.raw)
    damaged[places[0] : places[0] + 8] = damaged[places[-1] : places[-1] + 8]
    touched, wrong, answers = examine(base, bytes(damaged), str(folder / "damaged"))
    assert touched == {"run.pgno"}
    assert not wrong
    texts = {answer.text for answer in answers.values() if isinstance(answer, Failed)}
    assert any("not the overflow run" in text and "page" in text for text in texts), texts


@pytest.mark.parametrize("name", ["plain-1-4096", "plain-3-4096"])
@pytest.mark.parametrize("meta", [0, 1])
def test_an_impossible_transaction_number(folder: Path, name: str, meta: int) -> None:
    base = base_of(folder, name)
    damaged = bytearray(base.shape.raw)
    at = meta * base.shape.size + base.shape.header + 128
    damaged[at : at + 8] = (1 << 63 | meta).to_bytes(8, "little")
    path = folder / "damaged"
    path.write_bytes(damaged)
    with pytest.raises(ours.InvalidError, match="claims transaction"):
        ours.open(str(path), subdir=False)
    with pytest.raises(InvalidError, match="claims transaction"):
        read_snapshot(PosixFetcher(str(path)))


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
