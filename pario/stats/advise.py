"""What the numbers of a trace say, in sentences: what costs time, how much, and which option changes it.

Each rule is a pure function of the ranks' summaries, and says nothing where its threshold is not passed. The thresholds
of small and random requests, of stragglers, imbalance and metadata are those of Drishti (an analyser of
Darshan's logs); where pario knows better what a request costs, the sentence says that, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from pario.stats.explain import STALLED, explain, held_up, slow_part
from pario.stats.rank import RankStats
from pario.stats.trace_summary import NEAR_BYTES, FileRequests, RankSummary
from pario.text import counted, decimal_bytes, seconds

#: Small requests are worth a sentence from this share and this number of them on.
_SMALL_SHARE, _SMALL_COUNT = 0.1, 1000
_RANDOM_SHARE = 0.2
_STRAGGLER_SHARE = 0.15
_IMBALANCE_SHARE = 0.3
_METADATA_S = 30.0
#: Bytes from the store, as a multiple of those in batches.
_AMPLIFIED = 1.5
#: A part of the pipeline that is busy for this share of the time limits the rest.
_BUSY = 0.5
#: A straggler costs nothing below this share of the time.
_NOTICEABLE = 0.02
#: Requests faster than this, in seconds, come out of a cache.
_CACHED_S = 2e-4
#: A store that is not known to rotate is taken for one if random requests take this long, in seconds.
_SEEK_S = 3e-3
#: What others read is worth a sentence from this many bytes and this share on.
_UNSEEN_BYTES, _UNSEEN_SHARE = 256e6, 0.3
#: Smaller sums than this say nothing about a store.
_LEAST_REQUESTS = 100


class Advice(NamedTuple):
    """rule : its name; finding : what was found, with numbers; change : what to do about it"""

    rule: str
    finding: str
    change: str

    def __str__(self) -> str:
        return f"{self.finding}\n   {self.change}"


@dataclass(frozen=True)
class Job:
    """The summaries of all ranks, and sums of them."""

    ranks: Sequence[RankSummary]

    @property
    def datasets(self) -> dict[str, list[RankStats]]:
        """Of each dataset, the counters of the ranks that took batches of it."""
        found: dict[str, list[RankStats]] = {}
        for rank in self.ranks:
            mine: dict[str, RankStats] = {}
            for loader in rank.loaders:  # of one dataset there may be several, for training and for testing
                one, other = loader.stats, mine.get(loader.path)
                mine[loader.path] = one if other is None else one.plus(other)
            for path, stats in mine.items():
                found.setdefault(path, []).append(stats)
        return {path: stats for path, stats in found.items() if any(each.batches for each in stats)}

    @property
    def files(self) -> list[FileRequests]:
        return [file for rank in self.ranks for file in rank.files]

    @property
    def orders(self) -> set[str]:
        return {str(loader.options.get("shuffle", "")) for rank in self.ranks for loader in rank.loaders}

    def total(self, name: str) -> float:
        """Of a number of `FileRequests`, over all files and ranks."""
        return sum(getattr(file, name) for file in self.files)

    def head(self) -> str:
        """One line: who, how long, how much."""
        nodes = len({rank.node for rank in self.ranks})
        reads, nbytes = int(self.total("reads")), self.total("nbytes")
        wall = max((rank.seconds for rank in self.ranks), default=0.0)
        return (
            f"{counted(len(self.ranks), 'rank')} on {counted(nodes, 'node')}, {seconds(wall)}, "
            f"{counted(reads, 'request')} of {decimal_bytes(nbytes)} together"
        )


def advise(ranks: Sequence[RankSummary]) -> list[Advice]:
    """What all rules have to say, the most important ones first."""
    return [advice for rule in RULES.values() for advice in rule(Job(ranks))]


def bound(job: Job) -> Iterator[Advice]:
    """Which part limits the job: the store, decoding, or the caller's own code."""
    for path, ranks in job.datasets.items():
        wall = max(rank.loop for rank in ranks)
        if wall <= 0:
            continue
        readers = [rank for rank in ranks if rank.reader]
        lost = sum(rank.lost for rank in ranks) / len(ranks) / wall
        consumer = sum(rank.consumer for rank in ranks) / len(ranks) / wall
        decode = sum(rank.decode for rank in ranks) / len(ranks) / wall
        store = sum(rank.read for rank in readers) / len(readers) / wall if readers else 0.0
        numbers = (
            f"{path}: of {seconds(wall)} in loops your own code took {consumer:.0%}, decoding {decode:.0%}, "
            f"waiting for bytes {lost:.0%}; the store was busy {store:.0%} of the time"
        )
        said = explain(ranks)
        if store >= _BUSY and lost >= STALLED and consumer < _BUSY:
            change = _faster_store(job, readers)
            yield Advice("store-bound", f"The store limits this job. {numbers}: {said}.", change)
        elif consumer >= max(_BUSY, decode):
            change = "Nothing to change in pario: the data is there when you ask, and faster reading gains nothing."
            yield Advice("consumer-bound", f"Your own code limits this job. {numbers}: {said}.", change)
        elif decode >= _BUSY:
            change = "More cores per rank or Options(decode_threads=...), a cheaper decoder, or decoding ahead of time."
            yield Advice("decoder-bound", f"Decoding limits this job. {numbers}: {said}.", change)
        else:
            change = "No option changes that: look at the trace for what the ranks waited for."
            yield Advice("unbound", f"No part limits this job alone. {numbers}: {said}.", change)


