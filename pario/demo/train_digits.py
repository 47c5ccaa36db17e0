"""One lesson: train a small network on real images that every rank gets from one LMDB.

    python examples/train_digits.py                    one process, no MPI needed
    mpiexec -n 2 python examples/train_digits.py       two ranks share the work; the result is the same

The images are scikit-learn's handwritten digits: 1,797 pictures of 8x8 grey pixels. They are written to two LMDBs the
way Caffe does it, and pario reads them. Everything between the `with` and the end of the loop is what you would write
in a training script of your own. `--stop-after 40` saves and stops in mid-epoch, `--resume` goes on from there, also
on another number of ranks. Needs: pip install ".[demo]"
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import pario

EPOCHS = 12
GLOBAL_BATCH = 60  # images per step over all ranks together; 1, 2, 3, 4, 5, 6, 10 ... ranks divide it evenly
LEARNING_RATE, MOMENTUM = 0.1, 0.9
SHAPES = [(64, 64), (64,), (64, 10), (10,)]  # weights and biases: 64 pixels -> 64 hidden units -> 10 digits
ENOUGH = 0.95  # test accuracy that counts as "it learned"


def communicator() -> Any:
    """All ranks that mpiexec or srun started, or None where there is no MPI library: pario then runs on one process."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return None
    return MPI.COMM_WORLD


def total(comm: Any, vector: np.ndarray) -> np.ndarray:
    """The sum over all ranks, on every rank."""
    if comm is None:
        return vector
    out = np.empty_like(vector)
    comm.Allreduce(vector, out)
    return out


# -- the data: written once, by one rank ---------------------------------------------------------------------------


def datum(pixels: np.ndarray, label: int) -> bytes:
    """One image as a Caffe Datum (a protobuf message): fields 1-3 shape, 4 pixels, 5 label, each after its tag byte."""
    data = pixels.astype(np.uint8).tobytes()
    return bytes([0x08, 1, 0x10, 8, 0x18, 8, 0x22, len(data)]) + data + bytes([0x28, label])


def write_lmdb(path: Path, images: np.ndarray, labels: np.ndarray) -> None:
    """Keys 00000000, 00000001, ...; a commit every 1,000 records, as Caffe's own converter does."""
    import lmdb

    env = lmdb.open(str(path), map_size=1 << 28)
    for start in range(0, len(images), 1000):
        with env.begin(write=True) as txn:
            for i in range(start, min(start + 1000, len(images))):
                txn.put(b"%08d" % i, datum(images[i], int(labels[i])))
    env.close()


def make_data(folder: Path) -> None:
    from sklearn.datasets import load_digits

    digits = load_digits()
    mixed = np.random.default_rng(0).permutation(len(digits.images))  # neighbours in the set are by the same hand
    train, test = mixed[:-360], mixed[-360:]
    write_lmdb(folder / "train.lmdb", digits.images[train], digits.target[train])
    write_lmdb(folder / "test.lmdb", digits.images[test], digits.target[test])


# -- the network: plain NumPy --------------------------------------------------------------------------------------


def split(flat: np.ndarray) -> Iterator[np.ndarray]:
    """Views of one flat vector, one for each weight matrix and bias: one vector is one Allreduce."""
    start = 0
    for shape in SHAPES:
        yield flat[start : start + int(np.prod(shape))].reshape(shape)
        start += int(np.prod(shape))


def learn_from(weights: np.ndarray, data: np.ndarray, label: np.ndarray) -> np.ndarray:
    """[number of images, sum of the loss, correct answers, sum of the gradient ...] of one batch u8[b, 1, 8, 8]."""
    w1, b1, w2, b2 = split(weights)
    x = data.reshape(len(data), 64) / 16.0
    hidden = np.maximum(x @ w1 + b1, 0)
    scores = hidden @ w2 + b2
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    rows = np.arange(len(label))
    loss, hits = -np.log(p[rows, label] + 1e-12).sum(), (scores.argmax(axis=1) == label).sum()
    p[rows, label] -= 1  # now the gradient with respect to the scores
    back = (p @ w2.T) * (hidden > 0)
    gradient = [x.T @ back, back.sum(axis=0), hidden.T @ p, p.sum(axis=0)]
    return np.concatenate([[len(label), loss, hits], *(g.ravel() for g in gradient)])


