"""The numbers that a trace comes down to: made when it is written, read back by anyone who gives advice.

What is read back was in a file: every value has the type and the range that it should have, or it is an error.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, TypeVar

import numpy as np

from pario.errors import FileError
from pario.stats.rank import RankStats
from pario.stats.trace import OPEN, PREAD, PROBE, READ, STAT, OpenedFile, Recorder

#: A request below this is small.
SMALL_BYTES = 1 << 20
#: A request is random if it begins farther than this from all of the last `_LOOKS` ones of its rank: those that are in
#: flight at once come in any order, and neither a disk's head nor a server's read-ahead minds.
NEAR_BYTES, _LOOKS = 1 << 20, 16

WANTED = "Name a file that `python -m pario trace` or Options(trace=...) has written."

#: what a track says of what it had no room for
_DROPPED = "dropped", "dropped_reads", "dropped_bytes"

T = TypeVar("T")


@dataclass
class FileRequests(OpenedFile):
    """What one rank asked of one file.

    reads, nbytes, seconds : requests for records and pages, their bytes, and their seconds, summed over threads
    small : of them, below SMALL_BYTES
    known : of them, those whose extents were recorded; random : of these
    probes : looks into the page cache, a byte each, which ask no store
    opens, stats, meta_reads, meta_bytes, meta_seconds : opening it, looks at its path, reads of its meta pages; all
        their seconds
    """

    reads: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    small: int = 0
    known: int = 0
    random: int = 0
    opens: int = 0
    stats: int = 0
    meta_reads: int = 0
    meta_bytes: int = 0
    meta_seconds: float = 0.0
    probes: int = 0


@dataclass
class LoaderSummary:
    """path : the dataset; options : name -> value; stats : of this rank"""

    path: str
    options: dict[str, Any]
    stats: RankStats


@dataclass
class RankSummary:
    """What one rank did.

    seconds : from the beginning of the trace to its writing
    dropped, dropped_reads, dropped_bytes : events that had no room, and their requests, which `files` lacks
    kernel : what the kernel counted for the process meanwhile, by its names (proc(5), io)
    """

    rank: int
    size: int = 1
    node: int = 0
    host: str = ""
    pid: int = 0
    seconds: float = 0.0
    dropped: int = 0
    dropped_reads: int = 0
    dropped_bytes: int = 0
    kernel: dict[str, int] = field(default_factory=dict)
    files: list[FileRequests] = field(default_factory=list)
    loaders: list[LoaderSummary] = field(default_factory=list)


# -- made of what was recorded -----------------------------------------------------------------------------------------


def summarise(recorder: Recorder, tracks: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict[str, Any]:
    """The summary of one rank, for JSON. tracks : EVENT[n] and EXTENT[m] of each thread"""
    files = [FileRequests(**asdict(each)) for each in recorder.files]
    for number, file in enumerate(files):
        _count(file, number, tracks)
    summary = RankSummary(
        **{name: getattr(recorder, name) for name in ("rank", "size", "node", "pid")},
        **{name: sum(getattr(track, name) for track in recorder.tracks) for name in _DROPPED},
        host=os.uname().nodename,
        seconds=time.perf_counter() - recorder.began,
        kernel=recorder.kernel(),
        files=files,
    )
    for use in recorder.uses:
        stats = use.now()
        if stats is not None:
            summary.loaders.append(LoaderSummary(use.path, use.options, stats))
    return asdict(summary)


def _count(file: FileRequests, number: int, tracks: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    """Add what the tracks have of this file."""
    times, offsets, sizes = [], [], []
    for events, requests in tracks:
        mine = events[events["file"] == number]
        took = mine["end"] - mine["begin"]
        kind, reads, nbytes = mine["kind"], mine["b"], mine["c"]
        file.opens += int((kind == OPEN).sum())
        file.stats += int((kind == STAT).sum())
        file.probes += int(reads[kind == PROBE].sum())
        file.meta_reads += int(reads[kind == PREAD].sum())
        file.meta_bytes += int(nbytes[kind == PREAD].sum())
        file.meta_seconds += float(took[np.isin(kind, (OPEN, STAT, PREAD))].sum())
        file.seconds += float(took[kind == READ].sum())
        single = (kind == READ) & (reads == 1)
        times.append(mine["begin"][single])
        offsets.append(mine["a"][single])
        sizes.append(nbytes[single])
        unknown = (kind == READ) & (reads != 1) & (nbytes >= 0)
        file.reads += int(reads[unknown].sum())
        file.nbytes += int(nbytes[unknown].sum())
        file.small += int(reads[unknown & (nbytes < SMALL_BYTES * np.maximum(reads, 1))].sum())
        several = (kind == READ) & (reads != 1) & (nbytes < 0)
        counts = reads[several]
        firsts = np.repeat(mine["a"][several] - (np.cumsum(counts) - counts), counts)
        found = requests[firsts + np.arange(len(firsts))] if len(firsts) else requests[:0]
        times.append(np.repeat(mine["begin"][several], counts))
        offsets.append(found["offset"])
        sizes.append(found["nbytes"])
    if not times:
        return
    order = np.argsort(np.concatenate(times), kind="stable")
    begins, lengths = np.concatenate(offsets)[order], np.concatenate(sizes)[order]
    file.reads += len(begins)
    file.nbytes += int(lengths.sum())
    file.small += int((lengths < SMALL_BYTES).sum())
    file.known = len(begins)
    file.random = int(_random(begins, begins + lengths).sum())


def _random(begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """bool[n]: which requests begin near none of the last ones. The first is not random."""
    far = np.ones(len(begins), bool)
    far[:1] = False
    for back in range(1, min(_LOOKS, len(begins) - 1) + 1):
        after = begins[back:]
        near = (after <= ends[:-back] + NEAR_BYTES) & (after >= begins[:-back] - NEAR_BYTES)
        far[back:] &= ~near
    return far


# -- read back ---------------------------------------------------------------------------------------------------------


def read_ranks(head: Mapping[str, Any], path: str) -> list[RankSummary]:
    """The ranks of a trace's first line (trace_file.py). Raises FileError."""
    try:
        ranks = [_rank(found) for found in head["ranks"]]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as e:
        raise FileError(f"the summary in the trace is damaged: {e}", path=path, hint=WANTED) from None
    return sorted(ranks, key=lambda rank: rank.rank)


