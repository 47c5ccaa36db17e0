"""pario's Checkpointer beside torch.distributed.checkpoint (DCP) and Orbax, all of them in the background.

    python -m benchmarks.checkpoint_beside FOLDER [--rounds 5] [--ranks 1 2 4] [--stores disk slow] [--json F]
                                           [--into measurements/checkpoints.md]
    python -m benchmarks.checkpoint_beside --from F [F ...] --into PAGE       measures nothing

Every rank holds its rows of all arrays: few large ones (160 MiB together) or many small ones (640 of 64 KiB on
average). In each round the sides take turns, another one first each time; a round before them warms up. The arrays are
the framework's own: NumPy for pario, tensors (DTensors on several ranks), jax.Array on the CPU.

    stall      seconds that the call takes which saves (the longest of all ranks). JAX's arrays never change, so Orbax
               copies none; the others copy all
    durable    seconds from that call until the checkpoint is complete and synced, on all ranks
    restore    seconds until all ranks have their rows again; no file is in the page cache, the process is warm
    other      the same on another number of ranks, in a job of its own: 1 -> 2, 2 -> 4, 4 -> 2
    memory     most memory of a rank in its first save and restore, less what it had before / bytes of its rows

Sides: "DCP" is called as its documentation shows; "DCP keeps" has a stager that keeps its memory; "DCP alone" is with
no_dist: each rank writes a folder of its own, which only that rank can read. On the store of 20 MB/s (FUSE; 1 ms per
operation; an eighth of the bytes) "pario, fast tier" has its checkpoint durable when the node's disk has it. "The best"
is the other side with the least median; DCP where none is named.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import pario
from benchmarks.checkpoint import few_large, many_small
from benchmarks.marked import fill_marked
from benchmarks.measure import launch, machine, ratios, save_facts
from benchmarks.stores.latency import latency_store
from benchmarks.worker import Team

Tree = dict[str, Any]
Arrays = dict[str, np.ndarray]

RATE = 20e6
TREES: dict[str, tuple[Callable[[int], Arrays], int]] = {"few large": (few_large, 160), "many small": (many_small, 40)}
OTHER = {1: 2, 2: 4, 4: 2}
BARS = {"stall": 0.5, "durable": 0.7, "restore": 1.0}
FAST, KEEPS, ALONE = "pario, fast tier", "DCP keeps", "DCP alone"


# -- a rank of a job ---------------------------------------------------------------------------------------------------


class Job(Team):
    """The ranks."""

    def most(self, value: float) -> float:
        return float(max(self.gather(value)))

    def port(self) -> int:
        """A free one, the same on all ranks."""
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            return int(self.gather(one.getsockname()[1])[0])

    def mine(self, array: np.ndarray) -> slice:
        """This rank's rows: equal parts."""
        part = len(array) // self.size
        return slice(part * self.rank, part * (self.rank + 1))


class Pario:
    def __init__(self, job: Job, folder: Path, fast: Path | None = None) -> None:
        self._job = job
        self._saver = pario.Checkpointer(job.comm or "self", slow=folder / "pario", fast=fast, keep=None)
        self._tier = "slow" if fast is None else "fast"

    def tree(self, arrays: Arrays) -> Tree:
        rows = {name: self._job.mine(array) for name, array in arrays.items()}
        return {
            name: pario.Shard(array[rows[name]], array.shape, (rows[name].start,)) for name, array in arrays.items()
        }

    def save(self, step: int, tree: Tree) -> Callable[[], Any]:
        self._handle = self._saver.save(step, tree)
        return partial(self._handle.wait, self._tier)

    def settle(self) -> None:
        """What goes on when a checkpoint is durable ends."""
        self._handle.wait()

    def load(self, step: int, tree: Tree) -> Arrays:
        return self._saver.restore(step, like=tree)  # type: ignore[no-any-return]


