"""A traced loader: its file, and that its requests and bytes are those that the kernel and the store count."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lmdb
import pytest
from required import skip_or_fail
from test_stats_trace import assert_nested, events_of, summary_of

import pario
from benchmarks.cache import Unavailable
from pario.cli import main
from pario.errors import OptionError
from pario.fetch.posix import PosixFetcher
from pario.options import Recipe
from pario.stats.rank import RankStats
from pario.stats.tracing import recorder_of

N, NBYTES = 400, 9000
SMALL: dict[str, Any] = {"slot_bytes": 256 << 10, "slots": 3, "tiers": ()}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("set") / "x.lmdb")
    with lmdb.open(folder, map_size=1 << 26) as env, env.begin(write=True) as txn:
        for i in range(N):
            txn.put(b"%06d" % i, bytes([i % 251]) * NBYTES)
    return folder


def io() -> dict[str, int]:
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}


@pytest.mark.parametrize(("recipe", "order"), [("ring", "block"), ("ring", False), ("auto", "global")])
def test_requests_and_bytes_are_the_kernels(path: str, tmp_path: Path, recipe: str, order: Any) -> None:
    """From one loop to the next nothing else in this process reads but looks at /proc."""
    trace = str(tmp_path / "t.json")
    options = pario.Options(trace=trace, once=True, **SMALL)
    way = Recipe(recipe, fetch="posix")
    with pario.Loader(path, 10, shuffle=order, recipe=way, options=options) as loader:
        for _ in range(3):  # in which compiled functions are loaded
            for _ in loader:
                pass
        recorder = recorder_of(trace)
        assert recorder is not None
        tracks = recorder.tracks

        def counted() -> tuple[int, int]:
            found = [(event, track.requests()) for track in tracks for event in track.events()]
            reads = [(event, extents) for event, extents in found if event["kind"] in (1, 3)]
            sizes = [
                int(event["c"])
                if event["c"] >= 0
                else int(extents["nbytes"][event["a"] : event["a"] + event["b"]].sum())
                for event, extents in reads
            ]
            return sum(int(event["b"]) for event, _ in reads), sum(sizes)

        before, begun = io(), counted()
        for _ in range(4):
            for _ in loader:
                pass
        after, ended = io(), counted()
    looks = 100  # at files of /proc: by the trace, and by whoever asks how much memory is free
    reads, nbytes = ended[0] - begun[0], ended[1] - begun[1]
    assert reads > 0
    assert 0 <= after["syscr"] - before["syscr"] - reads <= looks
    assert 0 <= after["rchar"] - before["rchar"] - nbytes <= 0.01 * nbytes
    assert nbytes >= 4 * N * NBYTES


def test_the_file_shows_threads_slots_and_counters(path: str, tmp_path: Path) -> None:
    trace = str(tmp_path / "t.json")
    options = pario.Options(trace=trace, **SMALL)

    def slow(value: bytes) -> int:
        time.sleep(50e-6)  # spans that last less are not kept, and the copy of ten records may
        return len(value)

    with pario.Loader(path, 10, slow, shuffle="global", recipe="ring", options=options) as loader:
        for _ in range(2):
            for _ in loader:
                pass
        assert not os.path.exists(trace)
    events = events_of(trace)
    assert_nested(events)
    tracks = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert {"training loop", "plans groups", "pario-read-0", "slot 0 of the ring"} <= tracks
    names = {e["name"] for e in events}
    assert {"epoch", "next batch", "decode", "read", "open", "metadata read", "full slots"} <= names
    assert {"inflight", "bytes read", "bytes in batches"} <= {e["name"] for e in events if e["ph"] == "C"}
    rank = summary_of(trace)
    (loader_said,) = rank.loaders
    assert loader_said.stats.records == 2 * N
    (file,) = rank.files
    assert file.reads >= loader_said.stats.reads > 0
    assert file.nbytes >= loader_said.stats.bytes_read
    assert (file.opens, rank.dropped, rank.size) == (1, 0, 1)
    assert os.path.samefile(file.path, f"{path}/data.mdb")


def test_without_a_trace_nothing_takes_part(path: str) -> None:
    with pario.Loader(path, 10, options=pario.Options(**SMALL)) as loader:
        assert type(loader._stats) is RankStats
        assert type(loader._life.reader.file.pool.fetcher) is PosixFetcher
        assert loader._life.trace is None


def test_batches_are_the_same(path: str, tmp_path: Path) -> None:
    def ids(trace: str | None) -> list[list[int]]:
        options = pario.Options(trace=trace, **SMALL)
        with pario.Loader(path, 7, shuffle="global", seed=3, options=options) as loader:
            return [batch.ids.tolist() for batch in loader]

    assert ids(None) == ids(str(tmp_path / "t.json"))


def _fails(loader: pario.Loader, divisor: int) -> None:
    with loader:
        for _ in loader:
            _ = 1 / divisor


def test_an_error_leaves_the_trace(path: str, tmp_path: Path) -> None:
    trace = str(tmp_path / "t.json")
    options = pario.Options(trace=trace, **SMALL)
    with pytest.raises(ZeroDivisionError):
        _fails(pario.Loader(path, 10, options=options), 0)
    assert summary_of(trace).loaders[0].stats.batches == 1


def test_loaders_with_one_file_share_it(path: str, tmp_path: Path) -> None:
    trace = str(tmp_path / "t.json")
    options = pario.Options(trace=trace, **SMALL)
    with pario.Loader(path, 10, options=options) as first:
        next(iter(first))
        with pario.Loader(path, 20, options=options) as second:
            for _ in second:
                pass
        assert not os.path.exists(trace)  # written once, when the last one closes
    rank = summary_of(trace)
    assert [loader.stats.batches for loader in rank.loaders] == [1, N // 20]
    assert len(rank.files) == 1


def test_a_folder_that_is_not_there_is_told_at_once(path: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"trace cannot be written.*gone/t\.json"):
        pario.Loader(path, 10, options=pario.Options(trace=str(tmp_path / "gone" / "t.json")))
    with pytest.raises(OptionError, match="trace must be a path"):
        pario.Options(trace=3)  # type: ignore[arg-type]


def test_a_full_disk_costs_the_trace_and_not_the_job(
    path: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "soon-gone"
    folder.mkdir()
    with pario.Loader(path, 10, options=pario.Options(trace=str(folder / "t.json"), **SMALL)) as loader:
        for _ in loader:
            pass
        folder.rmdir()
        caplog.set_level(logging.WARNING, "pario")
    assert "the trace is not written" in caplog.text


def test_a_forked_child_does_not_replace_the_file(path: str, tmp_path: Path) -> None:
    trace = str(tmp_path / "t.json")
    options = pario.Options(trace=trace, **SMALL)
    with pario.Loader(path, 10, options=options) as loader:
        child = os.fork()
        if not child:
            os._exit(0 if recorder_of(trace) is None else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        for _ in loader:
            pass
    assert summary_of(trace).loaders[0].stats.batches == N // 10


# -- the commands ------------------------------------------------------------------------------------------------------

SCRIPT = """
import sys, time
import pario

