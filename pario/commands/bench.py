"""`bench`: read epochs as a training job would, and say how fast it was and where the time went."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from pario import decode
from pario.commands.screen import counted, decimal_bytes, screen, seconds, table
from pario.errors import ParioError
from pario.fetch.base import open_dataset, resolve
from pario.fetch.posix import PosixFetcher
from pario.loader import Loader
from pario.options import Options
from pario.reader import RECIPES
from pario.study.cache import Unavailable, drop_file

__all__ = ["bench", "cached_share"]

#: (name in Loader.stats(), what it is); the first block is of the ranks that read, in the background unless a recipe
#: does without
_READING = (
    ("locate", "which records, where, which reads"),
    ("turn", "waited for a free slot: all were being filled or still in use (stag: or for its turn)"),
    ("read", "a read was under way"),
    ("check", "snapshot and page headers"),
)
_RANKS = (
    ("share", "waited for bytes: reading was slower than the ranks"),
    ("decode", "bytes to arrays"),
    ("consumer", "your own code between two batches"),
)

#: Places of the file that are asked whether they are in the page cache.
SAMPLES = 1000


def bench(
    path: str,
    *,
    db: str | None,
    batch_size: int,
    shuffle: str,
    decoder: str,
    recipe: str,
    size: int | None,
    epochs: int,
    fetch: str,
    step_ms: float,
    cold: bool,
    report: bool,
    as_json: bool,
    options: dict[str, Any],
) -> int:
    """Collective over all ranks."""
    if cold:
        _drop(path)
    cached = cached_share(path)
    started = time.perf_counter()
    order: bool | str = False if shuffle == "none" else shuffle
    knobs = Options(fetch=fetch, **options)
    chosen = _decoder(decoder, size)
    progress = screen.progress("leaf pages", "page")
    with Loader(
        path, batch_size, chosen, shuffle=order, db=db, options=knobs, recipe=recipe, progress=progress
    ) as loader:
        screen.running = True
        world = loader.world
        value_bytes = 0
        lines: list[dict[str, float]] = []
        first = 0.0
        for epoch in range(epochs):
            begun = time.perf_counter()
            bar = screen.bar(len(loader), f"epoch {epoch + 1}", "batch")
            records = 0
            for batch in loader:
                if not first:
                    first = time.perf_counter() - started
                records += len(batch.ids)
                bar.update()
                if step_ms:
                    time.sleep(step_ms / 1000)
            screen.end_bar()
            took = world.allreduce_max(round((time.perf_counter() - begun) * 1e6)) / 1e6
            records = world.allreduce_sum(records)
            # Not before: where there is no saved index yet, the first epoch finds the places.
            value_bytes = value_bytes or int(loader.index.extents["nbytes"].sum())
            lines.append({"seconds": took, "records": records, "bytes": value_bytes})
            if not as_json:
                speed = f"{value_bytes / took / 1e9:.3f} GB/s, {records / took:,.0f} records/s"
                screen.say(f"epoch {epoch + 1}: {counted(records, 'record')} in {seconds(took)}: {speed}")
        everybody = loader.report()
        total = everybody.total
        result = {
            "path": str(Path(path).absolute()),
            "ranks": world.size,
            "nodes": world.nodes,
            "records": loader.index.n,
            "value_bytes": value_bytes,
            "page_bytes": page_bytes(loader.index),
            "batch_size": batch_size,
            "shuffle": shuffle,
            "recipe": recipe,
            "decoder": repr(loader.decoder),
            "fetch": fetch,
            "cached_before": cached,
            "open_seconds": max(rank.open for rank in everybody.ranks),
            "first_batch_seconds": world.allreduce_max(round(first * 1e6)) / 1e6,
            "epochs": lines,
            "rank_seconds": {name: total[name] for name, _ in _READING + _RANKS},
            **{name: total[name] for name in ("bytes_read", "reads", "skipped")},
            **({"report": everybody.as_dict()} if report else {}),
        }
    screen.running = False
    if as_json:
        screen.say(json.dumps(result))
    else:
        screen.say(_words(result, epochs))
        if report:
            screen.say(f"\n{everybody}")
    return 0


def _words(r: dict[str, Any], epochs: int) -> str:
    sums, wall = r["rank_seconds"], sum(e["seconds"] for e in r["epochs"])
    rows = [("", "rank seconds", "of the wall time", "")]
    reading = "reading, in the background:" if RECIPES[r["recipe"]].ahead else "reading, by the ranks that wait for it:"
    for title, block in ((reading, _READING), ("the ranks:", _RANKS)):
        rows.append((title, "", "", ""))
        whole = wall * (1 if block is _READING else r["ranks"])
        for name, what in block:
            rows.append((f"  {name}", f"{sums[name]:.3f}", f"{sums[name] / whole:.1%}" if whole else "", what))
    text = table(rows, words=True)
    cached = r["cached_before"]
    state = "unknown here" if cached is None else f"{cached:.0%} of the file"
    lines = [
        f"{counted(r['ranks'], 'rank')} on {counted(r['nodes'], 'node')}, "
        f"{counted(r['batch_size'], 'record')} per rank and batch, "
        f"shuffle {r['shuffle']}, decoder {r['decoder']}, fetch {r['fetch']}"
        + (f", recipe {r['recipe']}" if r["recipe"] != "auto" else ""),
        f"in the page cache before: {state}" + (" (of rank 0's node)" if r["nodes"] > 1 and cached is not None else ""),
        f"time to first batch: {seconds(r['first_batch_seconds'])}, of it opening {seconds(r['open_seconds'])}",
        f"read per epoch: {decimal_bytes(r['bytes_read'] / epochs)} in {r['reads'] / epochs:,.0f} reads "
        f"(the records have {decimal_bytes(r['value_bytes'])}, their pages {decimal_bytes(r['page_bytes'])})",
        "",
        text,
    ]
    return "\n".join(lines)


def page_bytes(index: Any) -> int:
    """Bytes of all pages that hold a record's value: what a device must deliver at least for one epoch."""
    first = index.extents["offset"] // index.page_size
    last = (index.extents["offset"] + np.maximum(index.extents["nbytes"], 1) - 1) // index.page_size
    # A page with several records counts once; a value on several pages has these for itself.
    return int((last - first).sum() + len(np.unique(first))) * index.page_size


def _decoder(name: str, size: int | None) -> Any:
    if name == "raw":
        return None
    if name == "datum":
        return decode.Datum()
    return decode.Image(size) if size else decode.Image()


def cached_share(path: str) -> float | None:
    """How much of the data file is in this node's page cache (0..1), sampled; None where the system cannot say."""
    try:
        fetcher = open_dataset(path, PosixFetcher)
    except ParioError:
        return None  # the loader says what is wrong
    try:
        pages = fetcher.nbytes // 4096
        return fetcher.cached_share(np.unique(np.linspace(0, pages - 1, min(SAMPLES, pages)).astype(np.int64)) * 4096)
    finally:
        fetcher.close()


def _drop(path: str) -> None:
    """Ask the kernel to forget the file's pages on this node."""
    with suppress(OSError, ParioError, Unavailable):  # the loader says what is wrong, `cached_share` what stayed
        drop_file(resolve(path))
