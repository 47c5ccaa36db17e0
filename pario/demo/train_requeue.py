"""One lesson: a training that is interrupted by the scheduler and goes on at the exact record.

    mpiexec -n 2 python examples/train_requeue.py --data digits/train.lmdb --run run1
    sbatch jobscripts/train_requeue.slurm

On SIGUSR1 (the job script's announcement of the time limit) or SIGTERM (cancelled, preempted) all ranks finish the same
step, rank 0 writes one file with the model and `loader.state_dict()`, and the script ends with status 0. After SIGUSR1
it leaves the file RUN/requeue, which asks the job script to put the job into the queue again. Started with the same
--run it goes on at the next record, on any number of ranks.

The data is an LMDB of Caffe Datum messages (python -m pario demo --folder digits makes one), the model a linear
classifier in NumPy: what is yours to replace is `Model`. With torch, save `model.state_dict()` and
`optimizer.state_dict()` by torch.save in the same way: to another name first, then os.replace.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

import pario

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Model:
    """A linear classifier: weights f64[values of a record, classes], plain gradient descent."""

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self.weights = np.zeros((0, classes))

    def gradient(self, data: np.ndarray, label: np.ndarray) -> np.ndarray:
        """[records, sum of the loss, sum of the gradient ...] of one batch, u8[b, c, h, w] and i64[b]; b may be 0."""
        x = data.reshape(len(data), int(np.prod(data.shape[1:]))).astype(float)
        x /= x.max(axis=1, keepdims=True, initial=1.0)  # the brightest pixel of each picture is 1
        if not len(self.weights):
            self.weights = np.zeros((x.shape[1], self.classes))
        scores = x @ self.weights
        p = np.exp(scores - scores.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        rows = np.arange(len(label))
        loss = -np.log(p[rows, label] + 1e-12).sum()
        p[rows, label] -= 1
        return np.concatenate([[len(label), loss], (x.T @ p).ravel()])

    def step(self, summed: np.ndarray, rate: float) -> None:
        self.weights -= rate / max(1.0, summed[0]) * summed[2:].reshape(self.weights.shape)


def communicator() -> Any:
    """All ranks that mpiexec or srun started, or None where there is no MPI library."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return None
    return MPI.COMM_WORLD


def save(checkpoint: Path, model: Model, state: dict[str, Any]) -> None:
    """One file, complete or not there: whoever is killed while writing leaves the one before."""
    part = checkpoint.with_suffix(".part")
    with open(part, "wb") as file:
        np.savez(file, weights=model.weights, loader=json.dumps(state))
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, checkpoint)


def train(args: argparse.Namespace, asked: list[float]) -> None:
    """Collective over the ranks; returns at the end of the training or when one of them was asked to stop.

    asked : [SIGTERM came, SIGUSR1 came], set by the signal handlers of this rank
    """
    comm = communicator()
    rank = comm.rank if comm is not None else 0
    say = print if rank == 0 else lambda *args, **named: None
    checkpoint = args.run / "checkpoint.npz"
    model = Model(args.classes)
    if rank == 0:
        args.run.mkdir(parents=True, exist_ok=True)
    if comm is not None:
        comm.Barrier()

    decoder = pario.decode.Datum()
    with pario.Loader(args.data, args.batch_size, decoder, shuffle="global", seed=args.seed, comm=comm) as loader:
        if checkpoint.exists():
            with np.load(checkpoint) as saved:
                model.weights = saved["weights"]
                loader.load_state_dict(json.loads(str(saved["loader"])))
            say(f"going on in epoch {loader.epoch}, {len(loader)} steps left of it", flush=True)
        while loader.epoch < args.epochs:
            epoch, seen, begin = loader.epoch, np.zeros(2), time.perf_counter()
            for batch in loader:
                # Every rank must stop after the same step, and the signal comes to each at another moment: the wish
                # travels with the gradient.
                mine = np.concatenate([asked, model.gradient(batch["data"], batch["label"])])
                if comm is not None:
                    everyones = np.empty_like(mine)
                    comm.Allreduce(mine, everyones)
                    mine = everyones
                model.step(mine[2:], args.rate)
                seen += mine[2:4]
                if args.log_ids:
                    with open(args.run / f"ids-{rank}.txt", "a") as log:
                        log.write(f"{epoch} {' '.join(map(str, batch.ids))}\n")
                if args.step_ms:
                    time.sleep(args.step_ms / 1000)
                if batch.step == 0:
                    say(f"epoch {epoch}: first step done", flush=True)
                stop, again = mine[0] + mine[1] > 0, mine[1] > 0
                if stop:
                    break
            else:
                seconds = time.perf_counter() - begin
                count, loss = seen
                say(f"epoch {epoch}: loss {loss / count:.4f}, {count:,.0f} records in {seconds:.1f} s", flush=True)
            if rank == 0:
                save(checkpoint, model, loader.state_dict())
            if stop:
                position = loader.state_dict()["position"]
                say(f"asked to stop: saved in epoch {epoch} after {position} records", flush=True)
                if rank == 0 and again:
                    (args.run / "requeue").touch()
                return
    say("done", flush=True)


def main() -> None:
    asked = [0.0, 0.0]
    for i, number in enumerate(SIGNALS):
        # Only a mark: the loop looks at it after each step. Set before anything slow: until then a signal kills.
        signal.signal(number, lambda *_, i=i: asked.__setitem__(i, 1.0))
    parser = argparse.ArgumentParser(description="Train, save when asked by a signal, and go on at the exact record.")
    parser.add_argument("--data", required=True, help="an LMDB of Caffe Datum messages of one shape")
    parser.add_argument("--run", type=Path, default=Path("run"), help="directory of the checkpoint")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="records per rank and step")
    parser.add_argument("--classes", type=int, default=10, help="labels are 0 ... classes - 1")
    parser.add_argument("--rate", type=float, default=0.5, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    parser.add_argument("--step-ms", type=float, default=0, help="sleep so long per step, as a larger model would")
    parser.add_argument("--log-ids", action="store_true", help="each rank notes in RUN/ids-RANK.txt what it has seen")
    train(parser.parse_args(), asked)
    for number in SIGNALS:
        # Python removes its handlers before the process is gone: a signal that came in between would kill a rank whose
        # work is done and saved, and the job would count as failed.
        signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    main()
