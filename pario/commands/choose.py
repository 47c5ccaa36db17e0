"""`data choose`: samples, candidates and the store measured, and the choice explained (codec/select.py)."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, replace

import numpy as np

from pario import machine
from pario.codec.select import Application, Candidate, Selection, Store, Verdict, limit, select
from pario.codec.trial import measure_all, missing_packages
from pario.commands.screen import counted, decimal_bytes, screen, seconds, table
from pario.dataset.reader import Reader
from pario.errors import EmptyError, ParioError
from pario.fetch.base import Fetcher
from pario.fetch.direct import DirectFetcher
from pario.fetch.pool import ReadPool
from pario.fetch.posix import PosixFetcher
from pario.fetch.resolve import resolve
from pario.records import EXTENT

#: Reads of the store under way at once, and in one round of its measurement.
_INFLIGHT, _ROUND = 8, 64
_MOST_SAMPLES = 64 << 20
_WIDTH, _HEIGHT = 64, 14


def run_choose(
    path: str,
    application: Application,
    *,
    db: str | None,
    threads: int | None,
    samples: int,
    seconds: float,
    margin: float,
) -> int:
    """application : with 0 bytes, which the samples give"""
    values = _sample(path, db, samples)
    mean = sum(map(len, values)) / len(values)
    cores = threads or len(machine.allowed_cores()) or 1
    application = replace(application, nbytes=application.batch * mean, threads=cores)
    screen.say(
        f"{len(values):,} records sampled, {decimal_bytes(mean)} on average; {counted(cores, 'decoding thread')}; "
        f"batches of {application.batch:,} every {application.iteration:.3g} s, "
        f"{'reading and computing in turns' if application.sync else 'reading ahead'}"
    )
    with screen.bar(0, "measuring codecs", "codec") as bar:
        found = measure_all(values, threads=cores, seconds=seconds, progress=lambda spec: bar.update(1))
    for name, why in missing_packages().items():
        screen.say(f"not tried: {name}. {why}")
    raw, sized, how = _stores(path, mean, found, seconds)
    rate = f"{decimal_bytes(raw.nbytes)}/s and {raw.records:,.0f} reads/s of {decimal_bytes(mean)}"
    screen.say(f"the store, {how}: {rate}")
    chosen = select(application, sized, raw, margin)
    screen.tell(samples=len(values), mean_bytes=mean, store=asdict(raw), not_tried=missing_packages())
    screen.tell(chosen=asdict(chosen.chosen), verdicts=[asdict(verdict) for verdict in chosen.verdicts])
    screen.say()
    screen.say(_table(chosen))
    screen.say()
    screen.say("\n".join(_plot(chosen, raw, margin)))
    screen.say()
    screen.say("\n".join(_words(chosen, margin)))
    return 0


def _sample(path: str, db: str | None, wanted: int) -> list[bytes]:
    """Values of records all over the database, not more than fit into 64 MiB."""
    with Reader(path, db=db, save_index=False) as reader:
        n = len(reader)
        if not n:
            raise EmptyError("the database holds no record", path=path)
        rng = np.random.default_rng(0)
        ids = np.sort(rng.choice(n, min(n, wanted), replace=False))
        first = reader.read(ids[:1])
        few = max(2, int(_MOST_SAMPLES // max(int(first.nbytes.max()), 1)))
        ids = ids if len(ids) <= few else np.sort(rng.choice(ids, few, replace=False))
        return [value.tobytes() for value in reader.read(ids) if len(value)] or [b"\0"]


def _stores(path: str, mean: float, found: list[Candidate], seconds: float) -> tuple[Store, list[Candidate], str]:
    """(the store at the raw size, the candidates with the store at theirs, how it was read)"""
    file = resolve(path)
    fetcher: Fetcher
    try:
        fetcher, how = DirectFetcher(file), "past the page cache"
    except (OSError, ParioError):
        fetcher, how = PosixFetcher(file), "through the page cache, since it cannot be bypassed here"
    pool = ReadPool(fetcher, _INFLIGHT)
    try:
        known: dict[int, Store] = {}

        def store(nbytes: float) -> Store:
            # Sizes that take the same blocks cost the same.
            blocks = max(1, math.ceil(nbytes / 4096))
            step = 1 << max(0, blocks.bit_length() - 3)
            size = -(-blocks // step) * step * 4096
            if size not in known:
                known[size] = _measured(pool, fetcher, size, nbytes, seconds)
            return Store(known[size].records, known[size].records * nbytes)

        sized = [replace(one, store=store(mean / one.ratio)) for one in found]
        return store(mean), sized, how
    finally:
        pool.close()
        fetcher.close()


def _measured(pool: ReadPool, fetcher: Fetcher, size: int, nbytes: float, seconds: float) -> Store:
    """Reads of `size` bytes, which hold records of `nbytes`, all over the file."""
    size = min(size, max(4096, fetcher.nbytes // 4096 * 4096))
    memory = np.zeros(_ROUND * size + 4096, np.uint8)
    memory = memory[-memory.ctypes.data % 4096 :][: _ROUND * size]
    reads, starts = np.zeros(_ROUND, EXTENT), np.arange(_ROUND) * size
    reads["nbytes"] = size
    rng, done = np.random.default_rng(size), 0
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        last = max(fetcher.nbytes - size, 0) // 4096
        reads["offset"] = rng.integers(0, last + 1, _ROUND) * 4096
        pool.read(reads, memory, starts)
        done += _ROUND
    rate = done / (time.perf_counter() - begin)
    return Store(rate, rate * nbytes)


def _table(chosen: Selection) -> str:
    rows = [["codec", "ratio", "decode", "of one core", "limit", "iteration", ""]]
    for verdict in chosen.verdicts:
        one = verdict.candidate
        speed = chosen.application.nbytes / chosen.application.batch / one.seconds if one.seconds else math.inf
        rows.append(
            [
                str(one), f"{one.ratio:.2f}", _time(one.seconds), f"{decimal_bytes(speed)}/s",
                _time(verdict.limit) if verdict.limit > 0 else "none",
                seconds(verdict.step), _mark(verdict, chosen),
            ]
        )  # fmt: skip
    return table(rows, words=True)


def _time(value: float) -> str:
    """Of a record: microseconds with a decimal where they are few."""
    return f"{value * 1e6:.1f} us" if abs(value) < 1e-4 else seconds(value)


def _mark(verdict: Verdict, chosen: Selection) -> str:
    if verdict is chosen.chosen:
        return "<- chosen"
    return "admissible" if verdict.admissible else "too slow"


def _plot(chosen: Selection, raw: Store, margin: float) -> list[str]:
    """Ratio against the cost of a record, both logarithmic; dots: the limit with its margin, to whose left is
    admissible."""
    verdicts, application = chosen.verdicts, chosen.application
    costs = [verdict.candidate.seconds for verdict in verdicts]
    edges = [verdict.limit * (1 - margin) for verdict in verdicts if verdict.limit > 0]
    low, high = min(costs + edges) / 1.5, max(costs + edges) * 1.5
    ratios = [verdict.candidate.ratio for verdict in verdicts]
    bottom, top = math.log(min(ratios)), math.log(max(max(ratios), 1.05 * min(ratios)))

    def column(cost: float) -> int:
        return round((_WIDTH - 1) * math.log(cost / low) / math.log(high / low))

    def row(ratio: float) -> int:
        return round((_HEIGHT - 1) * (top - math.log(ratio)) / (top - bottom))

    grid = [[" "] * _WIDTH for _ in range(_HEIGHT)]
    for k in range(_HEIGHT):
        ratio = math.exp(top - (top - bottom) * k / (_HEIGHT - 1))
        near = min(verdicts, key=lambda verdict: abs(verdict.candidate.ratio - ratio)).candidate.store
        edge = limit(application, ratio, raw, _at(near, ratio, application)) * (1 - margin)
        if low < edge < high:
            grid[k][column(edge)] = "."
    letters = []
    for k, verdict in enumerate(verdicts):
        one, letter = verdict.candidate, chr(ord("a") + k % 26)
        grid[row(one.ratio)][column(max(one.seconds, low))] = letter.upper() if verdict is chosen.chosen else letter
        letters.append(f"{letter.upper() if verdict is chosen.chosen else letter} {one}")
    lines = ["ratio, by the cost of decoding a record; left of the dots is admissible"]
    for k, cells in enumerate(grid):
        ratio = math.exp(top - (top - bottom) * k / (_HEIGHT - 1))
        lines.append(f"{ratio:7.2f} |{''.join(cells).rstrip()}")
    lines.append(f"        +{'-' * _WIDTH}")
    lines.append(f"         {_time(low):<{_WIDTH // 2}}{_time(high):>{_WIDTH // 2}}")
    for k in range(0, len(letters), 3):
        lines.append("         " + "   ".join(f"{one:<24}" for one in letters[k : k + 3]).rstrip())
    return lines


def _at(near: Store | None, ratio: float, application: Application) -> Store | None:
    """The store as measured for the nearest ratio: as many reads, of other sizes."""
    return Store(near.records, near.records * application.nbytes / application.batch / ratio) if near else None


def _words(chosen: Selection, margin: float) -> list[str]:
    mine = chosen.chosen
    one, app = mine.candidate, chosen.application
    lines = []
    if mine.admissible:
        room = f"{mine.room:.0%} longer" if mine.room < 10 else f"{mine.room + 1:,.0f} times as long"
        room = "" if one.name == "raw" and app.sync else f"; decoding could take {room}"
        lines.append(f"Choice: {one}, ratio {one.ratio:.2f}{room}. Margin kept free: {margin:.0%} of the limit.")
    else:
        lines.append(
            "No codec is admissible, nor are uncompressed records: this store and these cores cannot keep up. The "
            f"least slow is {one}, ratio {one.ratio:.2f}: an iteration takes {seconds(mine.step)}, "
            f"{mine.slower:.0%} more."
        )
    if chosen.runner_up is not None:
        other = chosen.runner_up
        lines.append(f"Runner-up: {other.candidate}, ratio {other.candidate.ratio:.2f}.")
    if chosen.tighter is not None:
        other = chosen.tighter
        longer = f"; an iteration would take {other.slower:.0%} longer" if other.slower > 0.005 else ""
        bound = f"the limit, without the margin, is {_time(other.limit)}"
        bound = bound if other.limit > 0 else "reading alone takes longer than is allowed"
        lines.append(
            f"The next higher ratio, {other.candidate} with {other.candidate.ratio:.2f}, takes "
            f"{_time(other.candidate.seconds)} per record; {bound}{longer}."
        )
    if one.name != "raw":
        lines.append(f"Next: python -m pario data pack SRC DST --codec {one.name}" + _dictionary(one))
    if mine.step:
        lines.append(
            f"Foretold: {app.batch / mine.step:,.0f} records/s per node, {_time(one.seconds)} per record in a thread. "
            "No file keeps that: compare it with loader.report()."
        )
    lines.append("Not in the figures: what else the cores do meanwhile. The margin stands for it.")
    return lines


def _dictionary(one: Candidate) -> str:
    return " (trains a dictionary by itself)" if one.dictionary else " --dictionary no"
