"""What a control plane costs who need not wait for it, and how well it holds the drop-in (docs/sharing-a-store.md).

    python -m benchmarks.idle_plane --data DIR [--rounds 9]

Warm: the file is in the page cache. A Loader (as it is, and with tiers=()) and `pario.lmdb` read it under a plane that
limits nothing, and without one, in turns in one process: rates with ÷ without. Limited: the file is dropped from the
page cache, and 1, 2 or 4 processes of `pario.lmdb` read it under a rule: bytes per second ÷ the rule's.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import pario
import pario.lmdb
from benchmarks import cache, data
from pario.plane.joining import user_name
from pario.plane.plane import Plane
from pario.plane.rules import Rules
from pario.plane.words import PlaneAddress

RULE = 20e6
SECRET = bytes(range(32))


@contextmanager
def plane(rules: Rules) -> Iterator[None]:
    """Processes that open a dataset inside belong to it."""
    with tempfile.TemporaryDirectory() as folder:
        token = Path(folder, "token")
        token.touch(0o600)
        token.write_bytes(SECRET)
        made = Plane(PlaneAddress("127.0.0.1", 0), rules)
        thread = threading.Thread(target=made.run, daemon=True)
        thread.start()
        os.environ |= {"PARIO_CONTROL": str(made.address), "PARIO_CONTROL_TOKEN": str(token)}
        try:
            yield
        finally:
            del os.environ["PARIO_CONTROL"]
            made.stop()
            thread.join(5)


def say(case: str, ratios: list[float]) -> None:
    print(f"{case}: {statistics.median(ratios):.3f} ({min(ratios):.3f} ... {max(ratios):.3f})", flush=True)


def epoch_of(loader: pario.Loader) -> Callable[[], int]:
    def epoch() -> int:
        return sum(len(batch.ids) for batch in loader)

    return epoch


def gets_of(env: Any, keys: list[bytes]) -> Callable[[], int]:
    def gets() -> int:
        with env.begin() as txn:
            return sum(txn.get(key) is not None for key in keys)

    return gets


def sides(path: str, keys: list[bytes]) -> dict[str, Callable[[], int]]:
    options = pario.Options(tiers=())
    return {
        "Loader": epoch_of(pario.Loader(path, 256, shuffle="global", comm="self")),
        "Loader, tiers=()": epoch_of(pario.Loader(path, 256, shuffle="global", comm="self", options=options)),
        "pario.lmdb": gets_of(pario.lmdb.open(path, readonly=True, lock=False), keys),
    }


def warm(path: str, keys: list[bytes], rounds: int) -> None:
    without = sides(path, keys)
    rules = Rules((1e12, None), secrets={user_name(): SECRET})
    with plane(rules):
        under = sides(path, keys)
        for name in under:
            ratios = []
            for turn in range(rounds + 2):
                took = {}
                for side in (without, under) if turn % 2 else (under, without):
                    begun = time.perf_counter()
                    side[name]()
                    took[side is under] = time.perf_counter() - begun
                ratios.append(took[False] / took[True])
            ratios = ratios[2:]  # an index, kernels, the fill
            say(f"warm, {name}", ratios)


def _reads(path: str, keys: list[bytes], ready: Any, go: Any, done: Any) -> None:
    env = pario.lmdb.open(path, readonly=True, lock=False)
    agent = env._file.limits
    end = time.monotonic() + 60
    while agent.bucket.rates[0] is None:
        assert time.monotonic() < end, "the plane does not answer"
        agent.take(0, 1)
        time.sleep(0.05)
    ready.release()
    go.wait()
    before = agent.bucket.used[0]
    gets_of(env, keys)()
    done.put(agent.bucket.used[0] - before)


def limited(held: data.DataSet, keys: list[bytes], rounds: int) -> None:
    context = multiprocessing.get_context("fork")
    with plane(Rules((RULE, None), lease_s=2.0, secrets={user_name(): SECRET})):
        for workers in (1, 2, 4):
            ratios = []
            for _ in range(rounds):
                ready, go, done = context.Semaphore(0), context.Event(), context.Queue()
                given = [(held.path, keys[k::workers], ready, go, done) for k in range(workers)]
                running = [context.Process(target=_reads, args=each, daemon=True) for each in given]
                for each in running:
                    each.start()
                for _each in running:
                    assert ready.acquire(timeout=90), "a process does not begin"
                time.sleep(2.0)  # shares follow what is asked for
                cache.drop_file(held.file)
                begun = time.perf_counter()
                go.set()
                used = sum(done.get(timeout=300) for _ in running)
                ratios.append(used / (time.perf_counter() - begun) / RULE)
                for each in running:
                    each.join()
            say(f"limited, {workers} processes", ratios)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.idle_plane", description=__doc__.split("\n")[0])
    parser.add_argument("--data", required=True, help="folder of `python -m benchmarks.data`; made there if missing")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    held = data.make(options.data, "3k", 60_000)
    with pario.Reader(held.path, comm="self") as reader:
        keys = reader.keys(np.random.default_rng(0).permutation(len(reader)))
    limited(held, keys, max(1, options.rounds // 3))
    warm(held.path, keys, options.rounds)


if __name__ == "__main__":
    main()
