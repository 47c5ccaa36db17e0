"""The command line of every peer.

    python -m benchmarks.peers.NAME write SET...                    the set's records in the peer's own format
    python -m benchmarks.peers.NAME read SET [--threads 2] ...      shuffled epochs; one JSON line
    python -m benchmarks.peers.NAME serve SOCKET                    reads when it is told to: for conduct.py

SET is a folder of sets.py. Runs in the peer's environment, which has numpy but perhaps not pario.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.metadata
import json
import os
import socket
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from benchmarks.peers.judging import PIXELS, Truth, judge, numbers_of
from benchmarks.worker import memory

__all__ = ["MEAN", "STD", "Job", "Reader", "Source", "cpu_seconds", "decode_into", "main"]

#: A timed turn begins with an epoch off the clock if that takes less than this: what a loader has prepared in idle time
#: before its turn must not count.
_LEAD_S = 0.4
_DISTRIBUTIONS = (
    "pario", "lmdb", "torch", "ffcv", "nvidia-dali-cuda120", "webdataset", "tensorflow-cpu", "datasets", "simplejpeg",
    "numpy",
)  # fmt: skip


#: of the variant "crop", as parts of 255
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Source:
    """The records of a set, from the LMDB that every peer's files are made of. Values are bytes without a header."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        import lmdb

        facts = json.loads((Path(folder) / "set.json").read_text())
        self.jpeg: bool = facts["jpeg"]
        self.n: int = facts["records"]
        self.record_bytes: int = facts["record_bytes"]
        self.path = str(Path(folder) / "source")
        self._env = lmdb.open(self.path, readonly=True, lock=False, readahead=False)
        self._txn = self._env.begin()

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> bytes:
        return self._txn.get(b"%08d" % i)

    def close(self) -> None:
        self._txn.abort()
        self._env.close()


@dataclass(frozen=True)
class Job:
    """What a reader is to do.

    folder : the set; on a slow store that is where it is mounted
    batch : records per rank and batch
    shape : of a record in a batch: (bytes,) or (256, 256, 3), uint8
    """

    folder: str
    jpeg: bool
    n: int
    batch: int
    shape: tuple[int, ...]
    rank: int = 0
    ranks: int = 1
    threads: int = 1
    variant: str = ""
    seed: int = 1

    def own(self, name: str) -> str:
        return str(Path(self.folder) / name)

    def mine(self, epoch: int) -> np.ndarray:
        """i64: this rank's records in a uniform order, for peers that take one."""
        order = np.random.default_rng((self.seed, epoch)).permutation(self.n)
        return order[self.rank :: self.ranks]


class Reader:
    """One peer's data set, open for reading. Subclasses import their library in `load`, not at the head: the harness
    reads their files in an environment without it."""

    #: of its folder in a set
    name: ClassVar[str]

    @staticmethod
    def write(source: Source, folder: Path) -> None:
        """The set in the peer's format, below `folder`; nothing for readers of the source LMDB."""

    @staticmethod
    def load(rank: int, ranks: int) -> None:
        """Import the library."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def epoch(self, epoch: int) -> Iterable[Any]:
        """Batches: something with `len` that np.asarray makes u8[b, *job.shape]."""
        raise NotImplementedError

    def agreed(self, mine: bool) -> bool:
        """What rank 0 says, for loaders whose ranks must run the same epochs."""
        return mine

    def close(self) -> None:
        pass


def decode_into(value: Any, out: np.ndarray) -> None:
    """One JPEG, RGB. The fast transform and usual upsampling, as FFCV and pario's Image(fast=True) decode."""
    import simplejpeg

    simplejpeg.decode_jpeg(value, "RGB", fastdct=True, buffer=out)


def cpu_seconds() -> float:
    """Of this process and its descendants, ended ones included."""
    own, tick = os.getpid(), os.sysconf("SC_CLK_TCK")
    parents: dict[int, int] = {}
    times: dict[int, float] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            parts = stat.read_text().rpartition(")")[2].split()
            parents[int(stat.parent.name)] = int(parts[1])
            times[int(stat.parent.name)] = sum(map(int, parts[11:15])) / tick
    todo, seconds = [own], time.process_time() - sum(os.times()[:2]) + times.get(own, 0.0)
    while todo:
        parent = todo.pop()
        children = [pid for pid, its in parents.items() if its == parent]
        seconds += sum(times[pid] for pid in children)
        todo += children
    return seconds


def _peak(reset: bool) -> int:
    """Bytes: the most resident memory of this process since the last reset."""
    if reset:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


