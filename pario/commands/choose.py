"""`data choose`: samples, candidates and the store measured, and the choice explained (codec/select.py)."""

from __future__ import annotations

import math
import os
import tempfile
import time
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from statistics import median
from typing import Literal

import numpy as np

from pario import machine
from pario.codec.listing import LONGEST_KEY
from pario.codec.packing import Packing
from pario.codec.select import Application, Candidate, Selection, Store, Verdict, select
from pario.codec.trial import measure_all
from pario.comm.base import AnyWorld
from pario.comm.solo import Solo
from pario.commands.screen import counted, decimal_bytes, screen, seconds, table
from pario.dataset.reader import Reader
from pario.errors import EmptyError, OptionError, ParioError
from pario.fetch.base import Fetcher
from pario.fetch.direct import DirectFetcher
from pario.fetch.pool import ReadPool
from pario.fetch.posix import PosixFetcher
from pario.fetch.resolve import resolve
from pario.loader.loader import Loader
from pario.options import Options
from pario.packing.flow import Crew
from pario.packing.items import ReaderItems
from pario.packing.pack import PackOptions, Talk, chosen_block, pack
from pario.packing.writer import Batch, Writer
from pario.records import EXTENT

#: Reads of the store under way at once, and bytes of each, as the memory tier reads.
_INFLIGHT, _READ = 8, 1 << 20
_MOST_SAMPLES = 16 << 20
#: What a prediction speaks of: words, and a Loader's `shuffle`.
ORDERS: dict[str, Literal[False, "block", "global"]] = {
    "key order": False, '"block" order': "block", '"global" order': "global",
}  # fmt: skip


