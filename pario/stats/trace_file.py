"""The trace of a job as a file: JSON in the format of Chrome's tracing, which Perfetto shows.

    {"pario": {summary of each rank}, "displayTimeUnit": "ms", "traceEvents": [
    {"ph": "X", "pid": 0, "tid": 1, "ts": ..., "dur": ..., "name": "read", "args": {...}},
    ...
    ]}

The first line has what `python -m pario advise` needs, each other line is an event, and so the files of ranks become
one without being parsed. A process of the format is a rank, a thread of it a thread, or a slot of the node's ring. The
format wants spans of a thread nested in each other; what overlaps otherwise is cut.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pario.errors import FileError, OptionError
from pario.machine import replacing
from pario.stats.trace import FILL, PREAD, READ, SPANS, Recorder
from pario.stats.trace_summary import WANTED, summarise
from pario.text import DAMAGED, read_json

_BEGIN, _END = b'"displayTimeUnit": "ms", "traceEvents": [\n', b"\n]}\n"
#: A first line is not longer: some KB per rank.
HEAD_BYTES = 256 << 20
#: Thread numbers of slots in the format begin here; smaller ones are threads.
_SLOTS = 1000
#: Events that are objects of Python at once.
_AT_ONCE = 8192

#: (begin, end, name, args as JSON), in whole microseconds of the recorder's clock
_Span = tuple[int, int, str, str]


def check_writable(path: str) -> str:
    """The absolute path of a trace to be written. Raises OptionError if no file can be written there."""
    path = os.path.abspath(os.path.expanduser(path))
    folder = os.path.dirname(path)
    if os.path.isdir(path) or not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise OptionError(
            "the trace cannot be written there", path=path, hint="Name a file in a folder that exists and is writable."
        )
    return path


def part_path(path: str, rank: int, size: int) -> str:
    """The file of one rank: `trace.json` of a single one, else `trace.rank3.json`."""
    if size == 1:
        return path
    stem, suffix = os.path.splitext(path)
    return f"{stem}.rank{rank}{suffix}"


def remove_part(recorder: Recorder) -> None:
    """What an earlier job has left where this rank will write."""
    if recorder.size > 1:
        with suppress(OSError):
            os.unlink(part_path(recorder.path, recorder.rank, recorder.size))


def write_part(recorder: Recorder) -> None:
    """Write what one rank has recorded so far, in place of what it has written before. Raises OSError."""
    recorder.dirty = False
    tracks = [(track.name, track.events(), track.requests()) for track in list(recorder.tracks)]
    summary = {"version": 1, "ranks": [summarise(recorder, [(events, found) for _, events, found in tracks])]}

    _replace(part_path(recorder.path, recorder.rank, recorder.size), summary, _events(recorder, tracks))


def merge_parts(path: str, size: int) -> list[int]:
    """Make one file of those of the ranks, which disappear. Returns the ranks whose file was not there; then those of
    the others stay, too, and nothing is written. Raises OSError, FileError."""
    parts = {rank: part_path(path, rank, size) for rank in range(size)}
    missing = [rank for rank, part in parts.items() if not os.path.lexists(part)]
    if not missing:
        take_parts(list(parts.values()), path)
    return missing


def take_parts(parts: list[str], path: str) -> None:
    """Make one trace of several, which disappear. Raises OSError, FileError, also for parts of somebody else."""
    for part in parts:
        status = os.lstat(part)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise FileError("this part is another user's, or no file", path=part, hint="Name a folder of your own.")
    join_parts(parts, path)
    for part in parts:
        os.unlink(part)


def join_parts(parts: list[str], path: str) -> None:
    """One trace out of several, which stay. Raises OSError, FileError."""
    heads = [read_head(part) for part in parts]
    ranks = sorted((rank for head in heads for rank in head["ranks"]), key=lambda rank: int(rank["rank"]))

    def lines() -> Iterator[bytes]:
        for part in parts:
            with open_trace(part) as file:
                file.readline(HEAD_BYTES)
                for line in file:
                    if line.startswith(b"]"):
                        break
                    if line.strip():
                        yield line.rstrip(b",\n")

    _replace(path, {"version": heads[0]["version"], "ranks": ranks}, lines())


def open_trace(path: str) -> BinaryIO:
    """Open a trace that somebody names. Raises FileError."""
    try:
        # Without O_NONBLOCK the opening of a pipe would wait for its writer.
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb")
    except OSError as e:
        raise FileError(f"cannot open: {e.strerror}", path=path) from e
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise FileError("this is no file", path=path, hint=WANTED)
    return file


def read_head(path: str) -> dict[str, Any]:
    """The first line of a trace, as far as it is JSON. Raises FileError."""
    with open_trace(path) as file:
        first = file.readline(HEAD_BYTES)
        if not first.endswith(_BEGIN):
            raise FileError("this is no trace that pario has written", path=path, hint=WANTED)
        file.seek(-min(len(_END), os.fstat(file.fileno()).st_size), os.SEEK_END)
        whole = file.read() == _END
    if not whole:
        raise FileError(
            "the trace ends early",
            path=path,
            hint="Its copy is incomplete, or the disk was full: copy or record it again.",
        )
    try:
        head = read_json(first[: -len(_BEGIN)].rstrip(b", ") + b"}")["pario"]
    except DAMAGED:
        head = None
    ranks = head.get("ranks") if isinstance(head, dict) and head.get("version") == 1 else None
    if not isinstance(ranks, list) or not all(isinstance(one, dict) and type(one.get("rank")) is int for one in ranks):
        raise FileError("the summary in the first line of the trace is damaged", path=path, hint=WANTED)
    return head


def _replace(path: str, summary: dict[str, Any], lines: Iterator[bytes]) -> None:
    """Write a trace, so that a reader sees the old file or the new one."""
    with replacing(path) as file:
        file.write(json.dumps({"pario": summary})[:-1].encode() + b", " + _BEGIN)
        between = b""
        for line in lines:
            file.write(between + line)
            between = b",\n"
        file.write(_END)


def _events(recorder: Recorder, tracks: list[tuple[str, np.ndarray, np.ndarray]]) -> Iterator[bytes]:
    """The lines of one rank's events."""
    pid, day = recorder.rank, round(recorder.day * 1e6)
    yield _named(pid, 0, "process_name", f"rank {recorder.rank} (node {recorder.node}, {os.uname().nodename})")
    fills: dict[int, list[_Span]] = {}
    files = [json.dumps(Path(file.path).name) for file in recorder.files]
    for tid, (name, events, requests) in enumerate(tracks, 1):
        yield _named(pid, tid, "thread_name", _TRACKS.get(name, name))
        are_counters = np.isin(events["kind"], list(recorder.names))
        for kind, _, _, when, _, value, _, _ in events[are_counters].tolist():
            yield _counter(pid, _us(when) + day, recorder.names[kind], value)
        for _, slot, _, begin, end, group, _, nbytes in events[events["kind"] == FILL].tolist():
            args = f'{{"group": {group}, "bytes": {nbytes}}}'
            fills.setdefault(slot, []).append((_us(begin), _us(end), f"filling with group {group}", args))
        yield from _nested(pid, tid, _spans(events, requests, files), day)
    for slot, spans in sorted(fills.items()):
        yield _named(pid, _SLOTS + slot, "thread_name", f"slot {slot} of the ring")
        yield from _nested(pid, _SLOTS + slot, sorted(spans, key=lambda span: (span[0], -span[1])), day)


