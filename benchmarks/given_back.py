"""What a job gets after its node's memory was given back, or after the service that kept it has gone.

    python -m benchmarks.given_back [--rounds 5] [--out results.json]

A store of 20 ms per read and 100 MB/s, without a page cache; 600 records of 197 KB in "global" order. In each round, in
turns: a Loader without tiers; one whose memory tier is filled in its first epoch, then gives all but four chunks back,
and in the third epoch may take the memory again; one that reads through a service, which is interrupted after the
first epoch. Rates of the second epoch are told ÷ the same epoch without tiers, and the store's bytes of the third and
fourth epoch ÷ the file's: what is kept again is not read again.

Exit status 1 if a geometric mean, or a whole 95 % interval, is below 0.9, or the last epoch reads from the store. Needs
root, fuse3 and mfusepy.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.in_memory import make
from benchmarks.measure import interval, parser_of, save_facts
from benchmarks.stores.latency import LatencyStore, latency_store

SIZE, RECORDS, BATCH, EPOCHS = 201_728, 600, 16, 4
BAR = 0.9


def serve(folder: str) -> subprocess.Popen[str]:
    """A service that has opened its door."""
    command = [sys.executable, "-m", "pario", "tiers", "serve", "--tiers", "memory:1GiB"]
    environment = {**os.environ, "PARIO_SERVICE": folder}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def epochs(
    store: LatencyStore, path: str, after: Mapping[int, Callable[[Any], object]], **more: Any
) -> list[dict[str, float]]:
    """Seconds, and the store's bytes, of each epoch. after : epoch -> what happens to the Loader then"""
    import pario

    found = []
    decoder = pario.decode.Raw("u1", (SIZE,))
    with pario.Loader(path, BATCH, decoder, shuffle="global", options=pario.Options(**more)) as loader:
        for epoch in range(EPOCHS):
            store.reset()
            begin = time.perf_counter()
            assert sum(len(batch.ids) for batch in loader) == RECORDS
            found.append({"seconds": time.perf_counter() - begin, "bytes": store.total("bytes")})
            if epoch in after:
                after[epoch](loader)
    return found


def give_back(loader: Any) -> None:
    """As under a pressure that lasts (tiers/pressure.py)."""
    memory = loader._life.reader.stage.memory
    memory.wanted = 4 * memory.grid.chunk_bytes
    memory.shrink(memory.held_bytes - memory.wanted)


def take_again(loader: Any) -> None:
    loader._life.reader.stage.memory.wanted = 1 << 30


def one_round(store: LatencyStore, path: str) -> dict[str, list[dict[str, float]]]:
    found = {
        "without tiers": epochs(store, path, {}, tiers=()),
        "memory given back": epochs(store, path, {0: give_back, 1: take_again}),
    }
    with tempfile.TemporaryDirectory() as folder:
        service = serve(folder)
        os.environ["PARIO_SERVICE"] = folder

        def interrupt(loader: Any) -> None:
            service.send_signal(signal.SIGINT)
            service.wait(30)

        try:
            found["service interrupted"] = epochs(store, path, {0: interrupt})
        finally:
            del os.environ["PARIO_SERVICE"]
            service.kill()
            service.wait()
    return found


def main() -> int:
    options = parser_of("given_back", __doc__ or "", 5, data=False).parse_args()
    wrong = False
    with tempfile.TemporaryDirectory() as folder:
        file = make(Path(folder), SIZE, RECORDS)
        with latency_store(folder, bytes_per_s=100_000_000) as store:
            path = str(Path(store.folder) / file.name)
            epochs(store, path, {})  # kernels
            rounds = [one_round(store, path) for _ in range(1 if options.smoke else options.rounds)]
    for name in ("memory given back", "service interrupted"):
        seconds = [[each[side][1]["seconds"] for each in rounds] for side in ("without tiers", name)]
        ratio = interval(np.divide([seconds[0]], [seconds[1]]))
        again = [max(each[name][epoch]["bytes"] for each in rounds) / (SIZE * RECORDS) for epoch in (2, 3)]
        wrong |= ratio[0] < BAR or ratio[2] < BAR or again[1] > 0.02
        print(
            f"{name}: {ratio[0]:.2f} ({ratio[1]:.2f} … {ratio[2]:.2f}) of a Loader without tiers; the third epoch "
            f"reads {again[0]:.2f} of the data from the store at most, the fourth {again[1]:.2f}"
        )
    save_facts(options.out or "given_back.json", rounds=rounds)
    return int(wrong and not options.smoke)


if __name__ == "__main__":
    sys.exit(main())