def work(path):
    with pario.Loader(path, 10, shuffle="global", options=pario.Options(tiers=(), slot_bytes=1 << 18)) as loader:
        for batch in loader:
            if "wait" in sys.argv:
                print("here", flush=True)
                time.sleep(60)
    print("done", __name__, sys.argv[1:])

work(sys.argv[1])
"""


def test_an_unmodified_script_is_traced_and_advised(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = [sys.executable, "-m", "pario", "trace", "-o", "t.json", "train.py", path, "--epochs"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"done __main__ ['{path}', '--epochs']\n"
    trace = str(tmp_path / "t.json")
    said = f"pario: the trace is in {trace}; `python -m pario advise {trace}` says what it means, "
    assert said in done.stderr
    assert done.stderr.count("pario: ") == 1
    assert_nested(events_of(trace))
    assert main(["advise", trace]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{trace}: 1 rank on 1 node, ")
    assert "\n1. " in said
    assert main(["advise", "--json", trace]) == 0
    assert json.loads(capsys.readouterr().out)["advice"][0]["rule"].endswith("bound")


def test_without_a_script_an_earlier_trace_stays(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text("earlier")
    words = [sys.executable, "-m", "pario", "trace", "none.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "error: there is no script 'none.py'\n")
    assert (tmp_path / "trace.json").read_text() == "earlier"


def test_sigterm_leaves_the_trace(path: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = [sys.executable, "-m", "pario", "trace", "-o", "t.json", "train.py", path, "wait"]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as script:
        try:
            assert script.stdout is not None
            assert script.stdout.readline() == "here\n"
            script.terminate()
            assert script.wait(30) == -signal.SIGTERM
        finally:
            script.kill()
    assert summary_of(str(tmp_path / "t.json")).loaders[0].stats.batches == 1


def test_what_is_no_trace_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "x.json"
    other.write_text("{}")
    with pytest.raises(pario.FileError, match="no trace that pario has written"):
        main(["advise", str(other)])
    with pytest.raises(pario.FileError, match="no parts of this trace"):
        main(["trace", "--merge", str(other)])
    with pytest.raises(OptionError, match="cannot be written there"):
        main(["trace", "-o", str(tmp_path / "gone" / "t.json"), str(other)])


@pytest.mark.full
def test_requests_and_bytes_are_the_stores(path: str, tmp_path: Path) -> None:
    from benchmarks.stores.latency import latency_store

    trace = str(tmp_path / "t.json")
    try:
        with latency_store(path, read_s=0.002, metadata_s=0.001, bytes_per_s=1e9) as store:
            options = pario.Options(trace=trace, **SMALL)
            more: dict[str, Any] = {"recipe": "ring", "options": options, "save_index": False}
            with pario.Loader(store.folder, 10, shuffle="block", **more) as loader:
                for _ in range(2):
                    for _ in loader:
                        pass
            seen = store.counts()["/data.mdb"]
    except Unavailable as e:
        skip_or_fail(str(e))
        return
    (file,) = summary_of(trace).files
    assert file.kind == "FUSE"
    assert abs(file.reads + file.meta_reads - seen["read"]) <= 0.01 * seen["read"]
    assert abs(file.nbytes + file.meta_bytes - seen["bytes"]) <= 0.01 * seen["bytes"]


LOOP = """
import sys
import pario
options = pario.Options(tiers=(), slot_bytes=1 << 18, trace=sys.argv[2])
more = {"recipe": pario.options.Recipe(sys.argv[3], fetch="posix"), "options": options, "save_index": False}
with pario.Loader(sys.argv[1], 10, shuffle="global", **more) as loader:
    for _ in range(3):
        for batch in loader:
            pass
