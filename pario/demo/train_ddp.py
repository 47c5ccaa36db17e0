"""One lesson: PyTorch's DistributedDataParallel over the ranks that pario feeds.

    mpiexec -n 2 python examples/train_ddp.py --data digits/train.lmdb
    sbatch jobscripts/train.slurm

The ranks are those of MPI, and torch.distributed is told the same numbers: no torchrun, no DistributedSampler, no
worker processes. Each rank takes the accelerator with its number on the node, or none.

The data is an LMDB of Caffe Datum messages (python -m pario demo --folder digits makes one). Without torch
(pip install torch) a linear model in NumPy is trained instead, so that job scripts can be tried before it is installed.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

import pario
from pario.demo.train_requeue import Model

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]


class DDP:
    """A small network in torch, its gradients averaged over all ranks by DistributedDataParallel."""

    def __init__(self, comm: Any, args: argparse.Namespace, shape: tuple[int, ...]) -> None:
        from mpi4py import MPI

        from pario.adapters.torch import use_mpi_ranks

        use_mpi_ranks(comm)  # torch.distributed gets MPI's ranks
        node = comm.Split_type(MPI.COMM_TYPE_SHARED)
        on_node = node.rank
        node.Free()
        gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", on_node % torch.cuda.device_count()) if gpu else torch.device("cpu")
        if gpu:
            torch.cuda.set_device(self.device)
        torch.distributed.init_process_group("nccl" if gpu else "gloo")
        torch.manual_seed(args.seed)
        values = int(np.prod(shape))
        network = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(values, 64), torch.nn.ReLU(), torch.nn.Linear(64, args.classes)
        )
        self.network = torch.nn.parallel.DistributedDataParallel(network.to(self.device))
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=args.rate, momentum=0.9)
        self.nominal = args.batch_size

    def step(self, data: np.ndarray, label: np.ndarray) -> float:
        """Sum of the loss of this rank's records. The last step of an epoch may have fewer, or none."""
        x = torch.from_numpy(data).to(self.device, torch.float32)
        x = x / x.amax(dim=(1, 2, 3), keepdim=True).clamp(min=1)  # the brightest pixel of each picture is 1
        y = torch.from_numpy(label).to(self.device)
        loss = torch.nn.functional.cross_entropy(self.network(x), y, reduction="sum")
        self.optimizer.zero_grad()
        # Not divided by the records that this rank happens to have: every record of the epoch weighs the same.
        (loss / self.nominal).backward()
        self.optimizer.step()
        return float(loss.detach())

    def close(self) -> None:
        torch.distributed.destroy_process_group()


class Linear:
    """The same surface without torch: the linear classifier in NumPy of train_requeue.py."""

    def __init__(self, comm: Any, args: argparse.Namespace, shape: tuple[int, ...]) -> None:
        self.comm, self.rate, self.model = comm, args.rate, Model(args.classes)

    def step(self, data: np.ndarray, label: np.ndarray) -> float:
        mine = self.model.gradient(data, label)
        everyones = np.empty_like(mine)
        self.comm.Allreduce(mine, everyones)
        self.model.step(everyones, self.rate)
        return float(mine[1])

    def close(self) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on all ranks of an MPI job, with torch where it is installed.")
    parser.add_argument("--data", required=True, help="an LMDB of Caffe Datum messages of one shape")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="records per rank and step")
    parser.add_argument("--classes", type=int, default=10, help="labels are 0 ... classes - 1")
    parser.add_argument("--rate", type=float, default=0.1, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of the order and of the first weights")
    args = parser.parse_args()

    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    decoder = pario.decode.Datum()
    with pario.Loader(args.data, args.batch_size, decoder, shuffle="global", seed=args.seed, comm=comm) as loader:
        kind = DDP if torch is not None else Linear
        if comm.rank == 0:
            what = f"torch {torch.__version__}" if torch else "torch is not installed: a linear model in NumPy instead"
            print(f"{comm.size} ranks, {len(loader)} steps per epoch; {what}", flush=True)
        model: DDP | Linear | None = None
        for epoch in range(args.epochs):
            begin, mine = time.perf_counter(), np.zeros(2)
            for batch in loader:
                if model is None:
                    model = kind(comm, args, batch["data"].shape[1:])  # channels, height, width
                mine += [len(batch.ids), model.step(batch["data"], batch["label"])]
            count, loss = comm.allreduce(mine)
            if comm.rank == 0:
                seconds = time.perf_counter() - begin
                print(f"epoch {epoch}: loss {loss / count:.4f}, {count:,.0f} records in {seconds:.1f} s", flush=True)
        if model is not None:
            model.close()


if __name__ == "__main__":
    main()
