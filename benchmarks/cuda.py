"""Batches on an accelerator: pinned memory, copies beside the step, DLPack, two ranks with nccl.

    python -m benchmarks.cuda [--records 4000] [--rounds 5] [--device cuda] [--out cuda.json]

One command where torch finds a CUDA device: it makes records of 150,528 bytes in a temporary folder, checks what
`Loader(device="cuda")` promises (a failed check is exit status 1), and prints the time of an epoch in which the step

* works on one batch that stays on the device: no loader, the floor;
* gets its batches from `Loader(device="cuda")`, which copies ahead out of pinned memory;
* gets them from `Loader()` and copies each by `.to(device)`, as a plain loop does.

The second should be near the greater of the step and the copies, the third near their sum. On a machine without a
device it says so and ends with 0. `--device cpu` runs the same code with nothing to copy.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

import lmdb
import numpy as np

import pario
from benchmarks.measure import interleave, launch, save_facts

SHAPE, BATCH = (3, 224, 224), 64
#: of a step's matrices
SIDE = {"cuda": 2048, "cpu": 64}
#: what the profiler of torch calls a copy out of pinned memory
PINNED = "Memcpy HtoD (Pinned -> Device)"


def devices() -> int:
    """How many CUDA devices torch finds; 0 also without torch."""
    if importlib.util.find_spec("torch") is None:
        return 0
    import torch

    return torch.cuda.device_count()


def make(folder: str, records: int) -> str:
    path = os.path.join(folder, "pictures.lmdb")
    rows = np.random.default_rng(0).integers(0, 256, (64, *SHAPE), np.uint8)
    with lmdb.open(path, map_size=1 << 36, sync=False) as env, env.begin(write=True) as txn:
        for i in range(records):
            txn.put(b"%08d" % i, i.to_bytes(8, "little") + rows[i % 64].tobytes())
    return path


def decoder() -> Any:
    return pario.decode.Struct({"number": "i8", "x": ("u1", SHAPE)})


class Work:
    """A rank's loaders and its step."""

    def __init__(self, path: str, device: str) -> None:
        import torch

        from pario.adapters.torch import Loader, use_mpi_ranks

        self.torch = torch
        self.rank, self.ranks = use_mpi_ranks()
        self.cuda = device == "cuda"
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if self.cuda else torch.device("cpu")
        if self.cuda:
            torch.cuda.set_device(self.device)
        self.ahead = Loader(path, BATCH, decoder(), shuffle="global", device=self.device)
        self.plain = Loader(path, BATCH, decoder(), shuffle="global")
        self.matrix = torch.ones(SIDE[device], SIDE[device], device=self.device)
        self.products = 1
        self.resident = {name: tensor.to(self.device) for name, tensor in self.plain.peek().items()}

    def close(self) -> None:
        self.ahead.close()
        self.plain.close()

    def wait(self) -> None:
        if self.cuda:
            self.torch.cuda.synchronize(self.device)

    def step(self, batch: dict[str, Any]) -> None:
        self.matrix[0, 0] = batch["x"].float().mean() / 255  # the step needs its batch
        for _ in range(self.products):
            self.product = self.matrix @ self.matrix

    def seconds(self, batches: Iterable[dict[str, Any]]) -> float:
        self.wait()
        begin = time.perf_counter()
        for batch in batches:
            self.step(batch)
        self.wait()
        return time.perf_counter() - begin

    def by_hand(self) -> Iterable[dict[str, Any]]:
        return ({name: tensor.to(self.device) for name, tensor in batch.items()} for batch in self.plain)

    def balance(self) -> None:
        """Let the step take about as long as the copy of a batch."""
        batch = self.plain.peek()
        self.step(self.resident)
        one = min(self.seconds([self.resident]) for _ in range(3))
        begin = time.perf_counter()
        for _ in range(5):
            batch["x"].to(self.device)
        self.wait()
        self.products = max(1, round((time.perf_counter() - begin) / 5 / one))

    def check(self) -> dict[str, bool]:
        """{what: whether it holds}"""
        torch = self.torch
        mine = torch.cat([batch["number"] for batch in self.ahead])
        total = torch.tensor([len(mine), int(mine.sum())], device=self.device)
        if self.ranks > 1:
            torch.distributed.init_process_group("nccl" if self.cuda else "gloo")
            torch.distributed.all_reduce(total)
            torch.distributed.destroy_process_group()
        n = self.ahead.records
        batch = self.ahead.peek()
        holds = {
            "every record comes once": total.tolist() == [n, n * (n - 1) // 2],
            "batches are on the device": batch["x"].device == mine.device == self.device,
            "DLPack shares their memory": torch.from_dlpack(batch["x"]).data_ptr() == batch["x"].data_ptr(),
        }
        if self.cuda:
            arrays = pario.Loader.peek(self.ahead)
            holds["batches are decoded into pinned memory"] = torch.from_numpy(arrays["x"]).is_pinned()
            holds["copies come from pinned memory"] = self.copies() == {PINNED}
        return holds

    def copies(self) -> set[str]:
        """The kinds of copies to the device in an epoch, by the profiler."""
        with self.torch.profiler.profile() as found:
            for _ in self.ahead:
                pass
            self.wait()
        return {event.key for event in found.key_averages() if "HtoD" in event.key}


def work(path: str, device: str, rounds: int) -> None:
    """A rank: its checks and its times, as a line of JSON on rank 0."""
    rank = Work(path, device)
    holds = rank.check()
    rank.balance()
    sides: dict[str, Callable[[], float]] = {
        "step alone": lambda: rank.seconds([rank.resident] * len(rank.plain)),
        "Loader(device=)": lambda: rank.seconds(rank.ahead),
        "Loader() and .to(device)": lambda: rank.seconds(rank.by_hand()),
    }
    for side in sides.values():
        side()  # the file comes into memory
    found = interleave(sides, rounds)
    rank.close()
    if rank.rank == 0:
        print(json.dumps({"holds": holds, "seconds": found, "batches": len(rank.plain)}), flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuda", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--records", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", help="a file for the runs, as JSON")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.work:
        work(given.work, given.device, given.rounds)
        return 0
    if given.device == "cuda" and not devices():
        print("no torch, or no CUDA device that it finds: nothing is measured")
        return 0
    two = given.device == "cpu" or devices() >= 2
    runs: dict[int, Any] = {}
    with tempfile.TemporaryDirectory(prefix="pario-cuda-") as folder:
        words = ["--work", make(folder, given.records), "--device", given.device, "--rounds", str(given.rounds)]
        for ranks in (1, 2) if two else (1,):
            runs[ranks] = launch("benchmarks.cuda", words, ranks=ranks)
            for what, holds in runs[ranks]["holds"].items():
                print(f"{ranks} rank(s): {'yes' if holds else 'NO'}  {what}")
            for name, seconds in runs[ranks]["seconds"].items():
                per_batch = 1e3 / runs[ranks]["batches"]
                low, middle, high = (f"{of(seconds) * per_batch:.2f}" for of in (min, median, max))
                print(f"{ranks} rank(s): {middle} ({low} … {high}) ms per batch of {BATCH}  {name}")
    if not two:
        print("one device: two ranks with nccl are not tried")
    if given.out:
        save_facts(given.out, device=given.device, runs=runs)
    return 0 if all(all(run["holds"].values()) for run in runs.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