def _faster_store(job: Job, readers: Sequence[RankStats]) -> str:
    if held_up(readers):
        return "Change: the job's share in the control plane's rules (docs/sharing-a-store.md)."
    words = []
    if not all(rank.tuned for rank in readers):
        depth = max(rank.depth for rank in readers)
        words.append(f'Options(inflight="auto") in place of {depth}, which keeps as many reads in flight as help')
    if job.orders & {"global", "True"}:
        words.append('shuffle="block" in place of "global", whose reads are longer')
    if any(file.shared for file in job.files) and not any(rank.staged for rank in readers):
        words.append("Options(tiers=...) or PARIO_TIERS, so that every byte leaves the store once per job")
    words.append("a packed dataset (`python -m pario data choose`), which has fewer bytes")
    return "Change: " + "; or ".join(words) + "."


def small(job: Job) -> Iterator[Advice]:
    """Many requests below 1 MiB."""
    reads, few = job.total("reads"), job.total("small")
    if few <= max(_SMALL_COUNT, _SMALL_SHARE * reads) or not reads:  # as only a trace of somebody else says
        return
    mean, each = job.total("nbytes") / reads, job.total("seconds") / reads
    what = (
        f"{int(few):,} of {int(reads):,} requests ({few / reads:.0%}) are below 1 MiB; a request has "
        f"{decimal_bytes(mean)} and takes {seconds(each)} on average"
    )
    if each < _CACHED_S:
        change = "They come out of a cache: nothing to change while the dataset fits into memory."
    elif job.orders & {"global", "True"}:
        change = 'Change: shuffle="block" in place of "global": reads are then as long as Options.block_bytes, 2 MiB.'
    else:
        change = "Change: a larger Options(gap_bytes=...), which reads across small gaps, or a larger slot_bytes."
    yield Advice("small requests", what + ".", change)


def random(job: Job) -> Iterator[Advice]:
    """Random requests to a disk that has to move its head."""
    may_seek = [file for file in job.files if file.rotating is None and file.shared and file.reads]
    slow = [file for file in job.files if file.rotating] + [f for f in may_seek if f.seconds / f.reads >= _SEEK_S]
    known, far = sum(file.known for file in slow), sum(file.random for file in slow)
    if known < _LEAST_REQUESTS or far <= _RANDOM_SHARE * known:
        return
    each = sum(file.seconds for file in slow) / max(1, sum(file.reads for file in slow))
    where = "a rotating disk" if any(file.rotating for file in slow) else f"a store that seeks ({slow[0].fs})"
    what = (
        f"{far:,} of {known:,} requests ({far / known:.0%}) to {where} begin more than {decimal_bytes(NEAR_BYTES)} "
        f"away from each of the 16 before; a request takes {seconds(each)}"
    )
    change = (
        'Change: shuffle="block", whose reads are long, or Options(tiers=...) with a disk of the node or its memory, '
        "where random reads cost nothing."
    )
    yield Advice("random requests", what + ".", change)


def straggler(job: Job) -> Iterator[Advice]:
    """One rank that the others wait for, or whose store is slower."""
    for path, ranks in job.datasets.items():
        if len(ranks) < 2:
            continue
        wall = max(rank.loop for rank in ranks)
        slowest = max(ranks, key=lambda rank: rank.busy)
        others = [rank for rank in ranks if rank is not slowest]
        rest = median(rank.busy for rank in others)
        gap = slowest.busy - rest
        if wall > 0 and gap > _STRAGGLER_SHARE * slowest.busy and gap > _NOTICEABLE * wall:
            part = slow_part(slowest, others)
            words = "its own code" if part == "consumer" else "decoding"
            what = (
                f"{path}: rank {slowest.rank} (node {slowest.node}) is a straggler: it was busy "
                f"{seconds(slowest.busy)}, the median of the others {seconds(rest)} ({gap / slowest.busy:.0%} less), "
                f"most of the difference in {words}"
            )
            change = (
                "Look at that rank's device and at what only it does (logging, evaluation)."
                if part == "consumer"
                else "Give its node as many cores per rank as others have; Options(decode_threads=...) pins a number."
            )
            yield Advice("straggler", what + ".", change)
        yield from _slow_reader(path, [rank for rank in ranks if rank.reader and rank.bytes_read], wall)


