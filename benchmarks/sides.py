"""What the sections of the bars share: runs of both sides, rates from a cold file, a row of two rates."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks import cache, data
from benchmarks.measure import Row, Section, launch
from benchmarks.stores import throttled

GB = 1e9
BATCH = {"100b": 1024, "3k": 256, "197k": 64}  # records per rank and step
#: records of the small sets, which are read before a clock starts
SMALL = {"3k": 4000, "197k": 100}
#: of rates in `compare`
UNIT: dict[str, Any] = {"unit": 1e3, "name": "k records/s"}
SHUFFLES = {"none": "shuffle=False", "block": '"block"', "global": '"global"'}


@dataclass
class Bench:
    """What all sections need."""

    folder: str
    rounds: int
    quick: bool
    sets: dict[str, data.DataSet] = field(default_factory=dict)
    small: dict[str, data.DataSet] = field(default_factory=dict)  # read before a clock starts

    @classmethod
    def of(cls, options: argparse.Namespace) -> Bench:
        """As the command line of a script says (`measure.parser_of`)."""
        return cls(options.data, 1 if options.smoke else options.rounds, options.smoke)

    def make(self, small: dict[str, int], records: dict[str, int]) -> None:
        """Make the sets, each beside a small one of so many records, and index them. Those that `records` does not name
        are whole; if it is to be quick, the small ones are all there is."""
        for which, few in small.items():
            self.small[which] = self.sets[which] = data.make(self.folder, which, few)
            if not self.quick:
                self.sets[which] = data.make(self.folder, which, records.get(which))
            for held in {self.small[which].path, self.sets[which].path}:
                self.index(held)

    def pario(self, path: str, which: str, shuffle: str, *more: str, **how: Any) -> dict[str, Any]:
        """One run of worker_pario. how: ranks, nodes, group."""
        arguments = [path, "--shuffle", shuffle, "--batch", str(BATCH[which]), *more]
        return launch("benchmarks.worker_pario", arguments, **how)

    def cold(self, path: str, which: str, shuffle: str, **how: Any) -> dict[str, Any]:
        """One epoch, the kernels loaded before it begins."""
        return self.pario(path, which, shuffle, "--warmup", self.small[which].path, **how)

    def py_lmdb(self, which: str, *more: str, **how: Any) -> dict[str, Any]:
        held = self.sets[which]
        fixed = ["--batch", str(BATCH[which]), "--head", str(held.head), "--pixels", str(held.image_bytes)]
        return launch("benchmarks.worker_lmdb", [held.path, *fixed, *more], **how)

    def index(self, path: str) -> None:
        """Build the index and save the side-car (untimed)."""
        launch("benchmarks.worker_pario", [path, "--index-only"])

    @contextmanager
    def order(self, which: str, shuffle: str, ranks: int = 1) -> Iterator[str]:
        """A folder with the Loader's order, for the other side's loop."""
        with tempfile.TemporaryDirectory(prefix="pario-order-") as folder:
            self.pario(self.sets[which].path, which, shuffle, "--ids", folder, ranks=ranks)
            yield folder


def from_cold(
    file: str, run: Callable[[throttled.Group | None], tuple[float, float]], bytes_per_s: int | None = None
) -> float:
    """The rate of `run(group) -> (bytes it had to read, seconds)`, from the device for certain.

    Pages are dropped before, and afterwards the device must have read for this run what the run needed: somebody else
    may have read the file into the page cache meanwhile. Without root there is no count, and only the first holds.
    """
    device, _ = throttled.device_of(file)
    for _ in range(3):
        cache.drop_file(file)
        try:
            with throttled.Group(device, bytes_per_s) as group:
                needed, seconds = run(group)
                read = group.bytes_read()
        except cache.Unavailable:
            if bytes_per_s is not None:
                raise
            cache.drop_file(file)
            needed, seconds = run(None)
            return needed / seconds
        if read >= 0.95 * needed:
            return needed / seconds
    raise cache.Unavailable(f"{read} of {needed:.0f} bytes of {file} came from the device: who else reads it?")


def rate_of(run: dict[str, Any], first: bool = False) -> float:
    """Records/s of the middle one of the epochs after the first, or of the first."""
    epochs = range(1) if first else range(1, len(run["ranks"][0]["epochs"]))
    return statistics.median(records_of(run, i) / epoch_seconds(run, i) for i in epochs)


def fastest(rates: dict[str, list[float]], among: Sequence[str]) -> str:
    return max(among, key=lambda name: statistics.median(rates[name]))


def epoch_seconds(run: dict[str, Any], epoch: int = -1) -> float:
    """From a common start to the end of the last rank."""
    return max(rank["epochs"][epoch]["seconds"] for rank in run["ranks"])


def records_of(run: dict[str, Any], epoch: int = -1) -> int:
    return sum(rank["epochs"][epoch]["records"] for rank in run["ranks"])


def rate(values: list[float], unit: float = GB, name: str = "GB/s") -> str:
    return f"{statistics.median(values) / unit:.3g} {name}"


def compare(
    section: Section,
    case: str,
    ours: list[float],
    theirs: list[float],
    bar: float | None,
    what: str,
    unit: float = GB,
    name: str = "GB/s",
    us: str = "pario",
) -> None:
    """Rates of both sides (per second), pair by pair."""
    pairs = [a / b for a, b in zip(ours, theirs, strict=True)]
    section.raw.setdefault("rates", {})[case] = {"ours": ours, "theirs": theirs, "against": what}
    words = {"ours": f"{us} {rate(ours, unit, name)}", "theirs": f"{what} {rate(theirs, unit, name)}"}
    section.add(Row.of(case, pairs, ">=", bar, **words))