class Dcp:
    def __init__(self, job: Job, folder: Path, alone: bool = False, keeps: bool = False) -> None:
        import torch
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        torch.set_num_threads(1)
        self._torch, self._dcp, self._job, self._alone = torch, dcp, job, alone
        self._folder = folder / (f"alone-{job.rank}" if alone else "dcp-keeps" if keeps else "dcp")
        if not dist.is_initialized():
            where = f"tcp://127.0.0.1:{job.port()}"
            dist.init_process_group("gloo", init_method=where, rank=job.rank, world_size=job.size)
        self._mesh = dist.init_device_mesh("cpu", (job.size,))
        self._stager = DefaultStager(StagingOptions(False, False, False, False)) if keeps else None

    def tree(self, arrays: Arrays) -> Tree:
        from torch.distributed.tensor import DTensor, Shard

        parts = {name: self._torch.from_numpy(array[self._job.mine(array)]) for name, array in arrays.items()}
        if self._job.size == 1:
            return parts
        return {name: DTensor.from_local(part, self._mesh, [Shard(0)]) for name, part in parts.items()}

    def save(self, step: int, tree: Tree) -> Callable[[], Any]:
        where = str(self._folder / f"step-{step}")
        saved = self._dcp.async_save(tree, checkpoint_id=where, no_dist=self._alone, async_stager=self._stager)
        return saved.result  # type: ignore[no-any-return]

    def settle(self) -> None: ...

    def load(self, step: int, tree: Tree) -> Arrays:
        empty = {name: self._torch.empty_like(value) for name, value in tree.items()}
        self._dcp.load(empty, checkpoint_id=str(self._folder / f"step-{step}"), no_dist=self._alone)
        return {name: (each.to_local() if hasattr(each, "to_local") else each).numpy() for name, each in empty.items()}


class Orbax:
    def __init__(self, job: Job, folder: Path) -> None:
        import jax

        if job.size > 1:
            where = f"127.0.0.1:{job.port()}"
            jax.distributed.initialize(where, num_processes=job.size, process_id=job.rank)
        import orbax.checkpoint as orbax

        jax.config.update("jax_enable_x64", True)
        self._jax, self._job, self._folder = jax, job, (folder / "orbax").absolute()
        self._saver = orbax.StandardCheckpointer()
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("ranks",))
        self._rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("ranks"))

    def tree(self, arrays: Arrays) -> Tree:
        make = self._jax.make_array_from_process_local_data
        made = {name: make(self._rows, array[self._job.mine(array)], array.shape) for name, array in arrays.items()}
        return self._jax.block_until_ready(made)  # type: ignore[no-any-return]

    def save(self, step: int, tree: Tree) -> Callable[[], Any]:
        self._saver.save(self._folder / f"step-{step}", tree)
        return self._saver.wait_until_finished  # type: ignore[no-any-return]

    def settle(self) -> None: ...

    def load(self, step: int, tree: Tree) -> Arrays:
        abstract = {
            name: self._jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=self._rows) for name, each in tree.items()
        }
        got = self._saver.restore(self._folder / f"step-{step}", abstract)
        return {name: np.asarray(array.addressable_shards[0].data) for name, array in got.items()}


def sides_of(job: Job, folder: Path, fast: Path | None, all_of_them: bool) -> dict[str, Any]:
    """all_of_them : also those that other ranks cannot restore, or that restore like another one"""
    found: dict[str, Any] = {"pario": Pario(job, folder)}
    if fast is not None and all_of_them:
        found[FAST] = Pario(job, folder / "drained", fast)
    found["DCP"] = Dcp(job, folder)
    if all_of_them:
        found |= {KEEPS: Dcp(job, folder, keeps=True), ALONE: Dcp(job, folder, alone=True)}
    return found | {"Orbax": Orbax(job, folder)}


def drop(folder: Path) -> None:
    """Its files out of the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def memory(word: str) -> int:
    """Bytes: VmRSS is what this process has, VmHWM the most that it had."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(word))
    return int(line.split()[1]) << 10


