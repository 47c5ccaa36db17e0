"""What each rank did, all ranks together, and a sentence about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from statistics import median
from typing import Any

from pario.stats.explain import STALLED, explain, unpacking_words
from pario.stats.rank import COUNTED, RankStats
from pario.text import counted, decimal_bytes, seconds, table


@dataclass(frozen=True)
class Report:
    """Report on the loops over one dataset: all so far, or one epoch. `str(report)` is a table.

    path : the data file
    ranks : one per rank, in rank order; or one rank alone
    of : ranks that there are; 0: those
    prediction : what `python -m pario data choose` foretold of the codec that the file is packed with; None: nothing
    """

    path: str
    ranks: Sequence[RankStats]
    prediction: Mapping[str, Any] | None = None
    of: int = 0

    @property
    def seconds(self) -> float:
        """Seconds in loops, on the rank with the most."""
        return max(rank.loop for rank in self.ranks)

    @property
    def total(self) -> dict[str, float]:
        """Sums over the ranks: of seconds, bytes, counts."""
        return {name: sum(getattr(rank, name) for rank in self.ranks) for name in COUNTED}

    @property
    def sentence(self) -> str:
        """The sentence that names the slow part."""
        return explain(self.ranks)

    @property
    def stalled(self) -> bool:
        """A rank waited for bytes for a noticeable part of its time, not counting the first bytes of a loop."""
        return any(rank.stalls and min(rank.stalled, rank.waiting) >= STALLED * self.seconds for rank in self.ranks)

    @property
    def skew(self) -> tuple[int, float]:
        """(slowest rank, its busy time as a multiple of the median rank's), without time spent waiting."""
        slowest = max(self.ranks, key=lambda rank: rank.busy)
        middle = median(rank.busy for rank in self.ranks)
        return slowest.rank, slowest.busy / middle if middle else 1.0

    def since(self, earlier: Report | None) -> Report:
        """What happened since an earlier report."""
        if earlier is None:
            return self
        ranks = [now - then for now, then in zip(self.ranks, earlier.ranks, strict=True)]
        return replace(self, ranks=ranks)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        rank, ratio = self.skew
        return {
            "path": self.path,
            "seconds": self.seconds,
            "ranks": [
                {**asdict(r), "lost": r.lost, "busy": r.busy, "ready_mean": r.ready_mean, "in_flight": r.in_flight}
                for r in self.ranks
            ],
            "total": self.total,
            "skew": {"rank": rank, "ratio": ratio},
            "sentence": self.sentence,
            "unpacking": unpacking_words(self.ranks, self.prediction),
        }

    def line(self, *, complete: bool = True) -> str:
        """One line: how much, how fast and, if it stalled, why.

        complete : False: the loop was left early. Its rate means nothing: groups of steps count as they arrive, and
            most of the time may have gone into groups that the caller never took.
        """
        sums, wall = self.total, self.seconds
        speed = f", {decimal_bytes(sums['node_bytes'] / wall)}/s" if complete and wall else ""
        words = f"{counted(int(sums['records']), 'record')} in {seconds(wall)}{speed}"
        words += f", {counted(int(sums['stalls']), 'stall')}"
        if sums["stalls"]:
            words += f" ({seconds(sums['stalled'])} on all ranks together)"
        return f"{words}: {self.sentence}" if self.stalled else words

    def __str__(self) -> str:
        rows = [_HEAD, *(_row(str(r.rank), r, r.lost, r.loop, r.in_flight) for r in self.ranks)]
        if len(self.ranks) > 1:
            whole = RankStats(reader=True, **self.total)  # type: ignore[arg-type]
            read_by = sum(r.loop for r in self.ranks if r.reader)
            lost, in_flight = sum(r.lost for r in self.ranks), sum(r.in_flight for r in self.ranks)
            rows.append(_row("all", whole, lost, read_by, in_flight))
        rank, ratio = self.skew
        lines = [table(rows)]
        if len(self.ranks) < self.of:
            lines.append(f"  this rank alone, of {self.of}: report(all_ranks=True), on all of them, compares them")
        if len(self.ranks) > 1:
            lines.append(f"  skew: rank {rank} was busy {ratio:.2f} times as long as the median rank")
        lines += [f"  {words}" for words in _depths([r for r in self.ranks if r.reader and r.tuned])]
        lines += [f"  {words}" for words in _knobs(self.ranks)]
        came, served = sum(r.peer_bytes for r in self.ranks), sum(r.served_bytes for r in self.ranks)
        if came or served:
            busiest = max(self.ranks, key=lambda r: r.served_bytes)
            lines.append(
                f"  other nodes' tiers gave {decimal_bytes(came)}; most of it node {busiest.node}: "
                f"{decimal_bytes(busiest.served_bytes)}"
            )
        if unpacking := unpacking_words(self.ranks, self.prediction):
            lines.append(f"  {unpacking}")
        return "\n".join([*lines, "", self.sentence[0].upper() + self.sentence[1:] + "."])

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def _depths(readers: Sequence[RankStats]) -> list[str]:
    """One line about the tuned prefetch depths: of one rank with the reason, of several as a range."""
    if not readers:
        return []
    first, last = min(readers, key=lambda r: r.depth), max(readers, key=lambda r: r.depth)
    one = f"inflight is {last.depth} now on rank {last.rank}: {last.depth_reason}"
    return [one if len(readers) == 1 else f"{one} ({first.depth} to {last.depth} on {len(readers)} reading ranks)"]


def _knobs(ranks: Sequence[RankStats]) -> list[str]:
    """One line about each other knob that nobody has pinned: its least and its most value, and a reason."""
    lines = []
    for name in dict.fromkeys(name for rank in ranks for name in rank.knobs):
        found = sorted(
            (rank.knobs[name]["value"], rank.knobs[name]["reason"])
            for rank in ranks
            if not rank.knobs.get(name, {"pinned": True})["pinned"]
        )
        if found and name != "inflight":
            value, reason = found[-1]
            values = f"{found[0][0]:,} to {value:,}" if found[0][0] < value else f"{value:,}"
            lines.append(f"{name} is {values}{f' on {len(found)} ranks' if len(found) > 1 else ''}: {reason}")
    return lines


_HEAD = (
    *("rank", "node", "records", "seconds", "consumer", "decode", "waited", "stalls", "ready"),
    *("own node", "store", "reads", "reading", "in flight", "slot wait"),
)


def _row(name: str, r: RankStats, lost: float, read_by: float, in_flight: float) -> tuple[str, ...]:
    """lost : `RankStats.lost`, of several ranks their sum; read_by : seconds in loops, of the ranks that read"""

    def share(value: float, of: float) -> str:
        return f"{value / of:.1%}" if of else ""

    own = (
        *(name, "" if name == "all" else str(r.node), f"{r.records:,}", f"{r.loop:.2f}"),
        *(share(value, r.loop) for value in (r.consumer, r.decode, lost)),
        *(f"{r.stalls:,}", f"{r.ready_mean:.1f}", decimal_bytes(r.node_bytes)),
    )
    if not r.reader:
        return (*own, "", "", "", "", "")
    busy, idle = share(min(r.read, read_by), read_by), share(r.turn, read_by)  # some reads are between loops
    return (*own, decimal_bytes(r.bytes_read), f"{r.reads:,}", busy, f"{in_flight:.1f}", idle)
