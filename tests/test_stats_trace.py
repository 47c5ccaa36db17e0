"""The recorder, the file and its summary, with events that are made: the oracles are counted by hand or by NumPy."""

from __future__ import annotations

import json
import math
import os
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pario.errors import FileError
from pario.records import EXTENT
from pario.stats import trace
from pario.stats.rank import RankStats
from pario.stats.trace import FILL, PREAD, READ, OpenedFile, Recorder, Use
from pario.stats.trace_file import join_parts, merge_parts, part_path, read_head, write_part
from pario.stats.trace_summary import NEAR_BYTES, RankSummary, read_ranks
from pario.stats.traced_stats import TracedStats

FILE = OpenedFile("/data/a.mdb", "ext4", "local", False, False)


def extents(*pairs: tuple[int, int]) -> np.ndarray:
    return np.array(list(pairs), EXTENT)


def events_of(path: str | Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(Path(path).read_text())["traceEvents"]
    return found


def summary_of(path: str) -> RankSummary:
    (rank,) = read_ranks(read_head(path), path)
    return rank


def assert_nested(events: list[dict[str, Any]]) -> None:
    """No two spans of a track overlap without one being inside the other."""
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in events:
        if event["ph"] == "X":
            tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in tracks.values():
        spans.sort(key=lambda span: (span[0], -span[1]))
        inside: list[int] = []
        for begin, end in spans:
            while inside and inside[-1] <= begin:
                inside.pop()
            assert not inside or end <= inside[-1]
            inside.append(end)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "trace.json")


def test_requests_are_counted_as_numpy_counts_them(path: str) -> None:
    recorder = Recorder(path)
    number = recorder.file(FILE)
    rng = np.random.default_rng(0)
    offsets = rng.integers(0, 1 << 40, 3000) // 512 * 512
    sizes = rng.integers(1, 3 << 20, 3000)
    k = 0
    while k < 3000:  # some one by one, others in one call
        n = int(rng.choice([1, 1, 7, 40]))
        recorder.reads(0.0, np.rec.fromarrays([offsets[k : k + n], sizes[k : k + n]], dtype=EXTENT), number)
        k += n
    recorder.request(PREAD, 0.0, 1, 4096, number)
    write_part(recorder)
    (file,) = summary_of(path).files
    assert (file.reads, file.nbytes) == (3000, int(sizes.sum()))
    assert file.small == int((sizes < 1 << 20).sum())
    assert file.known == 3000
    assert (file.meta_reads, file.meta_bytes) == (1, 4096)
    spans = [event for event in events_of(path) if event["name"] == "read"]
    assert sum(event["args"]["bytes"] for event in spans) == int(sizes.sum())
    assert sum(event["args"]["requests"] for event in spans) == 3000


@pytest.mark.parametrize(
    ("offsets", "random_ones"),
    [
        (range(0, 100 << 20, 1 << 20), 0),  # one after the other
        ([k ^ 1 for k in range(64)], 0),  # pairs change places: threads
        (range(0, 1000 * (NEAR_BYTES * 3), NEAR_BYTES * 3), 999),  # a jump before each
        ([0, 1 << 30] * 50, 1),  # two streams side by side
    ],
)
def test_what_is_random(path: str, offsets: Any, random_ones: int) -> None:
    recorder = Recorder(path)
    number = recorder.file(FILE)
    for k, offset in enumerate(offsets):
        recorder.event(READ, float(k), k + 0.5, offset, 1, 1000, number)
    write_part(recorder)
    assert summary_of(path).files[0].random == random_ones


