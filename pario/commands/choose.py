"""`data choose`: samples, candidates and the store measured, and the choice explained (codec/select.py)."""

from __future__ import annotations

import math
import os
import tempfile
import time
from contextlib import ExitStack, closing
from dataclasses import asdict, replace

import numpy as np

from pario import machine
from pario.codec.select import Application, Candidate, Selection, Store, Verdict, select
from pario.codec.trial import measure_all, missing_packages
from pario.comm.solo import Solo
from pario.commands.screen import counted, decimal_bytes, screen, seconds, table
from pario.dataset.reader import Reader
from pario.errors import EmptyError, ParioError
from pario.fetch.base import Fetcher
from pario.fetch.direct import DirectFetcher
from pario.fetch.pool import ReadPool
from pario.fetch.posix import PosixFetcher
from pario.fetch.resolve import resolve
from pario.loader.loader import Loader
from pario.options import Options
from pario.packing.flow import Crew
from pario.packing.pack import PackOptions, Talk, pack
from pario.packing.writer import Batch, Writer
from pario.records import EXTENT

#: Reads of the store under way at once, and bytes of each, as the memory tier reads.
_INFLIGHT, _READ = 8, 1 << 20
_MOST_SAMPLES = 16 << 20


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
    values, records = _sample(path, db, samples)
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
    raw, how = _store(path, seconds)
    screen.say(f"the store, {how}: {decimal_bytes(raw.nbytes)}/s in reads of {decimal_bytes(_READ)}")
    chosen = select(application, _loaded(values, found, application, seconds), raw, margin, speed=speed)
    screen.tell(samples=len(values), mean_bytes=mean, store=asdict(raw), not_tried=missing_packages())
    screen.tell(chosen=asdict(chosen.chosen), verdicts=[asdict(verdict) for verdict in chosen.verdicts])
    screen.say()
    screen.say(_table(chosen))
    screen.say()
    screen.say("\n".join(_words(chosen, margin, records, speed)))
    return 0


def _sample(path: str, db: str | None, wanted: int) -> tuple[list[bytes], int]:
    """Values of records all over the database, not more than fit into 16 MiB; how many records it has."""
    with Reader(path, db=db, save_index=False) as reader:
        n = len(reader)
        if not n:
            raise EmptyError("the database holds no record", path=path)
        rng = np.random.default_rng(0)
        ids = np.sort(rng.choice(n, min(n, wanted), replace=False))
        first = reader.read(ids[:1])
        few = max(2, int(_MOST_SAMPLES // max(int(first.nbytes.max()), 1)))
        ids = ids if len(ids) <= few else np.sort(rng.choice(ids, few, replace=False))
        return [value.tobytes() for value in reader.read(ids) if len(value)] or [b"\0"], n


def _loaded(values: list[bytes], found: list[Candidate], application: Application, seconds: float) -> list[Candidate]:
    """The candidates with the time of a record that a Loader needs, and the bytes in the file: each is packed, and read
    from memory in random order. A codec by itself, on a few records over and over, is up to twice as fast."""
    timed = []
    options = Options(decode_threads=application.threads)
    quiet = Talk(lambda line: None, lambda what, nbytes: lambda done: None)
    with tempfile.TemporaryDirectory(prefix="pario-choose-") as folder, Solo() as world:
        source, packed = os.path.join(folder, "raw"), os.path.join(folder, "packed")
        sizes = np.array([len(value) for value in values])
        with ExitStack() as stack:
            crew = stack.enter_context(closing(Crew(world)))
            writer = stack.enter_context(closing(Writer(crew.writer, source, subdir=False, databases=0)))
            writer.begin(None, 0, [])
            keys = [b"%010d" % k for k in range(len(values))]
            writer.append([Batch(keys, sizes, np.frombuffer(b"".join(values), np.uint8))])
            writer.flush()
        for one in found:
            dictionary = "auto" if one.dictionary else "no"
            how = PackOptions(codec=one.name, dictionary=dictionary, force=True, verify=False)
            nbytes = os.path.getsize(source)
            path = source if one.name == "raw" else packed
            if path == packed:
                pack(world, [source], packed, how, quiet)
                with Reader(packed, comm="self", save_index=False) as reader:
                    nbytes = os.path.getsize(packed) - len(reader.packing.entry() if reader.packing else b"")
            each, end = math.inf, time.perf_counter() + seconds
            batch = min(application.batch, len(values))
            with Loader(path, batch, comm="self", shuffle="global", drop_last=True, options=options) as loader:
                while time.perf_counter() < end or each == math.inf:
                    begin = time.perf_counter()
                    done = sum(len(records.ids) for records in loader)
                    each = min(each, (time.perf_counter() - begin) / done)
            timed.append(replace(one, seconds=each * application.threads, stored=nbytes / len(values)))
    return timed


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


def _words(chosen: Selection, margin: float, records: int, speed: bool) -> list[str]:
    mine = chosen.chosen
    one, app = mine.candidate, chosen.application
    lines = []
    if mine.admissible:
        room = f"{mine.room:.0%} longer" if mine.room < 10 else f"{mine.room + 1:,.0f} times as long"
        room = "" if one.name == "raw" and app.sync else f"; decoding could take {room}"
        lines.append(f"Choice: {one}, ratio {one.ratio:.2f}{room}. Margin kept free: {margin:.0%} of the limit.")
        best = "the least time of reading and unpacking" if speed else "the highest ratio"
        lines.append(f"Of the admissible ones it has {best} (--for {'speed' if speed else 'capacity'}).")
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
            f"Foretold: {app.batch / mine.step:,.0f} records/s per node in this training, "
            f"{app.threads / one.seconds:,.0f} from memory with nothing else to do; a file of "
            f"{decimal_bytes(one.stored * records)}."
        )
    lines.append("Not in the figures: what else the cores do meanwhile. The margin stands for it.")
    return lines


def _dictionary(one: Candidate) -> str:
    return " (trains a dictionary by itself)" if one.dictionary else " --dictionary no"
