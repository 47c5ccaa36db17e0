"""`threads | overlap | checkpoint`: progress, table and sentences of the instruments."""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.cache import Unavailable
from benchmarks.facts import machine
from benchmarks.micro import checkpoint as checkpoints
from benchmarks.micro import limits, made
from benchmarks.micro import overlap as overlaps
from benchmarks.micro import threads as sweeps
from benchmarks.micro.items import Items, open_items
from benchmarks.micro.limits import measure_ceiling
from pario.commands.decoder import find_decoder
from pario.commands.screen import decimal_bytes, screen, seconds, table
from pario.decode.base import Decoder


@dataclass(frozen=True)
class Data:
    """What to read: the user's, or made data."""

    path: str | None
    db: str | None
    decoder: str | None
    size: int | None
    store: str | None
    files: int
    nbytes: int | None

    @property
    def found_decoder(self) -> Decoder | None:
        """Raises OptionError."""
        name = self.decoder or ("image" if self.path is None and made.has_codec() else "none")
        return None if name == "none" else find_decoder(name, **({"size": self.size} if self.size else {}))

    @contextmanager
    def opened(self, usual_bytes: int) -> Iterator[tuple[list[Items], str | None]]:
        """(what to read, the LMDB among it). Made data are removed afterwards. Raises ParioError, OSError."""
        with _tidy(), ExitStack() as stack:
            if self.path is not None:
                items = [open_items(self.path, db=self.db, progress=screen.progress("leaf pages", "page"))]
            else:
                where = stack.enter_context(tempfile.TemporaryDirectory(prefix="pario-made-", dir=self.store or "."))
                with screen.bar(self.files, "making data", "file") as bar:
                    files = made.make_files(Path(where, "files"), self.files, self.nbytes or usual_bytes, bar.update)
                    lmdb = made.make_lmdb(Path(where, "lmdb"), files)
                os.sync()
                items = [open_items(str(files)), open_items(str(lmdb))]
            for one in items:
                stack.callback(one.close)
            yield items, next((one.path for one in items if one.kind == "records"), None)


