"""What a control plane costs who need not wait for it, and how well it holds the drop-in (docs/sharing-a-store.md).

    python -m benchmarks.idle_plane --data DIR [--rounds 9]

Warm: the file is in the page cache. A Loader (as it is, and with tiers=()) and `pario.lmdb` read it under a plane that
limits nothing, and without one, in turns in one process: rates with ÷ without. Limited: the file is dropped from the
page cache, and 1, 2 or 4 processes of `pario.lmdb` read it under a rule: bytes per second ÷ the rule's.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import pario
import pario.lmdb
from benchmarks import cache, data
from benchmarks.control_plane import plane
from benchmarks.measure import interleave, parser_of, told

RULE = 20e6


@contextmanager
def inside(rules: str) -> Iterator[None]:
    """Processes that open a dataset inside belong to a plane."""
    with tempfile.TemporaryDirectory() as folder, plane(Path(folder), rules) as (address, _):
        os.environ |= {"PARIO_CONTROL": str(address), "PARIO_CONTROL_TOKEN": f"{folder}/token"}
        try:
            yield
        finally:
            del os.environ["PARIO_CONTROL"]


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
    with inside("[store]\nbytes_per_s = 1e12\n"):
        under = sides(path, keys)
        for name in under:
            both = {"with": partial(seconds, under[name]), "without": partial(seconds, without[name])}
            interleave(both, 2)  # an index, kernels, the fill
            found = interleave(both, rounds)
            pairs = [a / b for a, b in zip(found["without"], found["with"], strict=True)]
            print(f"warm, {name}: {told(pairs, '.3f')}", flush=True)


def seconds(call: Callable[[], int]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


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
    with inside(f"lease_s = 2.0\n[store]\nbytes_per_s = {RULE}\n"):
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
            print(f"limited, {workers} processes: {told(ratios, '.3f')}", flush=True)


def main() -> None:
    options = parser_of("idle_plane", __doc__, 9).parse_args()
    rounds, records = (1, 4000) if options.smoke else (options.rounds, 60_000)
    held = data.make(options.data, "3k", records)
    with pario.Reader(held.path, comm="self") as reader:
        keys = reader.keys(np.random.default_rng(0).permutation(len(reader)))
    limited(held, keys, max(1, rounds // 3))
    warm(held.path, keys, rounds)


if __name__ == "__main__":
    main()
