"""A mini-application reads batches and computes on each: what its input costs, with prefetching and without.

After section 5.3 of the study (threads.py): read and decode with several threads, batch, prefetch 0, 1 or 4 batches.
Computing is a sleep of a known length. A `Loader` feeds the same mini-application.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.micro.items import Decoding, Items
from pario.decode.base import Decoder
from pario.loader.loader import Loader
from pario.options import Options, Recipe
from pario.threads import Workers

#: batches ahead; compute per batch ÷ time to read one batch
PREFETCH = (0, 1, 4)
FACTORS = (0.5, 1.0, 2.0)
#: Seconds that reads under way may take after the last batch: the store may have stalled.
_END_S = 10.0
#: the way of the Loader in the rows
LOADER = "pario"

Compute = Callable[[list[Any]], object]


@dataclass(frozen=True)
class Application:
    """threads : that read and decode
    factors : compute per batch, as multiples of the time in which a batch is read, without prefetching
    batches : per run
    """

    batch: int = 32
    threads: int = 16
    batches: int = 50
    prefetch: Sequence[int] = PREFETCH
    factors: Sequence[float] = FACTORS
    rounds: int = 3
    decoder: Decoder | None = None
    shuffled: bool = True
    seed: int = 0

    @property
    def runs(self) -> int:
        return self.rounds * len(self.factors) * (len(self.prefetch) + 1)


def pipeline(
    items: Items, order: np.ndarray, what: Application, prefetch: int, decoding: Decoding | None
) -> Iterator[list[Any]]:
    """Batches of what was read. prefetch : batches that are read while the caller has one; 0: none

    Raises ReadError, DecodeError.
    """
    size = int(items.nbytes.max())

    def one(item: int) -> Any:
        buffer = memoryview(bytearray(min(size, int(items.nbytes[item]))))
        items.read(item, buffer)
        return buffer if decoding is None else decoding(buffer)

    numbers = order.tolist()
    cuts = iter([numbers[k : k + what.batch] for k in range(0, len(numbers), what.batch)])
    ahead: deque[list[Future[Any]]] = deque()
    pool = Workers("input", what.threads)

    def ask(batches: int) -> None:
        ahead.extend([pool.call(one, item) for item in cut] for cut in itertools.islice(cuts, batches))

    try:
        ask(prefetch)
        while True:
            # Without prefetching a batch is asked for when the caller wants it, else when he takes one before it.
            ask(0 if prefetch else 1)
            if not ahead:
                return
            batch = [future.result() for future in ahead.popleft()]
            ask(1 if prefetch else 0)
            yield batch
    finally:
        pool.close(_END_S, cancel=True)


def input_seconds(items: Items, what: Application, prefetch: int) -> float:
    """Seconds per batch of reading alone. prefetch : 0: a batch is asked for when the one before has come"""
    items.drop()
    decoding = Decoding(what.decoder, items) if what.decoder is not None else None
    order = _order(items, what, min(what.batches, 20), 0)
    stamps = [time.perf_counter()]
    for _ in pipeline(items, order, what, prefetch, decoding):
        stamps.append(time.perf_counter())
    # From the second batch on: before the first one connections are made and threads are started.
    return (stamps[-1] - stamps[1]) / max(1, len(stamps) - 2)


def overlap(
    items: Items,
    what: Application,
    *,
    loaded: str | None = None,
    db: str | None = None,
    tick: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """{"input": seconds per batch of reading alone, batch by batch, "store": the same with four batches ahead, in which
    the store can deliver one, "rows": [{"factor", "compute", "way": prefetch or "pario",
    "seconds": [per batch, one per round], "only": [of computing alone]}]}. Caches are dropped before each run.

    loaded : the LMDB that a Loader reads, too; None: no Loader
    """
    decoding = Decoding(what.decoder, items) if what.decoder is not None else None
    needs, store = (input_seconds(items, what, prefetch) for prefetch in (0, 4))
    ways: list[Any] = [*what.prefetch, *([LOADER] if loaded else [])]
    found: dict[tuple[float, Any], list[float]] = {}
    alone: dict[float, list[float]] = {}
    for number in range(what.rounds):
        for factor in what.factors:
            compute = _sleep(factor * needs)
            order = _order(items, what, what.batches, what.seed + number)
            alone.setdefault(factor, []).append(_alone(items, order, what, compute, decoding))
            for way in ways:
                items.drop()
                if way == LOADER:
                    took = _by_loader(loaded or "", db, what, compute, number)
                else:
                    batches = pipeline(items, order, what, way, decoding)
                    took = _timed(batches, compute)
                found.setdefault((factor, way), []).append(took)
                tick()
    rows = [
        {"factor": factor, "compute": statistics.median(alone[factor]), "way": way, "seconds": took,
         "only": alone[factor]}
        for (factor, way), took in found.items()
    ]  # fmt: skip
    return {"input": needs, "store": store, "rows": rows}


def hides(rows: Sequence[dict[str, Any]], part: float = 0.05) -> float | None:
    """The least compute per batch, in seconds, of those tried beside which prefetching left input costs of at most
    `part` of it; None: none did."""
    enough = [
        row["compute"]
        for row in rows
        if row["way"] not in (0, LOADER) and statistics.median(row["seconds"]) <= (1 + part) * row["compute"]
    ]
    return min(enough, default=None)


def _order(items: Items, what: Application, batches: int, seed: int) -> np.ndarray:
    """Numbers of items for this many batches: no item comes again before all have come."""
    order = items.draw(what.shuffled, seed)
    return np.resize(order, batches * what.batch)


def _sleep(seconds: float) -> Compute:
    return lambda batch: time.sleep(seconds)


def _alone(items: Items, order: np.ndarray, what: Application, compute: Compute, decoding: Decoding | None) -> float:
    """Seconds per batch of computing alone: on the same batch again and again."""
    batch = next(pipeline(items, order[: what.batch], what, 0, decoding))
    return _timed(itertools.repeat(batch, what.batches), compute)


def _timed(batches: Iterator[list[Any]], compute: Compute) -> float:
    """Seconds per batch of reading and computing."""
    count, begin = 0, time.perf_counter()
    for batch in batches:
        compute(batch)
        count += 1
    return (time.perf_counter() - begin) / max(count, 1)


def _by_loader(path: str, db: str | None, what: Application, compute: Compute, number: int) -> float:
    with Loader(
        path, what.batch, what.decoder, shuffle="global" if what.shuffled else False, seed=what.seed + number,
        comm="self", db=db, options=Options(tiers=()), recipe=Recipe(fetch="posix"),
    ) as loader:  # fmt: skip
        count, begin = 0, time.perf_counter()
        while count < what.batches:  # epochs follow each other without a break
            for batch in loader:
                compute([{name: array[i : i + 1] for name, array in batch.items()} for i in range(len(batch.ids))])
                count += 1
                if count == what.batches:
                    break
        return (time.perf_counter() - begin) / count