def _rank(found: Mapping[str, Any]) -> RankSummary:
    rank = _known(RankSummary, found, skip=("files", "loaders", "kernel"))
    rank.kernel = {str(name): _whole(value, name) for name, value in dict(found.get("kernel", {})).items()}
    rank.files = [_known(FileRequests, each) for each in _list(found, "files")]
    for each in _list(found, "loaders"):
        stats = _known(RankStats, each["stats"], skip=("knobs",))  # of which no advice speaks
        options = {str(name): value for name, value in dict(each["options"]).items()}
        rank.loaders.append(LoaderSummary(_text(each["path"], "path"), options, stats))
    return rank


def _list(found: Mapping[str, Any], name: str) -> list[Any]:
    value = found.get(name, [])
    if not isinstance(value, list):
        raise TypeError(f"{name} is no list")
    return value


def _known(kind: type[T], found: Mapping[str, Any], skip: tuple[str, ...] = ()) -> T:
    """An object of a dataclass with the fields that `found` has of it, each of its default's type."""
    values: dict[str, Any] = {}
    for each in fields(kind):  # type: ignore[arg-type]
        if each.name in skip or (each.name not in found and each.default is not MISSING):
            continue
        value = found[each.name]
        if value is not None or each.type != "bool | None":
            value = _READ[str(each.type).removesuffix(" | None")](value, each.name)
        values[each.name] = value
    return kind(**values)


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise TypeError(f"{name} is {value!r}")
    if not -1e-3 <= value < 1 << 63:  # seconds that are differences may be a little below 0
        raise ValueError(f"{name} is {value!r}")
    return float(value)


def _whole(value: Any, name: str) -> int:
    _number(value, name)
    return int(value)


def _truth(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}")
    return value


def _text(value: Any, name: str) -> str:
    """Text that may be printed."""
    if not isinstance(value, str) or len(value) > 1 << 16:
        raise TypeError(f"{name} is missing or too long")
    return "".join(each if each.isprintable() else "?" for each in value)


#: type of a field -> what checks its value
_READ: dict[str, Callable[[Any, str], Any]] = {"bool": _truth, "str": _text, "int": _whole, "float": _number}