@contextmanager
def _tidy() -> Iterator[None]:
    """A SIGTERM, as at a job's time limit, leaves no made data and no checkpoints on the store."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def threads(data: Data, what: sweeps.Sweep, out: str | None) -> int:
    """Exit status: 2 under a launcher, or without a folder for made data."""
    if _refused(data.store if data.path is None else None):
        return 2
    what = replace(what, decoder=data.found_decoder)
    numbers = what.threads
    with data.opened(made.NBYTES) as (sources, lmdb):
        words = "; ".join(one.words() for one in sources)
        screen.say(f"{words}; caches dropped before each run")
        cases = what.cases([*(one.kind for one in sources), *(["pario"] if lmdb else [])])
        with screen.bar(what.rounds * len(cases) * len(numbers), "threads", "run") as bar:

            def tick(case: sweeps.Case, threads: int) -> None:
                bar.set_postfix_str(f"{case.words}, {threads} threads", refresh=False)
                bar.update(1)

            rows = sweeps.sweep(sources, what, loaded=lmdb, db=data.db, tick=tick)
        cached = _cached_after_drop(sources)
        ceiling, why = _ceiling(sources, what.seconds)
    findings = {
        key: limits.find([row for row in rows if (row["way"], row["shuffled"], row["decode"]) == key], ceiling)
        for key in dict.fromkeys((row["way"], row["shuffled"], row["decode"]) for row in rows)
    }
    chief = limits.main_case(list(findings))
    document = {
        "instrument": "threads", "what": words, "rounds": what.rounds, "rows": rows,
        "ceiling": ceiling, "no_ceiling": why, "cached": cached,
        "findings": [{"case": sweeps.Case(*key).words, **found._asdict()} for key, found in findings.items()],
        "sentences": [limits.sentence(sweeps.Case(*chief).words, findings[chief], ceiling)],
        "advice": limits.advice(findings),
    }  # fmt: skip
    return _tell(document, _threads_table(rows, numbers, findings), _threads_words(document), out)


def overlap(data: Data, what: overlaps.Application, out: str | None) -> int:
    """Exit status: 2 under a launcher."""
    if _refused(data.store if data.path is None else None):
        return 2
    what = replace(what, decoder=data.found_decoder)
    with data.opened(12 << 10) as (sources, lmdb):
        items = sources[0]
        words = f"{items.words()}, batches of {what.batch}, {what.threads} threads"
        screen.say(words)
        with screen.bar(what.runs, "overlap", "run") as bar:
            tick = partial(bar.update, 1)
            found = overlaps.overlap(items, what, loaded=lmdb, db=data.db, tick=tick)
    document = {
        "instrument": "overlap", "what": words, "rounds": what.rounds,
        "hides": overlaps.hides(found["rows"]), **found,
    }  # fmt: skip
    document["sentences"] = [_overlap_words(document)]
    return _tell(document, _overlap_table(found["rows"]), document["sentences"], out)


def checkpoint(
    what: checkpoints.Training, folders: tuple[str, str | None], rounds: int, out: str | None
) -> int:
    """folders : the slow one, and the fast one or None. Exit status: 2 under a launcher, or without one of them."""
    slow, fast = folders
    if _refused(slow, fast):
        return 2
    ways = checkpoints.ways_here(fast)
    words = (
        f"{what.checkpoints} of {decimal_bytes(what.nbytes)}, one after every {what.every} iterations of "
        f"{seconds(what.step_s)}"
    )
    screen.say(f"{words}; slow: {slow}, fast: {fast or 'none'}")
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    with _tidy(), screen.bar(rounds * len(ways), "checkpoint", "run") as bar:
        for number in range(rounds):
            for way in ways:
                bar.set_postfix_str(way, refresh=False)
                found[way].append(checkpoints.run_way(way, what, slow, fast, number))
                bar.update(1)
    rows = [
        {"way": way, **{name: [run[name] for run in runs] for name in ("total", "stall", "durable")}}
        for way, runs in found.items()
    ]
    said = [_checkpoint_words(rows)]
    document = {"instrument": "checkpoint", "what": words, "rounds": rounds, "rows": rows, "sentences": said}
    return _tell(document, _checkpoint_table(rows), said, out)


def _refused(*folders: str | None) -> bool:
    """True, said on the screen, if a launcher has started this process, or one of the folders cannot be written to."""
    why = "one process measures; run it without mpiexec or srun" if screen.launched else ""
    for folder in folders:
        if folder is not None and not (os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)):
            why = why or f"{folder} is no folder that can be written to"
    if why:
        screen.say(f"error: {why}", err=True)
    return bool(why)


def _ceiling(sources: Sequence[Items], seconds: float) -> tuple[dict[str, float] | None, str]:
    """Of the store on which they lie: through their largest file; and why it is unknown."""
    # The LMDB, which is one file, also where the records' files were made beside it.
    items = min(sources, key=lambda one: len(one.sample))
    try:
        found = measure_ceiling(items.sample, items.mean_bytes, seconds)
    except Unavailable as e:
        return None, str(e)
    finally:
        items.drop()
    return found._asdict(), ""


def _cached_after_drop(sources: Sequence[Items]) -> float | None:
    """What stays in the page cache where pages are asked to go: above a few percent no run was cold."""
    for items in sources:
        items.drop()
    shares = [items.cached() for items in sources]
    return max((share for share in shares if share is not None), default=None)


def _threads_table(
    rows: Sequence[Mapping[str, Any]], numbers: Sequence[int], findings: Mapping[Any, limits.Finding]
) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = [("MB/s, by threads", *map(str, numbers), "knee", "limit")]
    for key, found in findings.items():
        rates = {
            row["threads"]: statistics.median(row["bytes_per_s"]) / 1e6
            for row in rows
            if (row["way"], row["shuffled"], row["decode"]) == key
        }
        columns = (f"{rates[number]:,.0f}" if rates[number] >= 100 else f"{rates[number]:.3g}" for number in numbers)
        lines.append((sweeps.Case(*key).words, *columns, str(found.knee), found.limit))
    return lines


def _threads_words(document: dict[str, Any]) -> list[str]:
    said = list(document["sentences"])
    if document["no_ceiling"]:
        said.append(f"The device's own rate is unknown: {document['no_ceiling']}.")
    if document["cached"] is not None and document["cached"] > 0.05:
        said.append(
            f"Not cold: {document['cached']:.0%} stay in the page cache when they are dropped. Is another process "
            "using them?"
        )
    return [*said, *(f"Try {one}." for one in document["advice"])]


def _overlap_table(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = [("computing", "prefetch", "time per batch", "input costs", "of computing")]
    for row in rows:
        took = statistics.median(row["seconds"])
        cost = took - row["compute"]
        name = "pario.Loader" if row["way"] == "pario" else str(row["way"])
        part = f"{cost / row['compute']:.1%}" if row["compute"] else ""
        lines.append((seconds(row["compute"]), name, seconds(took), seconds(max(cost, 0.0)), part))
    return lines


def _overlap_words(document: dict[str, Any]) -> str:
    rows, hides = document["rows"], document["hides"]
    largest = max(row["factor"] for row in rows)
    costs = {row["way"]: statistics.median(row["seconds"]) - row["compute"] for row in rows if row["factor"] == largest}
    said = f"Reading a batch takes {seconds(document['input'])}"
    if 0 in costs:
        said += f" and costs each step {seconds(max(costs[0], 0.0))} without prefetching"
    said += f"; the store can deliver one every {seconds(document['store'])}"
    if hides is None:
        return f"{said}; none of the steps tried hides it."
    return f"{said}; a step that computes for {seconds(hides)} or longer hides it, with one batch prefetched or more."


def _checkpoint_table(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = [("", "whole loop", "stall per checkpoint", "all durable after")]
    for row in rows:
        numbers = (seconds(statistics.median(row[name])) for name in ("total", "stall", "durable"))
        lines.append((f"{row['way']}: {checkpoints.WAYS[row['way']]}", *numbers))
    return lines


def _checkpoint_words(rows: Sequence[Mapping[str, Any]]) -> str:
    of = {row["way"]: {name: statistics.median(row[name]) for name in ("total", "stall")} for row in rows}
    best = "burst buffer" if "burst buffer" in of else "background"
    direct = of["direct"]
    return (
        f"Straight to the slow store each checkpoint stops the loop for {seconds(direct['stall'])}; "
        f"{'through the burst buffer' if best == 'burst buffer' else 'written in the background'} for "
        f"{seconds(of[best]['stall'])}, and the whole loop takes {direct['total'] / of[best]['total']:.1f} × less "
        f"time, {of[best]['total'] / of['none']['total']:.2f} × that without checkpoints."
    )


def _tell(
    document: dict[str, Any], lines: Sequence[tuple[str, ...]], words: Sequence[str], out: str | None
) -> int:
    """Show and save an instrument's document, table and sentences."""
    document = {"format": 1, "instrument": document["instrument"], "machine": machine(), **document}
    if screen.json:
        screen.tell(document)
        return 0
    text = table(lines)
    screen.say()
    screen.say(text)
    screen.say()
    screen.say("\n".join(words))
    folder = Path(out or f"pario-{document['instrument']}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{document['instrument']}.json").write_text(json.dumps(document, indent=1) + "\n")
    (folder / f"{document['instrument']}.txt").write_text("\n".join([document["what"], "", text, "", *words, ""]))
    screen.say()
    screen.say(f"Everything is in {folder}: " + ", ".join(sorted(one.name for one in folder.iterdir())))
    return 0
