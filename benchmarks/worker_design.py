"""One cell of the design: the best by hand and "auto", in turns, in one job of one or more ranks; one JSON line.

By hand, the depth is searched first. (The decoder of these records has no threads to search for.) The job starts once.
In each round a new Loader with the best by hand reads two epochs, and so does a new one with "auto", which begins with
two reads in flight. First epochs are compared with first ones: second ones find what was read ahead of them. Between
epochs the pages of the file are dropped where a page cache holds them.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from benchmarks.worker import Team, run

#: depths to try first; then twice and half of the best, up to the most
COARSE, MOST = (1, 4, 16, 64), 64
EPOCHS = 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("path")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compute", type=float, default=0.0, help="seconds per record")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--shuffle", default="none")
    parser.add_argument("--warmup", required=True)
    parser.add_argument("--drop", help="a file whose pages are dropped before each epoch")
    options = parser.parse_args()
    team = Team()

    import pario
    from benchmarks import cache

    def loader(path: str, inflight: int | str) -> Any:
        return pario.Loader(
            path,
            options.batch,
            decoder=pario.decode.Datum(),
            shuffle=False if options.shuffle == "none" else options.shuffle,
            seed=1,
            comm=team.comm or "self",
            options=pario.Options(inflight=inflight, tiers=()),
        )

    def epoch(reading: Any) -> float:
        """Seconds, from a common start to the end of the last rank."""
        if options.drop and team.rank == 0:
            cache.drop_file(options.drop)
        team.barrier()
        begin = time.perf_counter()
        for batch in reading:
            if options.compute:
                time.sleep(options.compute * len(batch.ids))
        return max(team.gather(time.perf_counter() - begin))

    def side(inflight: int | str, epochs: int) -> dict[str, Any]:
        with loader(options.path, inflight) as reading:
            seconds = [epoch(reading) for _ in range(epochs)]
            depths = team.gather(reading.stats().get("depth", 0))
        return {"seconds": seconds, "depth": depths}

    with loader(options.warmup, "auto") as small:
        for batch in small:
            del batch
    side("auto", 1)  # builds the index, if there is none
    tried: dict[int, float] = {}
    for depth in COARSE:
        tried[depth] = side(depth, 1)["seconds"][0]
    best = min(tried, key=tried.__getitem__)
    for depth in {max(1, best // 2), min(MOST, best * 2)} - set(tried):
        tried[depth] = side(depth, 1)["seconds"][0]
    best = min(tried, key=tried.__getitem__)
    runs: dict[str, list[Any]] = {"hand": [], "auto": []}
    for _ in range(options.rounds):
        runs["hand"].append(side(best, EPOCHS))
        runs["auto"].append(side("auto", EPOCHS))
    found = {"hand": best, "search": tried, "runs": runs}
    team.report(found, {"side": "design", "version": pario.__version__})


if __name__ == "__main__":
    run(main)