class Most:
    """Seconds, and the most memory besides what there was."""

    def __init__(self, job: Job) -> None:
        self._job = job
        Path("/proc/self/clear_refs").write_text("5")
        self._before = memory("VmRSS")
        job.barrier()
        self._began = time.perf_counter()

    def seconds(self) -> float:
        return time.perf_counter() - self._began

    def memory(self) -> float:
        return self._job.most(memory("VmHWM") - self._before)


def restored(job: Job, side: Any, step: int, tree: Tree, arrays: Arrays, folders: list[Path]) -> tuple[float, float]:
    """(seconds, bytes of memory); every byte is compared."""
    if job.rank == 0:
        for folder in folders:
            drop(folder)
    clock = Most(job)
    got = side.load(step, tree)
    job.barrier()
    took = clock.seconds(), clock.memory()
    for name, array in arrays.items():
        assert np.array_equal(got[name], array[job.mine(array)]), (side, name)
    return took


def rank_of_the_job(what: str, kind: str, mib: int, rounds: int, folder: Path, fast: Path | None) -> None:
    job = Job()
    arrays = {name: array[: len(array) // 4 * 4] for name, array in TREES[kind][0](mib << 20).items()}
    sides = sides_of(job, folder, fast, what == "saving")
    trees = {name: side.tree(arrays) for name, side in sides.items()}
    folders = [each for each in (folder, fast) if each is not None]
    own = sum(array.nbytes for array in arrays.values()) / job.size
    found: list[dict[str, dict[str, float]]] = [{name: {} for name in sides} for _ in range(rounds + 1)]
    order = [*sides, *sides]
    turns = [(number, order[number % len(sides) :][: len(sides)]) for number in range(rounds + 1)]
    for number, names in turns if what == "saving" else []:  # the first one warms up, and has the memory of all
        for name in names:
            clock = Most(job)
            wait = sides[name].save(number, trees[name])
            found[number][name]["stall"] = job.most(clock.seconds())
            wait()
            job.barrier()
            found[number][name] |= {"durable": clock.seconds(), "saved": clock.memory() / own}
            sides[name].settle()
            if job.rank == 0 and number < rounds:
                _forget(folders, name, number)
            job.barrier()
    for number, names in turns:
        for name in names:
            took, most = restored(job, sides[name], rounds, trees[name], arrays, folders)
            found[number][name] |= {"restore": took, "restored": most / own}
    if job.rank == 0:
        print(json.dumps({"rounds": found}), flush=True)
    job.barrier()
    sys.stdout.flush()
    os._exit(0)  # frameworks may wait for each other at the end


def _forget(folders: list[Path], side: str, step: int) -> None:
    """Delete a side's checkpoint, and let the device end what it does for that."""
    known = {FAST: "drained", KEEPS: "dcp-keeps", ALONE: "alone-*"}
    name = known.get(side, side.lower())
    for folder in folders:
        for pattern in (f"{name}/step-{step}", f"{name}/**/step-{step:012d}*", f"run-*/step-{step:012d}*"):
            for path in folder.glob(pattern):
                shutil.rmtree(path, ignore_errors=True)
    os.sync()


# -- all of them -------------------------------------------------------------------------------------------------------


@contextmanager
def on_store(kind: str, folder: Path) -> Iterator[tuple[Path, Path | None]]:
    """(where checkpoints go, the fast tier)"""
    where = folder / "checkpoints"
    shutil.rmtree(folder, ignore_errors=True)
    where.mkdir(parents=True)
    try:
        if kind == "disk":
            yield where, None
            return
        with latency_store(where, read_s=0.001, metadata_s=0.001, bytes_per_s=RATE, writable=True) as store:
            store.change(written_per_s=RATE)
            yield Path(store.folder), folder / "fast"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measured(folder: Path, rounds: int, ranks: list[int], stores: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for store in stores:
        for kind, (_, mib) in TREES.items():
            for size in ranks:
                case = f"{store}, {kind}, {size} → {OTHER[size]}"
                with on_store(store, folder / "beside") as (where, fast):
                    words = [kind, str(mib if store == "disk" else mib // 8), str(rounds), str(where), str(fast or "")]
                    module = "benchmarks.checkpoint_beside"
                    jobs = {"saving": size, "other": OTHER[size]}
                    found[case] = {
                        what: launch(module, ["--job", what, *words], ranks=count, timeout_s=400)["rounds"]
                        for what, count in jobs.items()
                    }
                for line in told({case: found[case]}):
                    print(line, flush=True)
    return found


def told(found: dict[str, Any]) -> list[str]:
    """Lines of the table."""
    asked = [("saving", "stall", other) for other in ("DCP", KEEPS, ALONE, "Orbax")]
    asked += [("saving", "durable", ""), ("saving", "restore", ""), ("other", "restore", "")]
    lines = []
    for case, jobs in found.items():
        cells = [case]
        for job, what, against in asked:
            rounds = jobs[job][1:]
            seconds = {side: [one[side][what] for one in rounds] for side in rounds[0]}
            rivals = [side for side in seconds if not side.startswith("pario")]
            best = against or min(rivals, key=lambda side: statistics.median(seconds[side]))
            ratio = ratios(seconds["pario"], seconds[best])
            figure = f"{ratio['median']:.2f} ({ratio['min']:.2f} … {ratio['max']:.2f})"
            cells.append(figure if round(ratio["median"], 2) <= BARS[what] else f"**{figure}**")
            if best != "DCP" and not against:
                cells[-1] += f" {best}"
            if what == "durable" and FAST in seconds:
                cells[-1] += f"; fast tier {ratios(seconds[FAST], seconds[best])['median']:.2f}"
        pario = {what: statistics.median(one["pario"][what] for one in jobs["saving"][1:]) for what in BARS}
        cells.append(" / ".join(f"{1e3 * each:.0f}" for each in pario.values()))
        for what in ("saved", "restored"):
            first = jobs["saving"][0]
            cells.append(" / ".join(f"{first[side][what]:.1f}" for side in ("pario", "DCP", "Orbax")))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def table(documents: list[dict[str, Any]]) -> str:
    """In Markdown."""
    heads = ["store, arrays, ranks → others", "stall ÷ DCP", f"÷ {KEEPS}", f"÷ {ALONE}", "÷ Orbax"]
    heads += [f"{what} ÷ the best" for what in ("durable", "restore", "on other ranks")]
    heads += ["pario: stall / durable / restore, ms", "memory of a save: pario / DCP / Orbax", "of a restore"]
    found = {case: jobs for one in documents for case, jobs in one["found"].items()}
    facts = documents[0]["machine"]
    rounds, bars = {one["rounds"] for one in documents}, (f"{what} {bar:g}" for what, bar in BARS.items())
    where = f"{facts['date']}, {facts['cpus']} cores; {' and '.join(map(str, sorted(rounds)))} rounds in turns, median "
    where += f"(min … max); bold: above its bar ({', '.join(bars)})."
    return "\n".join([f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *told(found), "", where])


def main() -> None:
    if sys.argv[1:2] == ["--job"]:
        what, kind, mib, rounds, folder, fast = sys.argv[2:]
        rank_of_the_job(what, kind, int(mib), int(rounds), Path(folder), Path(fast) if fast else None)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", choices=list(OTHER), default=list(OTHER))
    parser.add_argument("--stores", nargs="+", choices=["disk", "slow"], default=["disk", "slow"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--from", dest="earlier", type=Path, nargs="+", help="what --json has written")
    parser.add_argument("--into", type=Path, help="a page with the marks <!-- beside --> and <!-- end -->")
    args = parser.parse_args()
    if args.earlier:
        documents = [json.loads(path.read_text()) for path in args.earlier]
    elif args.folder is None:
        parser.error("FOLDER is missing")
    else:
        found = measured(args.folder, args.rounds, args.ranks, args.stores)
        documents = [{"machine": machine(), "rounds": args.rounds, "found": found}]
        if args.json:
            save_facts(args.json, rounds=args.rounds, found=found)
    if args.into:
        args.into.write_text(fill_marked(args.into.read_text(), "beside", {"": table(documents)}))


if __name__ == "__main__":
    main()
