"""Does this state deliver what another one delivers? Random configurations, on 1 to 6 ranks, interrupted and resumed.

    git worktree add ../before REVISION
    python -m benchmarks.digests --tree ../before --tree . [--configurations 3000] [--first 0] [--data DIR]

Each configuration is drawn from its number: a set of records, a batch size, an order, a selection, a way, tiers, where
the job stops and a new Loader goes on from its state. Of each the ranks hash (epoch, step, rank, id, bytes) of what
they get, and compare every record with what py-lmdb has read, and that none is missing or comes twice. Trees must agree
on all digests. Exit status 1 if they do not, or a record is wrong.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import lmdb
import numpy as np

#: name -> (records, least and most bytes of a value): in leaf pages, on pages of their own, both, long ones, few
SETS = {
    "small": (997, 1, 120), "pages": (331, 2500, 4200), "mixed": (512, 0, 9000), "long": (67, 90_000, 400_000),
    "one": (1, 50, 50), "few": (7, 10, 3000),
}  # fmt: skip
#: Ranks, and emulated nodes (MPICH's MPIR_CVAR_NUM_CLIQUES)
TEAMS = ((1, 1), (2, 1), (3, 1), (4, 2), (5, 1), (6, 3))


def make(folder: str) -> None:
    for name, (n, least, most) in SETS.items():
        rng = np.random.default_rng(n)
        with lmdb.open(f"{folder}/{name}", map_size=1 << 28) as env, env.begin(write=True) as txn:
            for i in range(n):
                txn.put(b"%06d" % i, rng.bytes(int(rng.integers(least, most + 1))), append=True)


def truth(path: str) -> list[bytes]:
    with lmdb.open(path, readonly=True, lock=False) as env, env.begin() as txn:
        return [value for _, value in txn.cursor()]


def drawn(number: int) -> dict[str, Any]:
    rng = random.Random(number)
    names = rng.sample(sorted(SETS), rng.choice((1, 1, 1, 2)))
    n = sum(SETS[name][0] for name in names)
    return {
        "sets": names,
        "batch": rng.choice((1, 2, 3, 8, 17, 32, 64)),
        "shuffle": rng.choice((False, "block", "global", "global")),
        "seed": rng.randrange(1 << 30),
        "drop_last": rng.random() < 0.3,
        "select": sorted(rng.sample(range(n), rng.randint(1, n))) if rng.random() < 0.25 else None,
        "recipe": rng.choice(("auto", "auto", "auto", "plain", "dio", "stag")),
        "tiers": None if rng.random() < 0.6 else (),
        "slots": rng.choice((2, 3, 5)),
        "slot_bytes": rng.choice((1 << 19, 1 << 20, 4 << 20)),
        "stop": rng.randrange(40),
        "epochs": rng.choice((1, 2)),
    }


def deliver(pario: Any, data: str, comm: Any, config: dict[str, Any]) -> list[tuple[int, int, Any, list[bytes]]]:
    """[(epoch, step, ids, values)] of this rank: some steps, then a new Loader that goes on from the state."""
    paths = [f"{data}/{name}" for name in config["sets"]]
    options: dict[str, Any] = {"slots": config["slots"], "slot_bytes": config["slot_bytes"]}
    if config["tiers"] is not None:
        options["tiers"] = config["tiers"]

    def opened() -> Any:
        return pario.Loader(
            paths if len(paths) > 1 else paths[0], config["batch"], bytes, shuffle=config["shuffle"],
            seed=config["seed"], comm=comm, drop_last=config["drop_last"], select=config["select"],
            recipe=config["recipe"], options=pario.Options(**options),
        )  # fmt: skip

    got: list[tuple[int, int, Any, list[bytes]]] = []

    def take(loader: Any, most: float) -> None:
        for batch in loader:
            got.append((batch.epoch, batch.step, batch.ids.copy(), list(next(iter(batch.values())))))
            if len(got) >= most:
                return

    with opened() as loader:
        take(loader, max(1, config["stop"]))
        state = json.loads(json.dumps(loader.state_dict()))
    with opened() as loader:
        loader.load_state_dict(state)
        while loader.epoch < config["epochs"]:
            take(loader, float("inf"))
    return got


def check(config: dict[str, Any], records: list[bytes], got: list[Any]) -> str:
    """What is wrong with what all ranks got; "" if nothing is."""
    counts: dict[int, Counter[int]] = {}
    for epoch, _, ids, values in got:
        counts.setdefault(epoch, Counter()).update(ids.tolist())
        if any(records[i] != value for i, value in zip(ids.tolist(), values, strict=True)):
            return f"epoch {epoch}: wrong bytes"
    wanted = set(range(len(records))) if config["select"] is None else set(config["select"])
    for epoch, seen in counts.items():
        if max(seen.values(), default=1) > 1 or not seen.keys() <= wanted:
            return f"epoch {epoch}: a record comes twice, or was not chosen"
        if not config["drop_last"] and seen.keys() != wanted:
            return f"epoch {epoch}: {len(wanted) - len(seen)} records are missing"
    return ""


def work(data: str, first: int, stop: int) -> None:
    """One line per configuration, on rank 0: its number, the digest, what is wrong."""
    from mpi4py import MPI

    import pario

    world = MPI.COMM_WORLD
    records = {name: truth(f"{data}/{name}") for name in SETS}
    for number in range(first, stop):
        config = drawn(number)
        try:
            mine: Any = deliver(pario, data, world if world.size > 1 else "self", config)
        except pario.errors.OptionError as e:
            mine = type(e).__name__
        everybody = world.gather(mine)
        if world.rank:
            continue
        said, wrong = hashlib.sha256(), ""
        if any(isinstance(one, str) for one in everybody):
            said.update(repr(everybody).encode())
        else:
            for rank, steps in enumerate(everybody):
                for epoch, step, ids, values in steps:
                    for i, value in zip(ids.tolist(), values, strict=True):
                        said.update(b"%d %d %d %d %d " % (epoch, step, rank, i, len(value)) + value)
            got = [one for steps in everybody for one in steps]
            wrong = check(config, [value for name in config["sets"] for value in records[name]], got)
        print(number, said.hexdigest(), wrong, flush=True)


def run(tree: Path, data: str, team: tuple[int, int], numbers: range) -> dict[int, tuple[str, str]]:
    ranks, nodes = team
    env = {**os.environ, "PYTHONPATH": str(tree), "MPIR_CVAR_NUM_CLIQUES": str(nodes)}
    command = ["mpiexec", "-n", str(ranks), sys.executable, str(Path(__file__).resolve()), "--work", data]
    command += [str(numbers.start), str(numbers.stop)]
    done = subprocess.run(command, cwd=tree, env=env, stdout=subprocess.PIPE, text=True, timeout=1800, check=False)
    rows = [line.split(" ", 2) for line in done.stdout.splitlines() if line[:1].isdigit()]
    found = {int(number): (digest, wrong) for number, digest, wrong in rows}
    for number in numbers:
        found.setdefault(number, ("", f"no answer, exit status {done.returncode}"))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.digests", description=__doc__.split("\n")[0])
    parser.add_argument("--tree", action="append", type=Path, required=True, help="several times")
    parser.add_argument("--configurations", type=int, default=3000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--data", help="where the sets lie, or are made; default: for this run")
    parser.add_argument("--part", type=int, default=50, help="configurations of one process")
    options = parser.parse_args()
    bad = 0
    with tempfile.TemporaryDirectory(prefix="pario-digests-") as own:
        data = options.data or own
        if not Path(data, "small").exists():
            make(data)
        last = options.first + options.configurations
        for k, first in enumerate(range(options.first, last, options.part)):
            numbers = range(first, min(first + options.part, last))
            results = [run(tree.resolve(), data, TEAMS[k % len(TEAMS)], numbers) for tree in options.tree]
            for number in numbers:
                said = [result[number] for result in results]
                if len({digest for digest, _ in said}) > 1 or any(wrong for _, wrong in said):
                    bad += 1
                    print(number, TEAMS[k % len(TEAMS)], drawn(number) | {"select": None}, said, flush=True)
            print(f"{numbers.stop - options.first:,} of {options.configurations:,}, {bad} bad", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        sys.exit(main())