def test_memory_is_bounded_and_what_is_dropped_is_counted(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_MOST", 200)
    monkeypatch.setattr(trace, "_MOST_EXTENTS", 101)
    recorder = Recorder(path)
    number = recorder.file(FILE)
    several = extents((0, 100), (1000, 200))
    for _ in range(105):
        recorder.reads(0.0, several, number)
    for _ in range(200):
        recorder.reads(0.0, several[:1], number)
    recorder.request(PREAD, 0.0, 1, 50, number)
    write_part(recorder)
    rank = summary_of(path)
    file = rank.files[0]
    assert sum(len(track.events()) for track in recorder.tracks) == 200
    assert file.known < file.reads, "of some only the number and the bytes are kept"
    assert rank.dropped >= 106
    assert file.reads + rank.dropped_reads == 2 * 105 + 200 + 1
    assert file.nbytes + rank.dropped_bytes == 300 * 105 + 100 * 200 + 50


def test_counters_that_grow_are_spans(path: str) -> None:
    recorder = Recorder(path)
    stats, plain = TracedStats.traced(recorder, rank=0), RankStats(rank=0)
    assert type(plain) is RankStats
    for one in (stats, plain):
        one.decode += 0.25
        one.waiting += 0.5
        one.check += 1e-9  # nobody would see it
        one.ready += 3
        one.node_bytes += 100
    assert {**vars(stats)} == {**vars(plain)}
    write_part(recorder)
    spans = {event["name"]: event for event in events_of(path) if event["ph"] == "X"}
    assert spans.keys() == {"decode", "next batch"}
    assert spans["decode"]["dur"] == pytest.approx(250e3, rel=1e-3)
    assert spans["next batch"]["dur"] == pytest.approx(500e3, rel=1e-3)
    assert [e["args"]["value"] for e in events_of(path) if e["ph"] == "C" and e["name"] == "full slots"] == [3]
    copy = stats - stats
    copy.decode += 1.0
    assert sum(len(track.events()) for track in recorder.tracks) == len(recorder.tracks[0].events())


def test_spans_of_a_track_are_nested(path: str) -> None:
    recorder = Recorder(path)
    chance = random.Random(1)
    for _ in range(2000):
        begin = chance.random()
        recorder.event(chance.choice([13, 14, 15]), begin, begin + chance.random() * chance.choice([0.001, 0.1]))
    write_part(recorder)
    events = events_of(path)
    assert len([event for event in events if event["ph"] == "X"]) == 2000
    assert_nested(events)


def test_slots_are_filled(path: str) -> None:
    recorder = Recorder(path)
    for group in range(6):
        recorder.event(FILL, group * 1.0, group + 0.5, group, 0, 1 << 20, group % 2)
    write_part(recorder)
    events = events_of(path)
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    slots = {tid: name for tid, name in names.items() if name.startswith("slot")}
    assert sorted(slots.values()) == ["slot 0 of the ring", "slot 1 of the ring"]
    first = sorted((e["ts"], e["name"], e["dur"]) for e in events if e.get("tid") == min(slots) and e["ph"] == "X")
    assert [(name, dur) for _, name, dur in first] == [(f"filling with group {k}", 500_000) for k in (0, 2, 4)]


def test_each_thread_has_a_track_and_names_are_used_again(path: str) -> None:
    recorder = Recorder(path)
    recorder.next_look = math.inf  # at the counters, which would be events, too
    both = threading.Barrier(2)

    def work() -> None:
        recorder.event(15, 0.0, 1.0)
        both.wait()

    for _ in range(20):
        threads = [threading.Thread(target=work, name="pario-read-0") for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert {track.name for track in recorder.tracks} == {"pario-read-0", "pario-read-0 (2)"}
    assert sum(len(track.events()) for track in recorder.tracks) == 40


def made(path: str, rank: int = 0, size: int = 1) -> None:
    recorder = Recorder(path)
    recorder.join(rank, size, rank)
    recorder.reads(0.0, extents((0, 5), (9, 7)), recorder.file(FILE))
    stats = RankStats(rank=rank, batches=3, loop=1.0, knobs={})
    recorder.add(Use("/data/a.mdb", {"shuffle": "none"}, lambda: stats), dict)
    write_part(recorder)


def test_parts_become_one_file(tmp_path: Path) -> None:
    path = str(tmp_path / "t.json")
    for rank in (2, 0):
        made(path, rank, 3)
    assert merge_parts(path, 3) == [1]
    assert not os.path.exists(path)
    made(path, 1, 3)
    assert merge_parts(path, 3) == []
    assert os.listdir(tmp_path) == ["t.json"]
    assert [rank.rank for rank in read_ranks(read_head(path), path)] == [0, 1, 2]
    assert {event["pid"] for event in events_of(path)} == {0, 1, 2}


def test_parts_of_others_and_links_are_refused(tmp_path: Path) -> None:
    path, other = str(tmp_path / "t.json"), str(tmp_path / "o.json")
    made(path, 0, 2)
    made(other)
    os.symlink(other, part_path(path, 1, 2))
    with pytest.raises(FileError, match=r"another user's, or no file.*rank1"):
        merge_parts(path, 2)
    with pytest.raises(FileError):
        join_parts([part_path(path, 0, 2), str(tmp_path / "gone.json")], path)
    assert not os.path.exists(path)


def test_a_trace_does_not_follow_links(tmp_path: Path) -> None:
    mine, link = tmp_path / "mine", tmp_path / "t.json"
    mine.write_text("x")
    link.symlink_to(mine)
    made(str(link))
    assert mine.read_text() == "x"
    assert not link.is_symlink()


def refusal(path: str) -> str | None:
    """The error of a file, if it has one; it must have a hint, and be no other one."""
    try:
        read_ranks(read_head(path), path)
    except FileError as e:
        return f"{e}" if e.hint else None
    return None


def test_damage_is_one_clear_error(path: str, tmp_path: Path) -> None:
    """Cut and flipped at random: a FileError that names the file, or numbers that have the right types."""
    made(path)
    data = Path(path).read_bytes()
    bad = tmp_path / "bad.json"
    chance = random.Random(2)
    first = data.index(b"\n")
    errors = 0
    for k in range(400):
        spoilt = bytearray(data)
        if k % 4:
            spoilt[chance.randrange(first)] = chance.randrange(256)
        else:
            del spoilt[chance.randrange(len(data)) :]
        bad.write_bytes(spoilt)
        said = refusal(str(bad))
        assert said is None or str(bad) in said
        errors += said is not None
    assert errors > 100


@pytest.mark.parametrize("text", [b"", b"{}", b"\x00" * 100, b'{"traceEvents": []}', b"[1]\n", b"{" * 100_000])
def test_other_files_are_no_traces(tmp_path: Path, text: bytes) -> None:
    other = tmp_path / "x.json"
    other.write_bytes(text)
    with pytest.raises(FileError, match="no trace that pario has written"):
        read_head(str(other))
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "gone", "."):
        with pytest.raises(FileError):
            read_head(str(tmp_path / name))


@pytest.mark.parametrize(
    ("where", "value"),
    [("reads", "7"), ("reads", True), ("nbytes", -5), ("seconds", float("inf")), ("path", 3), ("reads", 1e300)],
)
def test_values_have_their_types(path: str, where: str, value: Any) -> None:
    made(path)
    head = read_head(path)
    head["ranks"][0]["files"][0][where] = value
    with pytest.raises(FileError, match="damaged"):
        read_ranks(head, path)
