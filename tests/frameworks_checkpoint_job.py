"""Ranks that save and restore DTensors, for test_frameworks_checkpoint.py.

    mpiexec -n 4 python tests/frameworks_checkpoint_job.py save FOLDER 2 2      FSDP2 over tensor parallel
    mpiexec -n 3 python tests/frameworks_checkpoint_job.py restore FOLDER 1 3
    mpiexec -n 2 python tests/frameworks_checkpoint_job.py refuse FOLDER 2 1
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as Split
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import pario
from pario.adapters.torch import Checkpointer, use_mpi_ranks


def trained(seed: int, mesh: Any) -> dict[str, Any]:
    """A model and its optimizer after a step; odd sizes, so that parts are uneven."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(18, 25), nn.ReLU(), nn.Linear(25, 7))
    if mesh["tp"].size() > 1:
        model = parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        if mesh["dp"].size() > 1:
            for layer in model:
                if isinstance(layer, nn.Linear):
                    fully_shard(layer, mesh=mesh["dp"])
    else:
        fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * seed, foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) * parameter
    optimizer.step()
    more = {
        "columns": distribute_tensor(torch.arange(70.0).reshape(7, 10) * seed, mesh["tp"], [Split(1)]),
        "alike": distribute_tensor(torch.arange(5.0).bfloat16() * seed, mesh["tp"], [Replicate()]),
        "none": distribute_tensor(torch.ones(0, 4), mesh["tp"], [Split(0)]),
        "one": distribute_tensor(torch.tensor(2.5 * seed), mesh["tp"], [Replicate()]),
    }
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "more": more}


def whole(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: whole(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [whole(value) for value in tree]
    return tree.full_tensor().clone() if isinstance(tree, DTensor) else tree


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return bool(a == b)


def kinds(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [kinds(value) for value in tree.values()]
    return [type(tree).__name__, *([tree.placements, tree.device_mesh] if isinstance(tree, DTensor) else [])]


def main(what: str, folder: str, dp: str, tp: str) -> None:
    warnings.simplefilter("ignore")
    rank, _ = use_mpi_ranks(MPI.COMM_WORLD)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (int(dp), int(tp)), mesh_dim_names=("dp", "tp"))
    with Checkpointer(MPI.COMM_WORLD, slow=folder + "/slow", timeout_s=20) as ckpt:
        if what == "save":
            tree = trained(1, mesh)
            ckpt.save(1, tree)
            ckpt.save(2, tree)  # of a structure that is known
            full = whole(tree)
            if rank == 0:
                torch.save(full, folder + "/whole.pt")
        elif what == "restore":
            expected = torch.load(folder + "/whole.pt")
            like = trained(2, mesh)
            assert not same(whole(like), expected)
            got = ckpt.restore(like=like)
            assert kinds(got["model"]) == kinds(like["model"])
            assert kinds(got["more"]) == kinds(like["more"])
            assert same(whole(got), expected)
            assert same(ckpt.restore(), expected)
            ckpt.save(3, got)
        else:
            refused(ckpt, rank, mesh)
    dist.destroy_process_group()


def refused(ckpt: Checkpointer, rank: int, mesh: Any) -> None:
    sums = DTensor.from_local(torch.ones(3), mesh["dp"], [Partial()])
    split = distribute_tensor(torch.ones(8), mesh["dp"], [Split(0)])
    for tensor in (sums, pario.Shard(split, (8,), (0,)), torch.nested.nested_tensor([torch.ones(2)])):
        with pytest.raises(pario.OptionError, match="a/b"):
            ckpt.save(1, {"a": {"b": tensor}})
    ckpt.save(1, {"a": split}).wait()
    with pytest.raises(pario.StateError, match="'a'"):
        ckpt.restore(like={"a": sums})


if __name__ == "__main__":
    main(*sys.argv[1:])
