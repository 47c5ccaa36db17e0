"""Another state of the source beside this one, in turns, after ÷ before: first and later epochs, cold, warm, and with
memory for a part of the file.

    git worktree add ../before REVISION
    python -m benchmarks.compare ../before --data DIR [--rounds 5] [--sets 100b,3k,197k] [--ranks 1,2]
                                           [--states warm,cold,part,none] [--out results.json]

Each run is a process that makes a Loader and reads four epochs: "first" is the first one, with the Loader's making, and
"later" the faster of the last two. The first side changes from round to round. Before a cold run the file's pages are
dropped; in "part" both are told of a memory tier for a third of the file, so that the rest comes through the ring; in
"none" of no tier, as if memory had no room, with the pages dropped: the first epoch brings them into the page cache.

A ratio above 1 means that this state is faster; the interval is a bootstrap of the mean log ratio, 95 %. Exit status 1
if the geometric mean over the cells is below 1, or the whole interval of one; of a warm first epoch, while the memory
is filled, below 0.9.
"""

from __future__ import annotations

import math
import statistics
import sys
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
BATCH = {"100b": 1024, "3k": 256, "197k": 32}
RECORDS = {"100b": 1_000_000, "3k": 40_000, "197k": 1_000}
ORDERS: dict[str, Any] = {"key": False, "block": "block", "global": "global"}
EPOCHS = 4


def work(path: str, order: str, batch: str) -> None:
    """One run. Nothing of benchmarks/ is imported, which the other state may lack."""
    import json
    import time

    import pario
    from pario.comm.world import get_world

    world = get_world(None)
    seconds = []
    world.barrier()
    begin = time.perf_counter()
    with pario.Loader(path, int(batch), pario.decode.Raw(), shuffle=ORDERS[order]) as loader:
        for _ in range(EPOCHS):
            for _ in loader:
                pass
            world.barrier()
            seconds.append(time.perf_counter() - begin)
            begin = time.perf_counter()
    if world.rank == 0:
        print(json.dumps(seconds), flush=True)


def run(path: str, batch: int, ranks: str, order: str, state: str, tree: Path) -> list[float]:
    """The seconds of the epochs of one run of this tree."""
    from benchmarks import cache
    from benchmarks.measure import Standing

    file = Path(path, "data.mdb")
    (cache.drop_file if state in ("cold", "none") else cache.warm_file)(str(file))
    tiers = {"part": {"PARIO_TIERS": f"memory:{file.stat().st_size // 3}"}, "none": {"PARIO_TIERS": ""}}.get(state, {})
    words = "--work", path, order, str(batch)
    with Standing(str(HERE), *words, ranks=int(ranks), more={"PYTHONPATH": str(tree), **tiers}) as side:
        return list(side.ask())


def main() -> int:
    import numpy as np

    from benchmarks import data
    from benchmarks.measure import Row, Section, finish, interleave, interval, parser_of

    parser = parser_of("compare", __doc__, 5)
    parser.add_argument("before", type=Path, help="a checkout of the other state")
    for name, known in (("sets", "100b,3k,197k"), ("ranks", "1,2"), ("states", "warm,cold,part,none")):
        parser.add_argument(f"--{name}", default=known, type=lambda text: text.split(","))
    options = parser.parse_args()
    trees = {"before": options.before.resolve(), "after": HERE.parent.parent}
    section = Section("compare", "after ÷ before", "see the case")
    wrong, means = False, []
    few = (["3k"], ["1"], ["warm"]) if options.smoke else (options.sets, options.ranks, options.states)
    for name, ranks, state, order in product(*few, ORDERS):
        path = data.make(options.data, name, 2_000 if options.smoke else RECORDS[name]).path
        sides = {side: partial(run, path, BATCH[name], ranks, order, state, tree) for side, tree in trees.items()}
        if (ranks, state) == (few[1][0], few[2][0]):
            interleave(sides, 1)  # compiles what this order needs
        found = interleave(sides, options.rounds)
        for when, pick in (("first", lambda s: s[0]), ("later", lambda s: min(s[2:]))):
            ratios = np.divide(*([pick(each) for each in found[side]] for side in ("before", "after")))
            mean, low, high = interval(ratios[:, None])
            means.append(math.log(mean))
            wrong |= high < (0.9 if (state, when) == ("warm", "first") else 1.0)
            section.add(Row(f"{name}, {ranks} rank(s), {order}, {state}, {when}", mean, low, high))
    mean = math.exp(statistics.fmean(means))
    section.add(Row(f"geometric mean of {len(means)} cells", mean, mean, mean, ">=", 1.0))
    return finish("compare", options, [section]) or int(wrong and not options.smoke)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        sys.path.pop(0)  # benchmarks/, where modules have names of others
        work(*sys.argv[2:])
    else:
        sys.exit(main())