def run_choose(
    path: str,
    application: Application,
    *,
    db: str | None,
    threads: int | None,
    samples: int,
    seconds: float,
    margin: float,
    speed: bool,
) -> int:
    """application : with 0 bytes, which the samples give; speed : rather than capacity"""
    keys, values, records = _sample(path, db, samples)
    mean = sum(map(len, values)) / len(values)
    cores = threads or len(machine.allowed_cores()) or 1
    application = replace(application, nbytes=application.batch * mean, threads=cores)
    screen.say(
        f"{len(values):,} records sampled, {decimal_bytes(mean)} on average; {counted(cores, 'decoding thread')}; "
        f"batches of {application.batch:,} every {application.iteration:.3g} s, "
        f"{'reading and computing in turns' if application.sync else 'reading ahead'}"
    )
    missing: dict[str, OptionError] = {}
    with screen.bar(0, "measuring codecs", "codec") as bar:
        found = measure_all(
            values, threads=cores, seconds=seconds, progress=lambda spec: bar.update(1), missing=missing.setdefault
        )
    for name, why in missing.items():
        screen.say(f"not tried: {name}. {why}")
    raw, how = _store(path, seconds)
    screen.say(f"the store, {how}: {decimal_bytes(raw.nbytes)}/s in reads of {decimal_bytes(_READ)}")
    with tempfile.TemporaryDirectory(prefix="pario-choose-") as folder, Solo() as world:
        trials = _Trials(world, folder, keys, values, application, seconds)
        chosen = select(application, [trials.loaded(one) for one in found], raw, margin, speed=speed)
        # Of a codec that is slow to pack, 16 MiB take seconds: for one, not for all. (Epochs of 2,000 records, a few
        # milliseconds in key order, foretold 0.45 to 1.6 of what long ones gave.)
        keys, many, _ = _sample(path, db, int(_MOST_SAMPLES // mean) + 1)
        block = _block(path, db, trials.packings[chosen.chosen.candidate])
        foretold = _Trials(world, folder, keys, many, application, seconds, block).rates(chosen.chosen.candidate)
    screen.tell(foretold={"records_per_second": foretold, "file_bytes": chosen.chosen.candidate.stored * records})
    not_tried = {name: str(why) for name, why in missing.items()}
    screen.tell(samples=len(values), mean_bytes=mean, store=asdict(raw), not_tried=not_tried)
    screen.tell(chosen=asdict(chosen.chosen), verdicts=[asdict(verdict) for verdict in chosen.verdicts])
    screen.say()
    screen.say(_table(chosen))
    screen.say()
    screen.say("\n".join(_words(chosen, margin, foretold, records)))
    return 0


def _sample(path: str, db: str | None, wanted: int) -> tuple[list[bytes], list[bytes], int]:
    """Keys and values of records all over the database, not more than fit into 16 MiB; how many records it has."""
    with Reader(path, db=db, save_index=False) as reader:
        n = len(reader)
        if not n:
            raise EmptyError("the database holds no record", path=path)
        rng = np.random.default_rng(0)
        ids = np.sort(rng.choice(n, min(n, wanted), replace=False))
        first = reader.read(ids[:1])
        few = max(2, int(_MOST_SAMPLES // max(int(first.nbytes.max()), 1)))
        ids = ids if len(ids) <= few else np.sort(rng.choice(ids, few, replace=False))
        values = [value.tobytes() for value in reader.read(ids) if len(value)] or [b"\0"]
        keys = sorted(set(reader.keys(ids)))  # blocks depend on their lengths
    if len(keys) < len(ids) or max(map(len, keys)) > LONGEST_KEY:
        keys = [b"%010d" % k for k in range(len(ids))]
    return keys[: len(values)], values, n


def _block(path: str, db: str | None, packing: Packing | None) -> str:
    """What `pack --block auto` would take for all records. (Where sizes are nearly as good, those of a sample may be
    twice as long, and half as fast in random order.)"""
    with Reader(path, db=db, save_index=False) as reader:
        nbytes = chosen_block(ReaderItems(reader, 0), packing, None, lambda line: None) if packing else 0
    return str(nbytes or "no")


class _Trials:
    """Candidates packed, and read from memory by a Loader: a codec by itself, on a few records over and over, is up to
    twice as fast."""

    def __init__(
        self,
        world: AnyWorld,
        folder: str,
        keys: list[bytes],
        values: list[bytes],
        application: Application,
        seconds: float,
        block: str = "auto",
    ) -> None:
        """block : as of PackOptions"""
        self._world, self._n, self._seconds, self._block = world, len(values), seconds, block
        self.packings: dict[Candidate, Packing | None] = {}
        self._batch, self._threads = min(application.batch, len(values)), application.threads
        folder = tempfile.mkdtemp(dir=folder)
        self._source, self._packed = os.path.join(folder, "raw"), os.path.join(folder, "packed")
        sizes = np.array([len(value) for value in values])
        with ExitStack() as stack:
            crew = stack.enter_context(closing(Crew(world)))
            writer = stack.enter_context(closing(Writer(crew.writer, self._source, subdir=False, databases=0)))
            writer.begin(None, 0, [])
            writer.append([Batch(keys, sizes, np.frombuffer(b"".join(values), np.uint8))])
            writer.flush()

    def _made(self, one: Candidate) -> str:
        """The sample's file, packed."""
        if one.name == "raw":
            return self._source
        dictionary = "auto" if one.dictionary else "no"
        how = PackOptions(codec=one.name, dictionary=dictionary, block=self._block, force=True, verify=False)
        quiet = Talk(lambda line: None, lambda what, nbytes: lambda done: None)
        return pack(self._world, [self._source], self._packed, how, quiet).file

    def loaded(self, one: Candidate) -> Candidate:
        """With the time of a record that a Loader needs in random order, and the bytes in the file."""
        path = self._made(one)
        with Reader(path, comm="self", save_index=False) as reader:
            nbytes = os.path.getsize(path) - len(reader.packing.entry() if reader.packing else b"")
        one = replace(one, seconds=self._threads / self._rate(path, "global"), stored=nbytes / self._n)
        self.packings[one] = reader.packing
        return one

    def rates(self, one: Candidate) -> dict[str, float]:
        """Records per second by order."""
        path = self._made(one)
        return {name: self._rate(path, shuffle) for name, shuffle in ORDERS.items()}

    def _rate(self, path: str, shuffle: Literal[False, "block", "global"]) -> float:
        """Of the epochs after the first, in which kernels are loaded, that read nothing: memory was full."""
        rates, options = list[tuple[int, float]](), Options(decode_threads=self._threads)
        end = time.perf_counter() + self._seconds
        with Loader(path, self._batch, comm="self", shuffle=shuffle, drop_last=True, options=options) as loader:
            while time.perf_counter() < end or len(rates) < 4:
                before, begin = loader.stats()["store_reads"], time.perf_counter()
                rate = sum(len(records.ids) for records in loader) / (time.perf_counter() - begin)
                rates.append((loader.stats()["store_reads"] - before, rate))
        least = min(rates[1:])[0]
        return median(rate for reads, rate in rates[1:] if reads == least)


def _store(path: str, seconds: float) -> tuple[Store, str]:
    """What the store delivers in reads as long as those that bring records into memory, and how it was read."""
    file = resolve(path)
    fetcher: Fetcher
    try:
        fetcher, how = DirectFetcher(file), "past the page cache"
    except (OSError, ParioError):
        fetcher, how = PosixFetcher(file), "through the page cache, since it cannot be bypassed here"
    pool = ReadPool(fetcher, _INFLIGHT)
    size = min(_READ, max(4096, fetcher.nbytes // 4096 * 4096))
    memory = np.zeros(_INFLIGHT * size + 4096, np.uint8)
    memory = memory[-memory.ctypes.data % 4096 :][: _INFLIGHT * size]
    reads, starts = np.zeros(_INFLIGHT, EXTENT), np.arange(_INFLIGHT) * size
    reads["nbytes"] = size
    rng, done = np.random.default_rng(size), 0
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        reads["offset"] = rng.integers(0, max(fetcher.nbytes - size, 0) // 4096 + 1, _INFLIGHT) * 4096
        pool.read(reads, memory, starts)
        done += _INFLIGHT * size
    rate = done / (time.perf_counter() - begin)
    pool.close()
    fetcher.close()
    return Store(math.inf, rate), how


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


def _words(chosen: Selection, margin: float, foretold: dict[str, float], records: int) -> list[str]:
    mine = chosen.chosen
    one, app = mine.candidate, chosen.application
    lines = []
    if mine.admissible:
        room = f"{mine.room:.0%} longer" if mine.room < 10 else f"{mine.room + 1:,.0f} times as long"
        room = "" if one.name == "raw" and app.sync else f"; decoding could take {room}"
        lines.append(f"Choice: {one}, ratio {one.ratio:.2f}{room}. Margin kept free: {margin:.0%} of the limit.")
        best = "the least time of reading and unpacking" if chosen.speed else "the highest ratio"
        lines.append(f"Of the admissible ones it has {best} (--for {'speed' if chosen.speed else 'capacity'}).")
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
        more = "(trains a dictionary by itself)" if one.dictionary else "--dictionary no"
        lines.append(f"Next: python -m pario data pack SRC DST --codec {one.name} {more}")
    if mine.step:
        orders = ", ".join(f"{rate:,.0f} in {order}" for order, rate in foretold.items())
        lines.append(
            f"Foretold: {app.batch / mine.step:,.0f} records/s per node in this training; from memory, with nothing "
            f"else to do, {orders}; a file of {decimal_bytes(one.stored * records)}."
        )
    lines.append("Not in the figures: what else the cores do meanwhile. The margin stands for it.")
    return lines
