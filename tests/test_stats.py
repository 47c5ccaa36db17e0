"""What the numbers of the ranks say: the sentence, the table, the log line, the file for Prometheus."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from pathlib import Path

import lmdb
import pytest

import pario
from pario.comm.launcher import job_name
from pario.errors import OptionError
from pario.fetch.posix import PosixFetcher
from pario.stats.explain import explain, odd_one
from pario.stats.rank import RankStats
from pario.stats.report import Report

pytestmark = pytest.mark.usefixtures("through_the_ring")

N = 400
SMALL = pario.Options(slot_bytes=64 << 10, slots=3)


def rank(number: int, *, consumer: float = 0, decode: float = 0, share: float = 0, **more: float) -> RankStats:
    """A rank that was in its loop for 10 s; in a loop that prepares nothing ahead the caller waits for all the rest."""
    given = {"loop": 10.0, "waiting": 10.0 - consumer, "stalled": share, "batches": 100, "records": 1000, **more}
    return RankStats(rank=number, consumer=consumer, decode=decode, share=share, **given)


def reader(number: int, *, read: float, **more: float) -> RankStats:
    given = {"bytes_read": 2_000_000_000, "reads": 500, "reading": 4 * read, **more}
    return rank(number, reader=True, read=read, **given)


CASES = {
    "nothing yet": ([RankStats()], "no batch was taken yet"),
    "store": (
        [reader(0, read=9.8, share=6.0, decode=3), rank(1, share=6.4, decode=3)],
        "the store was the slow part: it gave 204 MB/s with 4 reads in flight; the ranks waited for bytes 62% of the "
        "time",
    ),
    "store, alone, one read at a time": (
        [reader(0, read=10, reading=10, share=8.0)],
        "the store was the slow part: it gave 200 MB/s with 1 read in flight; rank 0 waited for bytes 80% of the time",
    ),
    "two readers share one store": (
        [reader(0, read=9.8, share=8.0), reader(1, read=9.5, node=1, share=8.0)],
        "the store was the slow part: it gave 415 MB/s with 8 reads in flight; the ranks waited for bytes 80% of the "
        "time",
    ),
    "one node reads slowly": (
        [reader(k, read=9.8 if k == 1 else 4.0, node=k, share=8.0 if k == 1 else 1.0) for k in range(4)],
        "reading on rank 1 was the slow part: the store gave it 204 MB/s, and 1.5 GB/s to the 3 others; the ranks "
        "waited for bytes 28% of the time (rank 1 80%)",
    ),
    "one node has more ranks": (
        [reader(0, read=9.8, share=6.0), reader(1, read=5, bytes_read=1_000_000_000, node=1, share=6.0)],
        "the store was the slow part: it gave 404 MB/s with 8 reads in flight; the ranks waited for bytes 60% of the "
        "time",
    ),
    "as many reads as may be": (
        [reader(0, read=9.8, share=6.0, depth=4), rank(1, share=6.4, depth=4)],
        "the store or the number of reads in flight was the slow part: it gave 204 MB/s with all 4 reads that inflight "
        "allows, 78.4 ms each (a larger inflight helps if the store can answer more at once); the ranks waited for "
        "bytes 62% of the time",
    ),
    "the one read that may be": (
        [reader(0, read=10, reading=9.5, share=8.0, depth=1)],
        "the store or the number of reads in flight was the slow part: it gave 200 MB/s with the one read that "
        "inflight allows, 19.0 ms each (a larger inflight helps if the store can answer more at once); rank 0 waited "
        "for bytes 80% of the time",
    ),
    "fewer reads than may be": (
        [reader(0, read=10, share=8.0, depth=8)],
        "the store was the slow part: it gave 200 MB/s with 4 reads in flight; rank 0 waited for bytes 80% of the time",
    ),
    "a depth that was found by measuring": (
        [reader(0, read=9.8, share=6.0, depth=4, tuned=True), rank(1, share=6.4, depth=4, tuned=True)],
        "the store was the slow part: it gave 204 MB/s with 4 reads in flight; the ranks waited for bytes 62% of the "
        "time",
    ),
    "reading, but not the store": (
        [reader(0, read=9.5, reading=2.0, share=7.0)],
        "reading was the slow part, and not for the store: 211 MB/s, with a read under way only 21% of that time; "
        "rank 0 waited for bytes 70% of the time",
    ),
    "one rank's consumer": (
        [
            reader(0, read=2, share=9, consumer=0.5),
            *(rank(k, share=9, consumer=0.5) for k in (1, 2)),
            rank(3, share=0.1, consumer=9.3, decode=0.4),
        ],
        "rank 3's consumer was the slow part: it took 93% of the time (5% on the 3 others); the others waited for "
        "bytes 90% of the time; the store was idle 80% of the time",
    ),
    "one rank's consumer, where decoding costs all of them more": (
        [reader(0, read=2, share=5, decode=4.6), rank(1, decode=5.5, consumer=4.3)],
        "rank 1's consumer was the slow part: it took 43% of the time (0% on the other one); rank 0 waited for bytes "
        "50% of the time; the store was idle 80% of the time",
    ),
    "one rank's decoder": (
        [reader(0, read=2, share=9), rank(1, decode=9.5)],
        "decoding on rank 1 was the slow part: it took 95% of the time (0% on the other one); rank 0 waited for bytes "
        "90% of the time; the store was idle 80% of the time",
    ),
    "training": (
        [reader(0, read=3, consumer=9.5), rank(1, consumer=9.6)],
        "the training loop's own code was the slow part: it took 96% of the time; no rank waited for bytes and the "
        "store was idle 70% of the time",
    ),
    "training, with ahead": (
        # Waiting for bytes in the background while the caller works is no loss.
        [reader(0, read=3, consumer=9.8, decode=8.0, share=1.5, ahead=True)],
        "the consumer's own code was the slow part: it took 98% of the time; rank 0 did not wait for bytes and the "
        "store was idle 70% of the time",
    ),
    "decoding on all, with ahead": (
        [reader(0, read=3, consumer=5, decode=9.5, ahead=True), rank(1, consumer=5, decode=9.4, ahead=True)],
        "decoding was the slow part: it took 94% of the time; no rank waited for bytes and the store was idle 70% of "
        "the time",
    ),
    "copying on all": (
        [reader(0, read=3, decode=9.5, copies=True), rank(1, decode=9.4, copies=True)],
        "copying records into batches was the slow part: it took 94% of the time; no rank waited for bytes and the "
        "store was idle 70% of the time",
    ),
    "copying on one": (
        [reader(0, read=2, share=9, copies=True), rank(1, decode=9.5, copies=True)],
        "copying records into batches on rank 1 was the slow part: it took 95% of the time (0% on the other one); rank "
        "0 waited for bytes 90% of the time; the store was idle 80% of the time",
    ),
    "a control plane": (
        [reader(0, read=9.8, reading=40, held=30, share=6.0, decode=3), rank(1, share=6.4, decode=3)],
        "the control plane's limit was the slow part: it let 204 MB/s through, and reads waited for it 75% of their "
        "time; the ranks waited for bytes 62% of the time",
    ),
    "a plane that hardly holds": (
        [reader(0, read=9.8, reading=40, held=4, share=6.0, decode=3)],
        "the store was the slow part: it gave 204 MB/s with 4.1 reads in flight; rank 0 waited for bytes 60% of the "
        "time",
    ),
    "training, where all wait for one": (
        [
            reader(0, read=3, consumer=9.5, computed=2),
            rank(1, consumer=9.6, computed=2),
            rank(2, consumer=9.6, computed=8),
        ],
        "the training loop's own code was the slow part: it took 96% of the time, and on rank 2 it computed 80% of the "
        "time (20% on the 2 others); no rank waited for bytes and the store was idle 70% of the time",
    ),
    "one of two ranks, told by itself": (
        [rank(1, share=6.4, decode=3)],
        "reading, which another rank does, was the slow part: rank 1 waited for bytes 64% of the time",
    ),
    "planning": (
        [reader(0, read=3, locate=9, share=8)],
        "working out which bytes to read was the slow part: 90% of the time on rank 0; rank 0 waited for bytes 80% of "
        "the time and the store was idle 70% of the time",
    ),
    "kernels, not what waited for them": (
        [reader(0, read=3, locate=9, share=8, compiled=8)],
        "compiling kernels was the slow part: 80% of the time; the next run here loads them",
    ),
    "a kernel": (
        [reader(0, read=3, locate=9, compiled=2)],
        "working out which bytes to read was the slow part: 90% of the time on rank 0; rank 0 did not wait for bytes "
        "and the store was idle 70% of the time",
    ),
    "none": (
        [reader(0, read=3, consumer=4, share=2)],
        "no part was the slow one: the consumers took 40% and decoding 0% of the time; rank 0 waited for bytes 20% of "
        "the time; the store was idle 70% of the time",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_sentence(name: str) -> None:
    ranks, expected = CASES[name]
    assert explain(ranks) == expected


def test_what_stands_out() -> None:
    assert odd_one([]) is None
    assert odd_one([5.0]) is None
    assert odd_one([0.1, 0.9]) == 1
    assert odd_one([0.8, 0.9, 0.85]) is None, "by a factor"
    assert odd_one([0.01, 0.05, 0.01]) is None, "small, whatever the factor"


def test_differences_and_sums() -> None:
    before, now = reader(3, read=1, node=2), reader(3, read=4, node=2, batches=150)
    since = now - before
    assert (since.rank, since.node, since.reader, since.read, since.batches, since.reads) == (3, 2, True, 3, 50, 0)
    both = Report("/x", [before, now]).total
    assert (both["read"], both["batches"]) == (5, 250)
    assert "rank" not in both


def test_report_in_words_and_numbers() -> None:
    ranks = [reader(0, read=2, share=9, node_bytes=5_000_000, stalls=7), rank(1, consumer=9.5, node_bytes=7_000_000)]
    report = Report("/x", ranks)
    assert report.seconds == 10
    assert report.stalled
    assert report.skew[0] == 1
    assert report.total["node_bytes"] == 12_000_000
    text = str(report)
    head, first, second, whole, skew, _, sentence = text.splitlines()
    assert first.split()[:5] == ["0", "0", "1,000", "10.00", "0.0%"]
    assert second.split()[4] == "95.0%"
    assert whole.split()[:2] == ["all", "2,000"]
    assert "12 MB" in whole
    assert "rank 1 was busy 2.00 times" in skew
    assert sentence.startswith("Rank 1's consumer was the slow part")
    assert len({len(line) for line in (first, whole)}) <= 2
    assert len(first) <= len(head)
    assert json.loads(json.dumps(report.as_dict()))["sentence"] == report.sentence
    assert report.line() == (
        f"2,000 records in 10.00 s, 1.2 MB/s, 7 stalls (9.00 s on all ranks together): {report.sentence}"
    )
    since = report.since(Report("/x", ranks))
    assert (since.seconds, since.line()) == (0, "0 records in 0 us, 0 stalls")
    assert report.line(complete=False) == report.line().replace(" 1.2 MB/s,", "")
    nothing = Report("/x", [RankStats(loop=0.5)])
    assert nothing.line(complete=False) == "0 records in 500.0 ms, 0 stalls"


def test_what_all_ranks_lost_is_what_each_lost() -> None:
    """One waited with nothing missing, one missed bytes without waiting (they were decoded ahead): nothing is lost."""
    ranks = [reader(0, read=1, share=9, waiting=0), rank(1, share=0, waiting=9)]
    assert [one.lost for one in ranks] == [0, 0]
    lines = str(Report("/x", ranks)).splitlines()
    at = lines[0].index("waited")
    assert {line[at : at + 6].strip() for line in lines[1:4]} == {"0.0%"}


def test_a_rank_alone() -> None:
    text = str(Report("/x", [rank(1, share=6.4, decode=3)], of=4))
    assert "this rank alone, of 4: report(all_ranks=True)" in text
    assert "all_ranks" not in str(Report("/x", [rank(0)], of=1))
    assert Report("/x", [rank(1)], of=4).since(Report("/x", [rank(1)], of=4)).of == 4


def test_no_more_than_all_of_the_loops_was_reading() -> None:
    """Where it went on between two of them."""
    assert "120" not in (said := str(Report("/x", [reader(0, read=12)])))
    assert "100.0%" in said


def test_no_sentence_where_nothing_stalled() -> None:
    report = Report("/x", [reader(0, read=2, share=0.3, consumer=9)])
    assert not report.stalled
    assert report.line().endswith("0 stalls")
    first_bytes_only = Report("/x", [reader(0, read=9, share=8, stalled=0.0)])
    assert not first_bytes_only.stalled


# -- from a loader -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def values() -> list[bytes]:
    return [bytes([i % 251]) * (100 + i * 37 % 3000) for i in range(N)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, values: list[bytes]) -> str:
    place = str(tmp_path_factory.mktemp("set") / "x.lmdb")
    with lmdb.open(place, map_size=1 << 26) as env, env.begin(write=True) as txn:
        for i, value in enumerate(values):
            txn.put(b"%06d" % i, value)
    return place


@pytest.mark.parametrize("shuffle", [False, "global", "block"])
@pytest.mark.parametrize("batch_size", [1, 7, 64, 300])
def test_bytes_are_counted(path: str, values: list[bytes], shuffle: bool | str, batch_size: int) -> None:
    """Also where a step has pieces, several groups, or is not full."""
    begin = time.perf_counter()
    with pario.Loader(path, batch_size, shuffle=shuffle, options=SMALL) as loader:
        for epochs in (1, 2):
            for _batch in loader:
                pass
            (mine,) = loader.report().ranks
            passed = time.perf_counter() - begin
            assert mine.node_bytes == epochs * sum(map(len, values))
            assert mine.records == epochs * N
            assert mine.batches == epochs * len(loader)
            assert mine.bytes_read >= mine.node_bytes
            assert mine.reads > 0
            assert mine.reading > 0
            assert 0 < mine.read <= passed  # of which some is ahead of the next loop, or of this one
            assert mine.loop <= passed
            assert 0 <= mine.ready <= mine.groups * SMALL.slots
            assert mine.stalled <= mine.share <= mine.waiting <= mine.loop
            assert loader.stats()["node_bytes"] == mine.node_bytes


def test_in_the_middle_of_a_loop(path: str) -> None:
    with pario.Loader(path, 4, options=SMALL) as loader:
        for batch in loader:
            if batch.step == 5:
                time.sleep(0.05)
                report = loader.report()
                assert report.total["records"] == 24
                assert report.seconds >= 0.05
        assert loader.report().total["records"] == N


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "pario"]


def test_one_line_per_epoch(path: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pario")
    with pario.Loader(path, 16, options=SMALL) as loader:
        for _ in range(2):
            for _batch in loader:
                pass
        loader.report()
        for batch in loader:
            if batch.step == 3:
                break
        assert len(lines_of(caplog)) == 2
    lines = lines_of(caplog)
    assert len(lines) == 3
    for number, line in enumerate(lines[:2]):
        assert re.match(rf"epoch {number}: 400 records in [\d.]+ [mu]?s, [\d.]+ .B/s, \d+ stalls?", line), line
    assert re.match(r"epoch 2, left early: 64 records in [\d.]+ [mu]?s, \d+ stalls?", lines[2]), lines[2]


def test_the_log_is_silent_by_itself(path: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert not logging.getLogger("pario").handlers
    with pario.Loader(path, 16, options=SMALL) as loader:
        for _batch in loader:
            pass
    assert capfd.readouterr() == ("", "")


def slow_reads(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    read = PosixFetcher.read

    def late(self, reads, out, starts):
        for k in range(len(reads)):
            time.sleep(seconds)
            read(self, reads[k : k + 1], out, starts[k : k + 1])

    monkeypatch.setattr(PosixFetcher, "read", late)


def test_a_slow_store_is_told(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, values: list[bytes]
) -> None:
    with pario.Loader(path, 16, options=pario.Options(slot_bytes=64 << 10, slots=2, inflight=1)) as loader:
        for _batch in loader:  # index, kernels
            pass
        before = loader.report()
        caplog.set_level(logging.INFO, "pario")
        slow_reads(monkeypatch, 0.03)
        for _batch in loader:
            pass
        report = loader.report().since(before)
    slow = "the store or the number of reads in flight was the slow part: it gave "
    assert report.sentence.startswith((slow, "the store was the slow part: it gave ")), report
    told = r"with (the one read that .*|0.\d reads in flight); rank 0 waited for bytes \d+% of the time"
    assert re.search(told, report.sentence), report
    (mine,) = report.ranks
    assert mine.stalls >= 5
    assert mine.stalled > 0.5 * mine.loop
    assert mine.ready_mean < 0.5
    assert 0.7 <= mine.in_flight <= 1.01
    assert mine.decode < 0.5 * mine.loop, "waiting is no decoding"
    (line,) = (each for each in lines_of(caplog) if each.startswith("epoch 1:"))
    assert report.sentence in line


def test_a_slow_consumer_is_told(path: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pario")
    with pario.Loader(path, 16, options=SMALL) as loader:
        for _batch in loader:
            pass
        before = loader.report()
        for _batch in loader:
            time.sleep(0.01)
        report = loader.report().since(before)
    assert report.sentence.startswith("the consumer's own code was the slow part"), report
    (mine,) = report.ranks
    assert mine.lost < mine.consumer / 2
    assert mine.ready_mean >= 1
    assert ("slow part" in lines_of(caplog)[1]) == report.stalled


@pytest.mark.parametrize("ahead", [False, True])
def test_a_slow_decoder_is_told(path: str, ahead: bool) -> None:
    class Slow(pario.decode.Raw):
        def decode(self, records, out, draw):
            time.sleep(0.01)
            return super().decode(records, out, draw)

    def slow(record: memoryview) -> dict[str, int]:
        time.sleep(5e-4)
        return {"n": len(record)}

    with pario.Loader(path, 16, slow if ahead else Slow(), options=SMALL) as loader:
        for _batch in loader:
            pass
        report = loader.report()
    assert report.ranks[0].ahead == ahead
    assert report.sentence.startswith("decoding was the slow part: it took "), report


@pytest.mark.parametrize(
    ("decoder", "copies"),
    [(pario.decode.Raw(), True), (lambda record: {"n": len(record)}, False), (pario.decode.Function(len), False)],
)
def test_who_only_copies(path: str, decoder: object, copies: bool) -> None:
    """Nothing is decoded by a decoder that hands the bytes out as they are."""
    with pario.Loader(path, 16, decoder, options=pario.Options(inflight=3, slot_bytes=64 << 10)) as loader:  # type: ignore[arg-type]
        (mine,) = loader.report().ranks
    assert (mine.copies, mine.depth) == (copies, 3)


# -- for Prometheus ----------------------------------------------------------------------------------------------------


def test_metrics_file(path: str, tmp_path: Path, values: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    file = tmp_path / "pario.prom"
    monkeypatch.setenv("PARIO_JOB", "night run")
    labels = {"job_id": job_name()[0], "loader": "pario", "dataset": f"{path}/data.mdb"}
    assert labels["job_id"].startswith("night run")

    def read() -> dict[str, tuple[float, dict[str, str]]]:
        families = list(parser.text_string_to_metric_families(file.read_text()))
        assert all(family.documentation for family in families)
        assert all(family.name.startswith("pario_") for family in families)
        assert {family.type for family in families} == {"counter", "gauge"}
        return {sample.name: (sample.value, sample.labels) for family in families for sample in family.samples}

    options = pario.Options(once=True, slot_bytes=64 << 10, metrics_file=str(file))  # nothing is read ahead of a report
    with pario.Loader(path, 16, options=options) as loader:
        assert read()["pario_records_total"][0] == 0
        for _batch in loader:
            pass
        report = loader.report()
        found = read()
        assert found["pario_records_total"] == (N, {**labels, "node": "0", "rank": "0"})
        assert found["pario_read_bytes_total"][0] == report.total["bytes_read"]
        assert found["pario_node_bytes_total"][0] == sum(map(len, values))
        assert found["pario_loop_seconds_total"][0] == pytest.approx(report.seconds)
        assert found["pario_reads_in_flight"][0] > 0
        assert found["pario_prefetch_depth"][0] == report.ranks[0].depth
        assert found["pario_rank_skew_ratio"] == (1.0, labels)
        inode = file.stat().st_ino
        for _batch in loader:
            pass
    assert read()["pario_records_total"][0] == 2 * N
    assert file.stat().st_ino != inode, "replaced as a whole, not written over"
    assert os.listdir(tmp_path) == ["pario.prom"]


def test_metrics_that_cannot_be_written(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(OptionError, match="metrics_file"):
        pario.Options(metrics_file=3)  # type: ignore[arg-type]
    gone = tmp_path / "gone"
    with pytest.raises(OptionError, match=r"metrics_file cannot be written: No such file.*gone/x\.prom"):
        pario.Loader(path, 16, options=pario.Options(metrics_file=str(gone / "x.prom")))
    gone.mkdir()
    with pario.Loader(path, 16, options=pario.Options(metrics_file=str(gone / "x.prom"))) as loader:
        (gone / "x.prom").unlink()
        gone.rmdir()
        for _batch in loader:
            pass
    assert "metrics not written" in caplog.text


def test_the_depth_and_its_reason() -> None:
    """One line, of the rank with most reads in flight; none where the user has set the number."""

    def lines(*readers: RankStats) -> list[str]:
        return [line.strip() for line in str(Report("/x", readers)).splitlines() if "inflight is" in line]

    one = reader(0, read=9.8, depth=26, depth_reason="so", tuned=True)
    other = reader(1, read=9.8, depth=7, depth_reason="otherwise", tuned=True)
    assert lines(one) == ["inflight is 26 now on rank 0: so"]
    assert lines(other, one, rank(2, tuned=True)) == ["inflight is 26 now on rank 0: so (7 to 26 on 2 reading ranks)"]
    assert lines(reader(0, read=9.8, depth=26, depth_reason="set by the user")) == []
    assert Report("/x", [one]).since(Report("/x", [one])).ranks[0].depth == 26
    assert "depth" not in Report("/x", [one]).total