"""


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["ring", "auto"])
def test_requests_and_bytes_of_the_file_are_those_that_strace_sees(path: str, tmp_path: Path, recipe: str) -> None:
    """Every system call that reads the data file, of all threads, from its opening to its end."""
    strace, trace = shutil.which("strace"), str(tmp_path / "t.json")
    if strace is None:
        skip_or_fail("strace is not installed")
        return
    words = [sys.executable, "-c", LOOP, path, trace, recipe]
    seen = tmp_path / "calls"
    calls = ["-f", "-y", "-qq", "-o", str(seen), "-e", "trace=read,pread64,preadv,preadv2,readv"]
    done = subprocess.run([strace, *calls, *words], capture_output=True, text=True, timeout=100)
    if "Operation not permitted" in done.stderr:
        skip_or_fail("strace may not look at other processes here")
    assert done.returncode == 0, done.stderr
    of_threads: dict[str, str] = {}
    sizes = []
    for line in seen.read_text().splitlines():
        thread, _, call = line.partition(" ")
        call = call.strip()
        if call.endswith("<unfinished ...>"):
            of_threads[thread] = call
            continue
        if call.startswith("<..."):
            call = of_threads.pop(thread) + call
        if "/data.mdb>" in call.split(",")[0]:
            sizes.append(int(call.rpartition("= ")[2].split()[0]))
    (file,) = summary_of(trace).files
    read = [size for size in sizes if size > 1]  # looks into the page cache ask for a byte
    assert file.reads + file.meta_reads == len(read) > 100
    assert file.nbytes + file.meta_bytes == sum(read)


@pytest.mark.full
def test_what_will_read_brings_is_traced(path: str, tmp_path: Path) -> None:
    (tmp_path / "told.py").write_text(
        "import sys, time, lmdb\n"
        "env = lmdb.open(sys.argv[1], readonly=True, lock=False)\n"
        "env.will_read([b'%06d' % i for i in range(0, 400, 3)])\n"
        "time.sleep(1)\n"
    )
    words = [sys.executable, "-m", "pario", "trace", "-o", "t.json", "told.py", path]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    rank = summary_of(str(tmp_path / "t.json"))
    assert rank.loaders == []
    assert rank.files[0].meta_reads + rank.files[0].reads + rank.files[0].probes > 0
    assert rank.kernel["syscr"] > 0
