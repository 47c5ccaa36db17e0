"""Later epochs, all records in the node's memory: pario's defaults ÷ the tightest py-lmdb loops that we can write.

    python -m benchmarks.in_memory DIR [--rounds 9] [--ranks 1,2,4] [--sizes 100,3072,201728] [--out results.json]

A loop copies each value once, out of LMDB's mapping into a batch's array, and does nothing else: over one array, which
then stays in the processor's cache, and over two in turn, as whoever keeps one batch while the next is made must do.
All sides read pario's order, in processes that stay and take turns, the first one changing from round to round; in a
turn the second of two epochs counts. Exit status 1 if the geometric mean over the cells, or a whole 95 % interval
(bootstrap of the mean log ratio), is below a bar.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import lmdb
import numpy as np

from benchmarks.measure import Row, Section, Standing, finish, interleave, interval, parser_of
from benchmarks.worker import Team, on_request

BATCH = {100: 1024, 3072: 256, 201_728: 64}
BYTES = 200_000_000
ORDERS: dict[str, Any] = {"key": False, "block": "block", "global": "global"}
#: loops over so many arrays -> the bar
BARS = {"one array": 0.9, "two arrays": 1.0}


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def make(folder: Path, size: int, count: int = 0) -> Path:
    """An LMDB of `count` values; by default 200 MB of them."""
    path = folder / f"raw-{size}{f'-{count}' if count else ''}.lmdb"
    count = count or min(BYTES // size, 1_000_000)
    if not path.exists():
        rng = np.random.default_rng(size)
        with lmdb.open(str(path), subdir=False, map_size=4 * count * max(size, 1000), lock=False) as env:
            for first in range(0, count, 5000):
                rows = rng.integers(0, 256, (min(5000, count - first), size), np.uint8)
                with env.begin(write=True) as txn:
                    for i, row in enumerate(rows):
                        txn.put(b"%08d" % (first + i), row.tobytes(), append=True)
    return path


def pario_side(team: Team, path: str, order: str, size: int, ids: str) -> None:
    import pario

    with pario.Loader(
        path, BATCH[size], pario.decode.Raw("u1", (size,)), shuffle=ORDERS[order], comm=team.comm
    ) as loader:
        with lmdb.open(path, subdir=False, readonly=True, lock=False) as env, env.begin() as txn:
            seen = []
            for batch in loader:  # and every byte of the first epoch is right
                for i, row in zip(batch.ids.tolist(), batch["data"], strict=True):
                    assert row.tobytes() == txn.get(b"%08d" % i), i
                seen.append(np.array(batch.ids))
        np.save(f"{ids}/{team.rank}.npy", np.concatenate(seen))
        on_request(team, lambda: sum(len(batch.ids) for batch in loader))


def bare_side(team: Team, path: str, arrays: int, size: int, ids: str) -> None:
    keys = [b"%08d" % i for i in np.load(f"{ids}/{team.rank}.npy").tolist()]
    batch = BATCH[size]
    outs = [memoryview(np.empty(batch * size, np.uint8)) for _ in range(arrays)]
    with (
        lmdb.open(path, subdir=False, readonly=True, lock=False, readahead=False) as env,
        env.begin(buffers=True) as txn,
    ):
        get = txn.get

        def epoch() -> int:
            for number, start in enumerate(range(0, len(keys), batch)):
                out, at = outs[number % arrays], 0
                for key in keys[start : start + batch]:
                    out[at : at + size] = get(key)
                    at += size
            return len(keys)

        on_request(team, epoch)


def cell(path: Path, order: str, size: int, ranks: int, rounds: int) -> dict[str, list[float]]:
    """Rates of each side, in records/s, round by round."""
    sides: dict[str, Callable[[], float]] = {}
    with ExitStack() as stack:
        ids = stack.enter_context(tempfile.TemporaryDirectory(prefix="pario-order-"))
        for number, name in enumerate(("pario", *BARS)):
            words = ("side", str(number), str(path), order, str(size), ids)
            side = stack.enter_context(Standing("-m", "benchmarks.in_memory", *words, ranks=ranks))
            for _ in range(1 if number else 3):  # the memory tier is filled behind them
                side.ask()
            sides[name] = partial(second, side)
        return interleave(sides, rounds)


def second(side: Standing) -> float:
    """Records/s of all ranks together in the second of two epochs, from the first one's begin to the last one's end: of
    more ranks than cores some may begin when others have ended."""
    side.ask()
    ranks = side.ask()["ranks"]
    end = max(rank["begin"] + rank["seconds"] for rank in ranks)
    return sum(rank["records"] for rank in ranks) / (end - min(rank["begin"] for rank in ranks))


def main() -> int:
    parser = parser_of("in_memory", __doc__, 9, data=False)
    parser.add_argument("folder")
    parser.add_argument("--ranks", type=numbers, default=[1, 2, 4])
    parser.add_argument("--sizes", type=numbers, default=list(BATCH))
    options = parser.parse_args()
    folder, rounds = Path(options.folder), 1 if options.smoke else options.rounds
    folder.mkdir(parents=True, exist_ok=True)
    section = Section("tiers", "Later epochs, all records in memory ÷ the tightest py-lmdb loops", "in memory")
    wrong = False
    for size in [3072] if options.smoke else options.sizes:
        path = make(folder, size, 2000 if options.smoke else 0)
        for order, ranks in product(ORDERS, [2] if options.smoke else options.ranks):
            rates = section.raw[f"{size} {order} {ranks}"] = cell(path, order, size, ranks, rounds)
            for name, bar in BARS.items():
                mean, low, high = interval(np.divide([rates["pario"]], [rates[name]]))
                wrong |= high < bar
                ours, theirs = (f"{statistics.median(rates[side]) / 1e3:,.1f} k/s" for side in ("pario", name))
                case = f"{size} B, {order}, {ranks} ranks ÷ {name}"
                section.add(Row(case, mean, low, high, ours=f"pario {ours}", theirs=f"py-lmdb {theirs}"))
    add_means(section, BARS)
    return finish("in_memory", options, [section]) or int(wrong and not options.smoke)


def add_means(section: Section, bars: Mapping[str, float]) -> None:
    """Rows with the geometric means of those whose case ends with a name of `bars`."""
    rows = list(section.rows)
    for name, bar in bars.items():
        means = [math.log(row.figure) for row in rows if row.case.endswith(f" {name}")]
        mean = math.exp(statistics.fmean(means))
        section.add(Row(f"geometric mean of {len(means)} cells, {name}", mean, mean, mean, ">=", bar))


if __name__ == "__main__":
    if sys.argv[1:2] == ["side"]:
        arrays, path, order, size, ids = sys.argv[2:]
        if arrays == "0":
            pario_side(Team(), path, order, int(size), ids)
        else:
            bare_side(Team(), path, int(arrays), int(size), ids)
    else:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        sys.exit(main())
