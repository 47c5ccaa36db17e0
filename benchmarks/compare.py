"""Another state of the source beside this one: epochs of records of 100 bytes, in turns, after ÷ before.

    git worktree add ../before REVISION
    python -m benchmarks.compare ../before --data DIR [--pairs 7] [--rounds 3] [--out results.json]

Each state runs in processes of its own, which stay for a few rounds and are then started anew; in a round both read an
epoch, the first one changing from round to round. The page cache holds the file. A ratio above 1 means that this state
is faster; the interval is a bootstrap of the mean log ratio, 95 %.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
BATCH = 1024


def work(path: str, order: str) -> None:
    """One side: an epoch for each line. Nothing of benchmarks/ is imported, which the other state may lack."""
    import json
    import time

    import pario
    from pario.comm.world import get_world

    world = get_world(None)
    shuffle: Any = False if order == "none" else order
    with pario.Loader(path, BATCH, pario.decode.Raw(), shuffle=shuffle) as loader:
        while world.bcast(sys.stdin.readline() if world.rank == 0 else ""):
            world.barrier()
            begin = time.perf_counter()
            for _ in loader:
                pass
            world.barrier()
            if world.rank == 0:
                print(json.dumps(time.perf_counter() - begin), flush=True)


def main() -> int:
    import numpy as np

    from benchmarks import data
    from benchmarks.measure import Row, Section, Standing, finish, interleave, interval, parser_of

    parser = parser_of("compare", __doc__, 3)
    parser.add_argument("before", type=Path, help="a checkout of the other state")
    parser.add_argument("--pairs", type=int, default=7, help="pairs of processes, one after the other")
    options = parser.parse_args()
    path = data.make(options.data, "100b", 20_000 if options.smoke else None).path
    trees = {"before": options.before.resolve(), "after": HERE.parent.parent}
    pairs, rounds = (1, 1) if options.smoke else (options.pairs, options.rounds)
    section = Section("compare", "Epochs of 100-byte records: after ÷ before", "warm")
    for order, ranks in product(("none", "global"), (1, 2)):
        ratios = []
        for _ in range(pairs):
            with ExitStack() as stack:
                sides = {
                    name: stack.enter_context(
                        Standing(str(HERE), "--work", path, order, ranks=ranks, more={"PYTHONPATH": str(tree)})
                    ).ask
                    for name, tree in trees.items()
                }
                interleave(sides, 1)  # warms up
                found = interleave(sides, rounds)
                ratios.append(np.divide(found["before"], found["after"]))
        mean, low, high = interval(np.array(ratios))
        section.add(Row(f"{order}, {ranks} rank(s)", mean, low, high))
    return finish("compare", options, [section])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        sys.path.pop(0)  # benchmarks/, where modules have names of others
        work(*sys.argv[2:])
    else:
        sys.exit(main())
