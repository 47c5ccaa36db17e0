"""Later epochs, all records in the node's memory: pario's defaults ÷ the tightest py-lmdb loops that we can write.

    python -m benchmarks.in_memory DIR [--rounds 9] [--ranks 1,2,4] [--sizes 100,3072,201728] [--out results.json]

A loop copies each value once, out of LMDB's mapping into a batch's array, and does nothing else: over one array, which
then stays in the processor's cache, and over two in turn, as whoever keeps one batch while the next is made must do.
All sides read pario's order, in processes that stay and take turns, the first one changing from round to round; in a
turn the second of two epochs counts. Exit status 1 if the geometric mean over the cells, or a whole 95 % interval
(bootstrap of the mean log ratio), is below a bar.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import numpy as np

from benchmarks.compare import interval
from benchmarks.measure import ROOT, mpiexec, save_facts
from benchmarks.study.jobs import job_environment
from benchmarks.worker import Team, on_request

BATCH = {100: 1024, 3072: 256, 201_728: 64}
BYTES = 200_000_000
ORDERS: dict[str, Any] = {"key": False, "block": "block", "global": "global"}
#: loops over so many arrays -> the bar
BARS = {"one array": 0.9, "two arrays": 1.0}


def make(folder: Path, size: int, count: int = 0) -> Path:
    path = folder / f"raw-{size}.lmdb"
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


class Side:
    """Processes that run an epoch whenever they are asked."""

    def __init__(self, ranks: int, *words: str) -> None:
        command = [sys.executable, "-m", "benchmarks.in_memory", "side", *words]
        command = command if ranks == 1 else [mpiexec(), "-n", str(ranks), *command]
        pipe = subprocess.PIPE
        self._job = subprocess.Popen(
            command, cwd=ROOT, env=job_environment(ranks, 1), stdin=pipe, stdout=pipe, text=True, start_new_session=True
        )

    def epoch(self) -> float:
        """Records/s of all ranks together."""
        assert self._job.stdin is not None
        assert self._job.stdout is not None
        self._job.stdin.write("epoch\n")
        self._job.stdin.flush()
        line = self._job.stdout.readline()
        if not line.startswith("{"):
            raise RuntimeError(f"a side has ended with {self._job.wait(60)}")
        ranks = json.loads(line)["ranks"]
        return sum(rank["records"] for rank in ranks) / max(rank["seconds"] for rank in ranks)

    def close(self) -> None:
        try:
            self._job.communicate(timeout=60)
        finally:
            self._job.kill()


def cell(path: Path, order: str, size: int, ranks: int, rounds: int) -> dict[str, list[float]]:
    """Rates of each side, in records/s, round by round."""
    sides: dict[str, Side] = {}
    with tempfile.TemporaryDirectory(prefix="pario-order-") as ids:
        try:
            sides["pario"] = Side(ranks, "pario", str(path), order, str(size), ids)
            for _ in range(3):  # the memory tier is filled behind them
                sides["pario"].epoch()
            for arrays, name in enumerate(BARS, 1):
                sides[name] = Side(ranks, str(arrays), str(path), order, str(size), ids)
                sides[name].epoch()
            rates: dict[str, list[float]] = {name: [] for name in sides}
            names = list(sides)
            for turn in range(rounds):
                for name in names[turn % 3 :] + names[: turn % 3]:
                    sides[name].epoch()
                    rates[name].append(sides[name].epoch())
            return rates
        finally:
            for side in sides.values():
                side.close()


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.in_memory", description=__doc__.split("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ranks", type=numbers, default=[1, 2, 4])
    parser.add_argument("--sizes", type=numbers, default=list(BATCH))
    parser.add_argument("--out")
    options = parser.parse_args()
    folder = Path(options.folder)
    folder.mkdir(parents=True, exist_ok=True)
    found: list[dict[str, Any]] = []
    wrong = False
    for size in options.sizes:
        path = make(folder, size)
        for order in ORDERS:
            for ranks in options.ranks:
                rates = cell(path, order, size, ranks, options.rounds)
                row: dict[str, Any] = {"size": size, "order": order, "ranks": ranks, "rates": rates}
                for name, bar in BARS.items():
                    row[name] = interval(np.divide([rates["pario"]], [rates[name]]))
                    wrong |= row[name][2] < bar
                words = ", ".join(
                    f"÷ {name} {row[name][0]:.2f} ({row[name][1]:.2f} … {row[name][2]:.2f})" for name in BARS
                )
                middle = sorted(rates["pario"])[options.rounds // 2]
                print(f"{size} B, {order}, {ranks} ranks: {words}; {middle / 1e3:,.1f} k/s", flush=True)
                found.append(row)
    for name, bar in BARS.items():
        mean = math.exp(sum(math.log(row[name][0]) for row in found) / len(found))
        wrong |= mean < bar
        print(f"÷ {name}: geometric mean of {len(found)} cells {mean:.3f}, bar {bar}")
    if options.out:
        save_facts(options.out, rounds=options.rounds, cells=found)
    return int(wrong)


if __name__ == "__main__":
    if sys.argv[1:2] == ["side"]:
        side, path, order, size, ids = sys.argv[2:]
        made: Callable[..., None] = pario_side if side == "pario" else bare_side
        made(Team(), path, order if side == "pario" else int(side), int(size), ids)
    else:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        sys.exit(main())
