"""One lesson: a training that is interrupted by the scheduler and goes on at the exact record.

    mpiexec -n 2 python examples/train_requeue.py --data digits/train.lmdb --run run1
    sbatch jobscripts/train_requeue.slurm

On SIGUSR1 (the job script's announcement of the time limit) or SIGTERM (cancelled, preempted) all ranks finish the same
step, save a checkpoint with the model and `loader.state_dict()`, and the script ends with status 0. So they do without
a signal when less time is left until the job's end than a checkpoint is measured to take. Where the time limit was the
reason, the file RUN/requeue asks the job script to put the job into the queue again. Started with the same --run the
script goes on at the next record, on any number of ranks. Checkpoints lie in RUN/checkpoints; with --fast they are
written to a disk of each node first, and copied from there while the training goes on (docs/checkpoints.md).

The data is an LMDB of Caffe Datum messages (python -m pario demo --folder digits makes one), the model a linear
classifier in NumPy: what is yours to replace is `Model`. With torch, save `model.state_dict()` and
`optimizer.state_dict()` by the Checkpointer of pario.adapters.torch in the same way.
"""

from __future__ import annotations

import argparse
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

import pario
from pario.demo.train_digits import communicator

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


def train(args: argparse.Namespace, asked: list[float]) -> None:
    """Collective over the ranks; returns at the end of the training or when one of them was asked to stop.

    asked : [SIGTERM came, SIGUSR1 came], set by the signal handlers of this rank
    """
    comm = communicator()
    rank = comm.rank if comm is not None else 0
    say = print if rank == 0 else lambda *args, **named: None
    model, steps = Model(args.classes), 0

    decoder = pario.decode.Datum()
    with (
        pario.Checkpointer(comm, slow=args.run / "checkpoints", fast=args.fast, keep=2) as checkpoints,
        pario.Loader(args.data, args.batch_size, decoder, shuffle="global", seed=args.seed, comm=comm) as loader,
    ):
        if checkpoints.latest() is not None:
            saved = checkpoints.restore()
            model.weights, steps = saved["weights"], saved["steps"]
            loader.load_state_dict(saved["loader"])
            say(f"going on in epoch {loader.epoch}, {len(loader)} steps left of it", flush=True)
        first = steps

        def save() -> Any:
            """Returns when the weights are copied; the training goes on while they are written."""
            return checkpoints.save(steps, {"weights": model.weights, "steps": steps, "loader": loader.state_dict()})

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
                steps += 1
                seen += mine[2:4]
                if args.log_ids:
                    with open(args.run / f"ids-{rank}.txt", "a") as log:
                        log.write(f"{epoch} {' '.join(map(str, batch.ids))}\n")
                if args.step_ms:
                    time.sleep(args.step_ms / 1000)
                if batch.step == 0:
                    say(f"epoch {epoch}: first step done", flush=True)
                late = checkpoints.must_save(args.end)  # alike on all ranks
                stop, again = late or mine[0] + mine[1] > 0, mine[1] > 0 or (late and not mine[0])
                if stop:
                    break
                if steps == first + 1:
                    save()  # early: a full disk shows now, and how long a checkpoint takes here is measured
            else:
                seconds = time.perf_counter() - begin
                count, loss = seen
                say(f"epoch {epoch}: loss {loss / count:.4f}, {count:,.0f} records in {seconds:.1f} s", flush=True)
            saving = save()
            if stop:
                saving.wait()  # the job may go back into the queue when the checkpoint is complete
                position = loader.state_dict()["position"]
                why = "asked to stop" if mine[:2].any() else "the time limit is near"
                say(f"{why}: saved in epoch {epoch} after {position} records", flush=True)
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
    parser.add_argument("--run", type=Path, default=Path("run"), help="directory of the checkpoints")
    parser.add_argument("--fast", type=Path, help="a directory on a disk of each node: checkpoints go there first")
    parser.add_argument("--end", type=float, help="when the job ends, seconds since 1970 (default: as Slurm says)")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="records per rank and step")
    parser.add_argument("--classes", type=int, default=10, help="labels are 0 ... classes - 1")
    parser.add_argument("--rate", type=float, default=0.5, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    parser.add_argument("--step-ms", type=float, default=0, help="milliseconds to sleep in each step")
    parser.add_argument("--log-ids", action="store_true", help="each rank notes in RUN/ids-RANK.txt what it has seen")
    train(parser.parse_args(), asked)
    for number in SIGNALS:
        # Python removes its handlers before the process is gone: a signal that came in between would kill a rank whose
        # work is done and saved, and the job would count as failed.
        signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    main()