class Session:
    """Carries out one request after another, with a data set that stays open as long as it is told to."""

    def __init__(self, kind: type[Reader], rank: int, ranks: int) -> None:
        self.kind, self.rank, self.ranks = kind, rank, ranks
        self._open: tuple[Job, Reader] | None = None
        self._epoch = 0
        self._epoch_s = 1e9  # of the last whole epoch of the open reader

    def job(self, asked: dict[str, Any]) -> Job:
        facts = json.loads((Path(asked["folder"]) / "set.json").read_text())
        shape = (PIXELS, PIXELS, 3) if facts["jpeg"] else (facts["record_bytes"],)
        return Job(
            asked["folder"], facts["jpeg"], facts["records"], asked.get("batch") or facts["batch"], shape, self.rank,
            self.ranks, asked.get("threads", 1), asked.get("variant", ""),
        )  # fmt: skip

    def do(self, asked: dict[str, Any]) -> dict[str, Any]:
        if asked["do"] == "close":
            self.close()
            return {}
        begin = time.perf_counter()
        job = self.job(asked)
        if self._open is None or self._open[0] != job:
            self.close()
            self._open = (job, self.kind(job))
            self._epoch_s = 1e9
        opened = time.perf_counter() - begin
        try:
            if asked["do"] == "check":
                return self._check(self._open[1], asked)
            return {"open": opened, **self._turn(self._open[1], asked.get("seconds", 1e9), asked.get("least", 0.0))}
        finally:
            if not asked.get("keep"):
                self.close()

    def close(self) -> None:
        held, self._open = self._open, None
        if held is not None:
            held[1].close()
            del held
            gc.collect()  # some loaders keep their files mapped in circles

    def _turn(self, reader: Reader, most_s: float, least_s: float) -> dict[str, Any]:
        """Epochs for at least and at most so many seconds; one that is too long ends early."""
        first, records, epochs, early = None, 0, 0, False
        if least_s and reader.agreed(self._epoch_s < _LEAD_S):
            self._epoch += 1
            for batch in reader.epoch(self._epoch):
                del batch
        _peak(reset=True)
        cpu, start = cpu_seconds(), time.perf_counter()
        while not early and (epochs == 0 or reader.agreed(time.perf_counter() - start < least_s)):
            self._epoch += 1
            epochs += 1
            batches = iter(reader.epoch(self._epoch))
            for batch in batches:
                records += len(batch)
                if first is None:
                    first = time.perf_counter() - start
                if time.perf_counter() - start > most_s:
                    early = True
                    break
            batch = None
            if early and hasattr(batches, "close"):
                batches.close()
        seconds = time.perf_counter() - start
        if not early:
            self._epoch_s = seconds / epochs
        used = memory()
        return {
            "seconds": seconds, "records": records, "epochs": epochs, "first": first, "early": early,
            "cpu": cpu_seconds() - cpu, "rss": _peak(reset=False), "pss": used["pss"],
        }  # fmt: skip

    def _check(self, reader: Reader, asked: dict[str, Any]) -> dict[str, Any]:
        """The numbers of all delivered records, batch by batch; how many of them have other bytes than they should."""
        truth = Truth(np.load(asked["truth"]))
        self._epoch += 1
        ids, wrong = [], 0
        for batch in reader.epoch(self._epoch):
            delivered = np.asarray(batch)
            if delivered.dtype != np.uint8 or delivered.shape[1:] != reader.job.shape:
                raise ValueError(f"a batch is {delivered.dtype}{delivered.shape}, not uint8 of {reader.job.shape}")
            ids.append(numbers_of(delivered).tolist())
            wrong += int((~truth.right(delivered)).sum())
        return {"ids": ids, "wrong": wrong}


def _versions() -> dict[str, str]:
    found = {}
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _serve(session: Session, address: str) -> None:
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(address)
        with line.makefile("rw") as file:
            file.write(json.dumps({"rank": session.rank, "versions": _versions()}) + "\n")
            file.flush()
            for asked in file:
                try:
                    answer = session.do(json.loads(asked))
                except Exception as e:  # the reader's errors are what some requests are about
                    traceback.print_exc()
                    answer = {"error": f"{type(e).__name__}: {e}"[:500]}
                file.write(json.dumps(answer) + "\n")
                file.flush()
    session.close()


def _read(session: Session, options: argparse.Namespace) -> dict[str, Any]:
    asked = {"folder": options.set[0], "threads": options.threads, "variant": options.variant, "batch": options.batch}
    truth = str(Path(options.set[0]) / "truth.npy")
    found = session.do({**asked, "do": "check", "truth": truth})
    delivered = judge([found["ids"]], session.job(asked).n, found["wrong"])
    turns = [session.do({**asked, "do": "turn", "keep": k < options.epochs}) for k in range(options.epochs + 1)]
    later = turns[1:]
    return {
        "records_per_s": sum(turn["records"] for turn in later) / sum(turn["seconds"] for turn in later),
        "cpu_us_per_record": 1e6 * sum(turn["cpu"] for turn in later) / sum(turn["records"] for turn in later),
        "first_batch_s": turns[0]["open"] + turns[0]["first"],
        "rss": max(turn["rss"] for turn in turns),
        "pss": max(turn["pss"] for turn in turns),
        "exactly_once": delivered.exactly_once,
        **asdict(delivered),
    }


def place() -> tuple[int, int]:
    """(rank, ranks), as the harness or the launcher says."""
    rank = os.environ.get("PEERS_RANK") or os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or "0"
    return int(rank), int(os.environ.get("PEERS_RANKS", "1"))


def main(kind: type[Reader]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("do", choices=["write", "read", "serve"])
    parser.add_argument("set", nargs="+", metavar="SET|SOCKET")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=0, help="records; 0: as the set says")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--variant", default="")
    options = parser.parse_args()
    if options.do == "write":
        for folder in options.set:
            source = Source(folder)
            kind.write(source, Path(folder) / kind.name)
            source.close()
        return
    rank, ranks = place()
    kind.load(rank, ranks)
    session = Session(kind, rank, ranks)
    if options.do == "serve":
        _serve(session, options.set[0])
    else:
        print(json.dumps(_read(session, options)), flush=True)
        session.close()
