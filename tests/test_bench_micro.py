"""The instruments of benchmarks/micro: what they read, what they conclude, and the commands."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import lmdb
import numpy as np
import pytest

from benchmarks.cache import Unavailable
from benchmarks.micro import checkpoint, limits, made
from benchmarks.micro.__main__ import main
from benchmarks.micro.items import Decoding, FileItems, Items, open_items
from benchmarks.micro.overlap import Application, hides, overlap, pipeline
from benchmarks.micro.threads import Sweep, read_once, sweep
from pario.checkpoint.checkpointer import Checkpointer
from pario.commands.screen import screen
from pario.decode.image import Image
from pario.decode.raw import Raw
from pario.errors import DecodeError, EmptyError, OptionError, ReadError

NUMBER = 40


@pytest.fixture(scope="module")
def sets(tmp_path_factory) -> dict[str, Path]:
    """Files of known content, the same in an LMDB, and made pictures."""
    folder = tmp_path_factory.mktemp("micro")
    (folder / "files" / "deeper").mkdir(parents=True)
    for k in range(NUMBER):
        where = folder / "files" / ("deeper" if k % 3 == 0 else "") / f"{k:03d}"
        where.write_bytes(np.random.default_rng(k).bytes(1000 + 37 * k))
    (folder / "files" / "empty").write_bytes(b"")
    with lmdb.open(str(folder / "lmdb"), map_size=1 << 24) as env, env.begin(write=True) as txn:
        for k in range(NUMBER):
            txn.put(b"%03d" % k, np.random.default_rng(k).bytes(1000 + 37 * k))
    made.make_files(folder / "made", 12, 4096)
    return {"files": folder / "files", "lmdb": folder / "lmdb", "made": folder / "made"}


class Seen:
    """Stands for a decoder, and counts what it is given."""

    def __init__(self) -> None:
        self.values: Counter[bytes] = Counter()
        self._lock = threading.Lock()

    def __call__(self, value: memoryview) -> None:
        with self._lock:
            self.values[bytes(value)] += 1


def contents() -> Counter[bytes]:
    return Counter(np.random.default_rng(k).bytes(1000 + 37 * k) for k in range(NUMBER))


# -- what is read ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["files", "lmdb"])
@pytest.mark.parametrize("threads", [1, 3, 64])
def test_each_item_is_read_once_by_any_number_of_threads(sets, which, threads):
    items, seen = open_items(str(sets[which])), Seen()
    run = read_once(items, items.draw(True, 5), threads, seen)  # type: ignore[arg-type]
    assert seen.values == contents()
    assert (run.items, run.bytes) == (NUMBER, sum(len(value) for value in contents()))
    assert run.latency > 0
    items.drop()
    assert items.cached() is None or items.cached() < 0.5
    items.close()


def test_a_run_ends_when_its_time_is_over(sets):
    class Slow(FileItems):
        def read(self, item: int, buffer: memoryview) -> int:
            time.sleep(0.02)
            return super().read(item, buffer)

    items = Slow(str(sets["files"]))
    run = read_once(items, np.resize(np.arange(NUMBER), 10_000), 2, seconds=0.1)
    assert 0 < run.items < 40
    assert run.seconds < 1


def test_an_error_in_one_thread_reaches_the_caller(sets, tmp_path):
    (tmp_path / "one").write_bytes(b"x" * 100)
    (tmp_path / "two").write_bytes(b"x" * 100)
    items = FileItems(str(tmp_path))
    (tmp_path / "two").write_bytes(b"x" * 50)
    with pytest.raises(ReadError, match="ended early: 50 of 100"):
        read_once(items, np.arange(2), 2)
    (tmp_path / "two").unlink()
    with pytest.raises(ReadError, match="reading failed"):
        read_once(items, np.arange(2), 2)
    (tmp_path / "empty").mkdir()
    with pytest.raises(EmptyError):
        FileItems(str(tmp_path / "empty"))


def test_values_are_decoded_by_the_decoder(sets):
    items = open_items(str(sets["made"]))
    first = memoryview(bytearray(int(items.nbytes[0])))
    items.read(0, first)
    from PIL import Image as Pictures

    decoding = Decoding(Image(), items)
    with Pictures.open(sorted(sets["made"].iterdir())[0]) as picture:
        assert next(iter(decoding(first).values()))[0].shape == (picture.height, picture.width, 3)
    with pytest.raises(DecodeError):
        decoding(memoryview(b"no picture at all"))


def test_made_files_have_the_size_and_the_lmdb_has_the_same_bytes(tmp_path):
    files = made.make_files(tmp_path / "files", 5, 20_000)
    paths = sorted(files.iterdir())
    assert len({path.read_bytes() for path in paths}) == 5
    assert all(0.8 * 20_000 <= path.stat().st_size <= 1.2 * 20_000 for path in paths)
    with lmdb.open(str(made.make_lmdb(tmp_path / "set", files)), readonly=True) as env, env.begin() as txn:
        assert [(key.decode(), value) for key, value in txn.cursor()] == [(p.name, p.read_bytes()) for p in paths]
    with pytest.raises(OptionError):
        made.make_files(tmp_path / "more", 0)


def test_rows_of_a_sweep(sets):
    items = [open_items(str(sets["files"])), open_items(str(sets["lmdb"]))]
    told = []
    what = Sweep(threads=(1, 2), rounds=2, seconds=1.0, decoder=Raw())
    rows = sweep(items, what, loaded=str(sets["lmdb"]), tick=lambda case, threads: told.append(case))
    assert len(rows) == 3 * 2 * 2 * 2
    assert len(told) == 2 * len(rows)
    assert {row["way"] for row in rows} == {"files", "records", "pario"}
    assert all(len(row["bytes_per_s"]) == 2 and min(row["bytes_per_s"]) > 0 for row in rows)


# -- overlap -----------------------------------------------------------------------------------------------------------


class Late(Items):
    """Items that take a while, and say how many are under way."""

    kind, path = "files", ""

    def __init__(self, n: int, seconds: float) -> None:
        self.nbytes = np.full(n, 8)
        self.sample: list[str] = []
        self.asked: list[int] = []
        self._seconds = seconds

    def read(self, item: int, buffer: memoryview) -> int:
        self.asked.append(item)
        time.sleep(self._seconds)
        buffer[:8] = item.to_bytes(8, "little")
        return 8

    def tell_order(self, shuffled: bool) -> None: ...
    def drop(self) -> None: ...


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_batches_come_in_order_and_no_more_than_asked_for_is_ahead(prefetch):
    items, order = Late(30, 0.0), np.random.default_rng(0).permutation(30)
    got: list[int] = []
    for number, batch in enumerate(pipeline(items, order, Application(batch=4, threads=3), prefetch, None)):
        got += [int.from_bytes(one, "little") for one in batch]
        time.sleep(0.01)
        assert len(items.asked) <= 4 * (number + 1 + prefetch)
    assert got == order.tolist()


def test_prefetching_hides_what_computing_covers():
    what = Application(batch=4, threads=4, batches=12, rounds=1, factors=(2.0,), prefetch=(0, 1))
    said = []
    for _ in range(5):  # milliseconds, on a machine that may have other things to do
        found = overlap(Late(48, 0.01), what)
        (without, ahead) = found["rows"]
        waits = [each["seconds"][0] - each["compute"] for each in (without, ahead)]
        said.append((found["input"], *waits))
        if 0.01 <= found["input"] < 0.03 and waits[0] >= 0.009 and waits[1] < 0.006:
            break
    else:
        pytest.fail(f"input, and what batches take besides computing, without and with one ahead: {said}")
    row = {"way": 1, "compute": 1.0, "seconds": [1.04, 1.04, 1.2]}
    assert hides([row, {**row, "compute": 0.5}, {**row, "way": 0, "seconds": [0.1]}]) == 1.0
    assert hides([{**row, "seconds": [1.06]}]) is None


# -- conclusions -------------------------------------------------------------------------------------------------------


def rows(rates: dict[int, float], latency: dict[int, float] | float = 0.02, **others: object) -> list[dict]:
    of = latency if isinstance(latency, dict) else dict.fromkeys(rates, latency)
    base = {"way": "files", "shuffled": True, "decode": False, "cpu": 0.1, "cores": 2, **others}
    return [{**base, "threads": n, "bytes_per_s": [rate] * 3, "latency": of[n]} for n, rate in rates.items()]


DEVICE = {"sequential": 200e6, "at_size": 100e6}


@pytest.mark.parametrize(
    ("found", "ceiling_", "limit", "knee"),
    [
        (rows({1: 5e6, 2: 10e6, 4: 20e6, 8: 39e6}), DEVICE, "latency", 8),
        (rows({1: 9e6, 2: 17e6, 4: 18e6, 8: 18e6}, {1: 0.01, 2: 0.011, 4: 0.02, 8: 0.04}), None, "queue", 2),
        (rows({1: 100e6, 2: 185e6, 4: 190e6}), DEVICE, "device", 2),
        (rows({1: 50e6, 2: 89e6, 4: 90e6}), DEVICE, "request", 2),
        (rows({1: 20e6, 2: 40e6}, cpu=0.95, decode=True), DEVICE, "processor", 2),
        (rows({1: 20e6, 2: 21e6}, cpu=0.5), DEVICE, "interpreter", 1),
    ],
)
def test_limit_and_knee(found, ceiling_, limit, knee):
    one = limits.find(found, ceiling_)
    assert (one.limit, one.knee) == (limit, knee)
    text = limits.sentence("files", one, ceiling_)
    assert text.count(". ") == 0
    assert text.endswith(".")


def test_advice_follows_from_the_findings():
    slow, fast = limits.find(rows({1: 5e6, 8: 39e6}), None), limits.find(rows({1: 50e6, 8: 190e6}), None)
    said = limits.advice({("files", True, False): slow, ("pario", True, False): fast})
    assert any("8 reading threads" in line and "more: the rate still grows" in line for line in said)
    assert any("pack the files" in line and "4.9 × as fast" in line for line in said)
    said = limits.advice({("records", False, False): fast, ("records", True, False): slow})
    assert any('shuffle="block"' in line for line in said)
    assert any("Options(inflight=8)" in line for line in said)
    keys = [("pario", True, False), ("files", False, False), ("files", True, True), ("files", True, False)]
    assert limits.main_case(keys) == ("files", True, False)


def test_without_fio_the_ceiling_is_unknown(sets, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(Unavailable, match="fio is not installed"):
        limits.measure_ceiling([str(sets["lmdb"] / "data.mdb")], 4096, 1)


# -- the commands ------------------------------------------------------------------------------------------------------


@pytest.fixture
def call(capsys, monkeypatch, tmp_path):
    for name in ("rank", "launched", "running"):
        monkeypatch.setattr(screen, name, getattr(screen, name))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.chdir(tmp_path)

    def run(*args: object) -> tuple[int, str, str]:
        status = main([*map(str, args)])
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


def test_bench_threads_of_files_in_words(sets, call, tmp_path):
    status, out, err = call("threads", sets["files"], "--threads", "1,2", "--rounds", "1", "--out", "here")
    assert (status, err) == (0, "")
    assert "files, shuffled" in out
    assert "The device's own rate is unknown: fio is not installed" in out
    assert {path.name for path in (tmp_path / "here").iterdir()} == {"threads.json", "threads.txt"}
    assert "Try files: " in (tmp_path / "here" / "threads.txt").read_text()


def test_bench_threads_makes_data_and_removes_them(call, tmp_path):
    given = ("--files", "6", "--bytes", "2048", "--threads", "2", "--rounds", "1", "--order", "shuffled")
    status, out, _ = call("threads", *given, "--json")
    assert status == 0
    found = json.loads(out)
    assert {(row["way"], row["decode"]) for row in found["rows"]} == {
        (way, decode) for way in ("files", "records", "pario") for decode in (False, True)
    }
    assert list(tmp_path.iterdir()) == []


def test_bench_overlap_of_an_lmdb(sets, call, tmp_path):
    given = ("--batch-size", "8", "--batches", "4", "--rounds", "1", "--threads", "2")
    status, out, _ = call("overlap", sets["lmdb"], *given)
    assert status == 0
    assert "pario.Loader" in out
    assert "Reading a batch takes" in out
    assert json.loads((tmp_path / "pario-overlap" / "overlap.json").read_text())["rows"]


def test_wrong_arguments_of_the_instruments(call, sets, monkeypatch):
    status, _, err = call("threads", "--threads", "0,1")
    assert status == 2
    assert "numbers from 1 to 512" in err
    monkeypatch.setattr("benchmarks.micro.__main__.launched_rank", lambda: 0)
    for name in ("threads", "overlap"):
        status, _, err = call(name, sets["files"])
        assert status == 2
        assert "without mpiexec" in err


def test_folders_that_are_not_there(call, tmp_path):
    for given in (("threads", "--store", "gone"), ("checkpoint", "--slow", "gone"), ("checkpoint", "--fast", "gone")):
        status, _, err = call(*given)
        assert status == 2
        assert "gone is no folder that can be written to" in err
    assert list(tmp_path.iterdir()) == []


def test_an_error_is_one_line_without_a_traceback(call, tmp_path):
    status, out, err = call("threads", "nothing", "--threads", "1")
    assert (status, out) == (1, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    status, out, _ = call("threads", "--help")
    assert status == 0
    assert "Measure how reading scales" in out


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_bench_checkpoint_measures_all_ways_and_leaves_nothing(call, tmp_path):
    for name in ("slow", "fast"):
        (tmp_path / name).mkdir()
    given = ("--bytes", "40000", "--arrays", "3", "--checkpoints", "2", "--every", "2", "--step-ms", "1")
    status, out, _ = call("checkpoint", "--slow", "slow", "--fast", "fast", *given, "--rounds", "1")
    assert status == 0
    assert "Straight to the slow store each checkpoint stops the loop for" in out
    found = json.loads((tmp_path / "pario-checkpoint" / "checkpoint.json").read_text())
    ways = {row["way"]: row for row in found["rows"]}
    assert {"none", "plain write", "direct", "background", "fast only", "burst buffer"} <= ways.keys()
    assert ways["none"]["stall"] == [0]
    assert all(row["durable"][0] >= row["total"][0] >= 0.004 for row in found["rows"])
    assert list((tmp_path / "slow").iterdir()) == list((tmp_path / "fast").iterdir()) == []


def test_what_is_saved_is_durable_and_whole_when_the_loop_has_ended(tmp_path, monkeypatch):
    """Looked at just before it is removed: every checkpoint is on its store, with the values of its step."""
    what, seen, rmtree = checkpoint.Training(4000, 2, 2, 1, 0.0), [], shutil.rmtree

    def look(path: str, **_: object) -> None:
        with Checkpointer("self", slow=path, keep=None) as saved:
            if (step := saved.latest()) is not None:
                seen.append((Path(path).parent.name, step, saved.restore(step), saved.restore(1)))
        rmtree(path)

    monkeypatch.setattr(checkpoint.shutil, "rmtree", look)
    for name in ("slow", "fast"):
        (tmp_path / name).mkdir()
    for way in ("direct", "fast only", "burst buffer"):
        checkpoint.run_way(way, what, str(tmp_path / "slow"), str(tmp_path / "fast"))
    assert [where for where, *_ in seen if where == "slow"] == ["slow", "slow"]
    first = checkpoint.tree_of(what)
    for _, step, last, before in seen:
        assert step == 2
        for name, array in first.items():
            assert (before[name][0], last[name][0]) == (array[0] + 1, array[0] + 1 + 1)
            assert (last[name][1:] == array[1:]).all()


def test_a_sigterm_leaves_nothing_on_the_store(tmp_path):
    command = [sys.executable, "-m", "benchmarks.micro", "checkpoint", "--slow", ".", "--bytes", "1000000"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    job = subprocess.Popen([*command, "--step-ms", "500"], cwd=tmp_path, env=env, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 60
        while not list(tmp_path.glob("pario-checkpoints-*")):
            assert time.monotonic() < end
            assert job.poll() is None
            time.sleep(0.01)
        job.send_signal(signal.SIGTERM)
        assert job.wait(60) == 128 + signal.SIGTERM
    finally:
        job.kill()
        job.wait()
    assert list(tmp_path.iterdir()) == []