def _spans(events: np.ndarray, requests: np.ndarray, files: list[str]) -> Iterator[_Span]:
    """The spans of a thread, those outside first. Of thousands at a time, as objects of Python are large."""
    events = events[np.isin(events["kind"], list(SPANS)) & (events["kind"] != FILL)]
    begins, ends = (np.rint(events[each] * 1e6).astype(np.int64) for each in ("begin", "end"))
    order = np.lexsort((-ends, begins))
    for at in range(0, len(order), _AT_ONCE):
        now = order[at : at + _AT_ONCE]
        for event, begin, end in zip(events[now].tolist(), begins[now].tolist(), ends[now].tolist(), strict=True):
            kind, file, _, _, _, a, b, c = event
            args = ""
            if kind in (READ, PREAD):
                nbytes = c if c >= 0 else int(requests["nbytes"][a : a + b].sum())
                offset = a if b == 1 else int(requests["offset"][a]) if 0 <= a < len(requests) else -1
                where = f', "offset": {offset}' if offset >= 0 and kind == READ else ""
                source = files[file] if file < len(files) else '""'
                args = f'{{"requests": {b}, "bytes": {nbytes}{where}, "file": {source}}}'
            yield begin, end, SPANS[kind], args


#: names of threads -> names of tracks, where the first say little
_TRACKS = {"MainThread": "training loop", "pario-fill": "plans groups"}


def _nested(pid: int, tid: int, spans: Iterable[_Span], day: int) -> Iterator[bytes]:
    """Lines of spans, those outside first, cut where they would overlap without one being inside the other.

    Their times are whole microseconds since 1970: readers take them for floating point numbers, which have no room for
    parts of one, and what overlaps by a rounding error they leave out.
    """
    open_ends: list[int] = []
    for begin, end, name, args in spans:
        while open_ends and open_ends[-1] <= begin:
            open_ends.pop()
        if open_ends and end > open_ends[-1]:
            end = open_ends[-1]
        open_ends.append(end)
        more = f', "args": {args}' if args else ""
        yield (
            f'{{"ph": "X", "pid": {pid}, "tid": {tid}, "ts": {begin + day}, "dur": {end - begin}, '
            f'"name": "{name}"{more}}}'
        ).encode()


def _counter(pid: int, now: int, name: str, value: int) -> bytes:
    said = json.dumps(name)
    return f'{{"ph": "C", "pid": {pid}, "ts": {now}, "name": {said}, "args": {{"value": {value}}}}}'.encode()


def _named(pid: int, tid: int, what: str, name: str) -> bytes:
    return json.dumps({"ph": "M", "pid": pid, "tid": tid, "name": what, "args": {"name": name}}).encode()


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