def _slow_reader(path: str, readers: Sequence[RankStats], wall: float) -> Iterator[Advice]:
    if len(readers) < 2:
        return
    slowest = max(readers, key=lambda rank: rank.read / max(1, rank.bytes_read))
    rest = median(rank.rate for rank in readers if rank is not slowest)
    # It costs something only where the store is busy.
    if slowest.read < _BUSY * wall or slowest.rate >= (1 - _STRAGGLER_SHARE) * rest:
        return
    what = (
        f"{path}: the store gave rank {slowest.rank} (node {slowest.node}) {decimal_bytes(slowest.rate)}/s, the other "
        f"reading ranks {decimal_bytes(rest)}/s"
    )
    yield Advice("straggler", what + ".", "Look at that node: its network, its mount, other jobs on it.")


def imbalance(job: Job) -> Iterator[Advice]:
    """Ranks that get, or read, much more than others."""
    for path, ranks in job.datasets.items():
        equal = "Change: batch_size=pario.Budget(bytes=...), which gives ranks batches of equal bytes."
        alike = "Change: the same number of ranks on every node, of which one rank reads."
        got_by = [(rank.node_bytes, rank.rank) for rank in ranks]
        read_by = [(rank.bytes_read, rank.rank) for rank in ranks if rank.reader]
        for got, found, change in (("got", got_by, equal), ("read", read_by, alike)):
            (more, most), (less, least) = max(found, default=(0, 0)), min(found, default=(0, 0))
            if more - less > _IMBALANCE_SHARE * more:
                text = (
                    f"{path}: rank {most} {got} {decimal_bytes(more)}, rank {least} {decimal_bytes(less)} "
                    f"({(more - less) / more:.0%} less)"
                )
                yield Advice("imbalance", text + ".", change)


def metadata(job: Job) -> Iterator[Advice]:
    """Ranks that spend long on opening files and finding records."""

    def took(rank: RankSummary) -> tuple[float, float]:
        return sum(file.meta_seconds for file in rank.files), sum(loader.stats.open for loader in rank.loaders)

    worst = max(job.ranks, key=lambda rank: max(took(rank)), default=RankSummary(0))
    most, opening = max(took(worst)), took(worst)[1]
    if most <= _METADATA_S:
        return
    opens, looks, pages = (sum(getattr(f, name) for f in worst.files) for name in ("opens", "stats", "meta_reads"))
    what = (
        f"Rank {worst.rank} spent {seconds(most)} on metadata: {counted(opens, 'open')}, "
        f"{counted(looks, 'look')} at a path, {counted(pages, 'read')} of meta pages, and {seconds(opening)} in "
        "constructors, which open the dataset and make its index"
    )
    change = (
        "Change: `pario data index` makes the index ahead of the job, once; `pario tiers stage` and "
        "Options(tiers=...) keep copies on the nodes."
    )
    yield Advice("metadata", what + ".", change)


def amplified(job: Job) -> Iterator[Advice]:
    """More bytes leave the store than are used."""
    used = sum(rank.node_bytes for ranks in job.datasets.values() for rank in ranks)
    read = job.total("nbytes")
    if not used or read <= _AMPLIFIED * used:
        return
    what = f"The store gave {decimal_bytes(read)} for {decimal_bytes(used)} of records: {read / used:.1f} times as much"
    change = (
        "Change: a smaller Options(gap_bytes=...) reads fewer unwanted bytes; with small records in random order "
        'shuffle="block"; over several epochs Options(tiers=...), so that each byte leaves the store once.'
    )
    yield Advice("read amplification", what + ".", change)


def unseen(job: Job) -> Iterator[Advice]:
    """The processes read much that the trace does not show."""
    whole = sum(rank.kernel.get("rchar", 0) for rank in job.ranks)
    mine = sum(file.nbytes + file.meta_bytes for file in job.files) + sum(rank.dropped_bytes for rank in job.ranks)
    if whole - mine <= max(_UNSEEN_BYTES, _UNSEEN_SHARE * whole):
        return
    what = (
        f"The processes read {decimal_bytes(whole)} by the kernel's count, of which {decimal_bytes(mine)} went through "
        "what is traced"
    )
    change = (
        "The rest is read by others: records of `import lmdb`, which compiled functions read one by one, a framework's "
        "own readers, modules. A pario.Loader shows what it reads."
    )
    yield Advice("untraced reads", what + ".", change)


def dropped(job: Job) -> Iterator[Advice]:
    """The trace has not everything."""
    events = sum(rank.dropped for rank in job.ranks)
    if not events:
        return
    reads, nbytes = sum(r.dropped_reads for r in job.ranks), sum(r.dropped_bytes for r in job.ranks)
    what = (
        f"The trace is not complete: {counted(events, 'event')} had no room, among them {counted(reads, 'request')} of "
        f"{decimal_bytes(nbytes)}; what is said of requests holds for those before"
    )
    yield Advice("dropped events", what + ".", "Trace fewer steps for a complete picture.")


_BY_WEIGHT = bound, straggler, imbalance, random, small, metadata, amplified, unseen, dropped
#: name -> rule, the most important first
RULES: dict[str, Callable[[Job], Iterator[Advice]]] = {rule.__name__: rule for rule in _BY_WEIGHT}
