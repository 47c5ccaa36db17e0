"""One job of benchmarks/checkpoint.py.

    [mpiexec -n RANKS] python -m benchmarks.worker_checkpoint WHAT FOLDER MIB ROUNDS

    few large, many small    pario, torch.distributed.checkpoint and Orbax save and restore the same arrays, in turns
    restart    a Checkpointer is opened and restores what FOLDER/fast and FOLDER/store hold; DCP loads FOLDER/store/dcp
    nodes      restores FOLDER on all ranks

Rank 0 prints one line of JSON: a list of rounds. A figure is the time between two barriers of all ranks, in seconds;
all files are dropped from the page cache before they are read.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import pario
from benchmarks.checkpoint import few_large, many_small

Tree = dict[str, Any]


class Job:
    """The ranks."""

    def __init__(self) -> None:
        self.comm: Any = None
        if "PMI_RANK" in os.environ:
            from mpi4py import MPI

            self.comm = MPI.COMM_WORLD
        self.rank = self.comm.rank if self.comm else 0
        self.size = self.comm.size if self.comm else 1

    def barrier(self) -> None:
        if self.comm:
            self.comm.Barrier()

    def seconds(self, call: Callable[[], Any]) -> float:
        self.barrier()
        begin = time.perf_counter()
        call()
        self.barrier()
        return time.perf_counter() - begin

    def bcast(self, value: Any) -> Any:
        return self.comm.bcast(value) if self.comm else value


def drop(folder: Path) -> None:
    """Its files out of the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def rows_of(array: np.ndarray, job: Job) -> tuple[int, int]:
    """The part of this rank: equal parts."""
    part = len(array) // job.size
    return part * job.rank, part * (job.rank + 1)


class Pario:
    def __init__(self, job: Job, folder: Path) -> None:
        self._job, self._folder = job, folder
        self._saver = pario.Checkpointer(job.comm or "self", slow=folder, keep=1)

    def shards(self, arrays: dict[str, np.ndarray]) -> Tree:
        job = self._job
        return {
            name: pario.Shard(array[slice(*rows_of(array, job))], array.shape, (rows_of(array, job)[0],))
            for name, array in arrays.items()
        }

    def save(self, step: int, tree: Tree) -> None:
        self._saver.save(step, tree).wait()

    def load(self, step: int, tree: Tree) -> dict[str, np.ndarray]:
        return self._saver.restore(step, like=tree)  # type: ignore[no-any-return]


class Dcp:
    def __init__(self, job: Job, folder: Path) -> None:
        import torch
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp

        torch.set_num_threads(1)
        self._torch, self._dcp, self._job, self._folder = torch, dcp, job, folder
        if job.size > 1:
            host = f"tcp://127.0.0.1:{job.bcast(_free_port())}"
            dist.init_process_group("gloo", init_method=host, rank=job.rank, world_size=job.size)
            self._mesh = dist.init_device_mesh("cpu", (job.size,))

    def shards(self, arrays: dict[str, np.ndarray]) -> Tree:
        torch, job = self._torch, self._job
        if job.size == 1:
            return {name: torch.from_numpy(array) for name, array in arrays.items()}
        from torch.distributed.tensor import DTensor, Shard

        parts = {name: torch.from_numpy(array[slice(*rows_of(array, job))]) for name, array in arrays.items()}
        return {name: DTensor.from_local(part, self._mesh, [Shard(0)]) for name, part in parts.items()}

    def save(self, step: int, tree: Tree) -> None:
        folder = self._folder / f"step-{step}"
        self._dcp.save(tree, checkpoint_id=str(folder), no_dist=self._job.size == 1)

    def load(self, step: int, tree: Tree) -> dict[str, np.ndarray]:
        empty = {name: self._torch.zeros_like(value) for name, value in tree.items()}
        self._dcp.load(empty, checkpoint_id=str(self._folder / f"step-{step}"), no_dist=self._job.size == 1)
        return {name: (each.to_local() if hasattr(each, "to_local") else each).numpy() for name, each in empty.items()}