# -- the training run ----------------------------------------------------------------------------------------------


def train(folder: Path, resume: bool = False, stop_after: int = 0) -> float:
    """Test accuracy (0..1), or 0 when stopped early. Collective over the ranks."""
    comm = communicator()
    rank, size = (comm.rank, comm.size) if comm is not None else (0, 1)
    say = print if rank == 0 else lambda *args, **named: None
    if rank == 0 and not (folder / "test.lmdb").exists():
        say("writing the digits to two LMDBs ...", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        make_data(folder)
    if comm is not None:
        comm.Barrier()  # nobody opens the LMDBs before they are complete
    say(f"{size} rank{'s' * (size > 1)}; the first run on a machine compiles kernels, up to a minute ...", flush=True)

    rng = np.random.default_rng(1)  # the same weights on every rank
    weights = np.concatenate([(rng.normal(size=s) * s[0] ** -0.5 * (len(s) > 1)).ravel() for s in SHAPES])
    momentum = np.zeros_like(weights)
    checkpoint, memory = folder / "checkpoint.json", folder / "checkpoint.npz"
    options = {"batch_size": max(1, GLOBAL_BATCH // size), "decoder": pario.decode.Datum(), "comm": comm}
    steps = 0
    with pario.Loader(folder / "train.lmdb", shuffle="global", seed=0, **options) as loader:
        if resume:
            saved = np.load(memory)
            weights, momentum = saved["weights"], saved["momentum"]
            loader.load_state_dict(json.loads(checkpoint.read_text()))
            say(f"going on in epoch {loader.epoch + 1}, {len(loader)} steps left of it")

        def save() -> None:
            if rank == 0:
                checkpoint.write_text(json.dumps(loader.state_dict()))  # a few numbers: where the loader stands
                np.savez(memory, weights=weights, momentum=momentum)

        while loader.epoch < EPOCHS:
            epoch, seen, started = loader.epoch, np.zeros(3), time.perf_counter()
            for batch in loader:  # one epoch
                mine = learn_from(weights, batch["data"], batch["label"])
                everyones = total(comm, mine)
                seen += everyones[:3]
                momentum = MOMENTUM * momentum - LEARNING_RATE * everyones[3:] / everyones[0]
                weights = weights + momentum
                steps += 1
                if steps == stop_after:
                    save()
                    say(f"stopped after {steps} steps, saved to {checkpoint}; go on with --resume")
                    return 0.0
            seconds = time.perf_counter() - started
            count, loss, hits = seen
            say(
                f"epoch {epoch + 1:2d}   loss {loss / count:.4f}   train accuracy {hits / count:6.1%}   "
                f"{count:,.0f} images, {count / seconds:,.0f} /s",
                flush=True,
            )
            save()
        read = total(comm, np.array([loader.stats()[name] for name in ("records", "bytes_read", "reads")], float))

    with pario.Loader(folder / "test.lmdb", **options) as loader:
        seen = total(comm, sum((learn_from(weights, b["data"], b["label"])[:3] for b in loader), np.zeros(3)))
    accuracy = float(seen[2] / seen[0])
    say(
        f"pario delivered {read[0]:,.0f} records, and read {read[1] / 1e6:,.2f} MB for them, in {read[2]:,.0f} reads "
        f"of {read[1] / max(1, read[2]) / 1e3:,.0f} KB on average\n"
        f"test accuracy {accuracy:.2%} ({seen[2]:.0f} of {seen[0]:.0f} images it has never seen)"
    )
    return accuracy


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 if it learned."""
    parser = argparse.ArgumentParser(description="Train on scikit-learn's digits, read by pario from an LMDB.")
    parser.add_argument("--folder", type=Path, default=Path("digits"), help="where the LMDBs and checkpoints go")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in the folder")
    parser.add_argument("--stop-after", type=int, default=0, metavar="STEPS", help="steps to save and stop after")
    args = parser.parse_args(argv)
    reached = train(args.folder, args.resume, args.stop_after)
    return 0 if reached >= ENOUGH or args.stop_after else 1


if __name__ == "__main__":
    raise SystemExit(main())