class Orbax:
    def __init__(self, job: Job, folder: Path) -> None:
        import jax

        if job.size > 1:
            where = f"127.0.0.1:{job.bcast(_free_port())}"
            jax.distributed.initialize(where, num_processes=job.size, process_id=job.rank)
        import orbax.checkpoint as orbax

        jax.config.update("jax_enable_x64", True)
        self._jax, self._job, self._folder = jax, job, folder
        self._saver = orbax.StandardCheckpointer()
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("ranks",))
        self._rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("ranks"))

    def shards(self, arrays: dict[str, np.ndarray]) -> Tree:
        job, make = self._job, self._jax.make_array_from_process_local_data
        if job.size == 1:
            return dict(arrays)
        parts = {name: (array[slice(*rows_of(array, job))], array.shape) for name, array in arrays.items()}
        return {name: make(self._rows, *part) for name, part in parts.items()}

    def save(self, step: int, tree: Tree) -> None:
        self._saver.save(self._folder.absolute() / f"step-{step}", tree)
        self._saver.wait_until_finished()

    def load(self, step: int, tree: Tree) -> dict[str, np.ndarray]:
        got = self._saver.restore(self._folder.absolute() / f"step-{step}", tree)
        if self._job.size == 1:
            return got  # type: ignore[no-any-return]
        return {name: np.asarray(array.addressable_shards[0].data) for name, array in got.items()}


SIDES = {"pario": Pario, "DCP": Dcp, "Orbax": Orbax}


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def beside(job: Job, folder: Path, mib: int, rounds: int, kind: str) -> list[Any]:
    """Rounds of {side: {"write": s, "read": s}}; a side that cannot run here is left out, and "without" says why."""
    arrays = {"few large": few_large, "many small": many_small}[kind](mib << 20)
    if kind == "many small":
        arrays = {name: array[: len(array) // 4 * 4] for name, array in arrays.items()}
    sides, trees, missing = {}, {}, {}
    for name, make in SIDES.items():
        try:
            sides[name] = make(job, folder / name)
            trees[name] = sides[name].shards(arrays)
        except ImportError as e:
            missing[name] = str(e)
    found: list[Any] = []
    for number in range(rounds + 1):  # the first one warms up
        times: dict[str, dict[str, float]] = {}
        for name, side in sides.items():
            write = job.seconds(partial(side.save, number, trees[name]))
            if job.rank == 0:
                drop(folder / name)
            got: dict[str, np.ndarray] = {}
            read = job.seconds(partial(_into, got, side, number, trees[name]))
            for key, array in arrays.items():
                assert np.array_equal(got[key], array[slice(*rows_of(array, job))]), (name, key)
            times[name] = {"write": write, "read": read}
            job.barrier()
            if job.rank == 0 and name != "pario":
                shutil.rmtree(folder / name / f"step-{number}")
        if number:
            found.append(times)
    return [*found, {"without": missing}] if missing else found


def _into(got: dict[str, np.ndarray], side: Any, number: int, tree: Tree) -> None:
    got.update(side.load(number, tree))


def restart(job: Job, folder: Path, mib: int, rounds: int) -> list[Any]:
    """Rounds of {"fast": s, "slow": s, "DCP": s}: from nothing to the arrays. FOLDER/store is the slow store."""
    import torch.distributed.checkpoint as dcp

    arrays, found = few_large(mib << 20), []
    theirs = Dcp(job, folder / "store" / "dcp")
    for number in range(rounds + 1):  # the first one imports
        times = {}
        for name in ("fast", "slow"):
            drop(folder)

            def ours(fast: str | None = str(folder / "fast") if name == "fast" else None) -> Any:
                with pario.Checkpointer("self", slow=folder / "store" / "pario", fast=fast) as ckpt:
                    return ckpt.restore()

            got: list[Any] = []
            times[name] = job.seconds(lambda g=got, call=ours: g.append(call()))
            assert all(np.array_equal(got[0][key], array) for key, array in arrays.items())
        drop(folder)
        tree = theirs.shards({name: np.zeros_like(array) for name, array in arrays.items()})
        at = str(folder / "store" / "dcp" / "step-0")
        times["DCP"] = job.seconds(lambda t=tree, a=at: dcp.load(t, checkpoint_id=a, no_dist=True))
        assert all(np.array_equal(tree[key].numpy(), array) for key, array in arrays.items()), number
        if number:
            found.append(times)
    return found


def nodes(job: Job, folder: Path) -> list[Any]:
    with pario.Checkpointer(job.comm or "self", slow=folder) as ckpt:
        tree = ckpt.restore()
    return [sum(int(array.nbytes) for array in tree.values())]


def main() -> None:
    what, folder, mib, rounds = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    job = Job()
    if what == "restart":
        found = restart(job, folder, mib, rounds)
    elif what == "nodes":
        found = nodes(job, folder)
    else:
        found = beside(job, folder, mib, rounds, what)
    if job.rank == 0:
        print(json.dumps({"rounds": found}), flush=True)
    job.barrier()
    sys.stdout.flush()
    os._exit(0)  # frameworks may wait for each other at the end


if __name__ == "__main__":
    main()
