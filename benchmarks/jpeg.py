"""JPEG from an unmodified LMDB beside FFCV, which reads the same JPEG bytes out of a file of its own format.

    python -m benchmarks.jpeg --data DIR --python ENV/bin/python [--rounds 5] [--records 2000] [--out DIR/jpeg.json]

Images of 256 x 256 pixels, cut out of the two photographs that come with scikit-learn; random order, all in memory.
"plain": u8[b, 256, 256, 3]. "crop": a random resized crop, flipped or not, and normalised: f32[b, 224, 224, 3].
Both sides stay alive and take turns, epoch by epoch. benchmarks/ffcv.py says how FFCV's environment is made.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import numpy as np

from benchmarks.measure import ROOT, Row, Section, WorkerError, job_environment, kill_tree, mpiexec, ratios, save
from benchmarks.sides import compare

PIXELS = 256
QUALITY = 90
#: (name, ranks, threads per rank)
CELLS = (("1 thread", 1, 1), ("2 threads", 1, 2), ("2 ranks", 2, 1))
WORKS = ("plain", "crop")


def make(folder: str, records: int) -> str:
    """The LMDB of `records` JPEGs in `folder`, made if it is missing; returns its path."""
    path = Path(folder) / f"jpeg-{PIXELS}-{records}"
    if (path / "data.mdb").exists():
        return str(path)
    from PIL import Image
    from sklearn.datasets import load_sample_images

    photos = [Image.fromarray(photo) for photo in load_sample_images().images]
    rng = np.random.default_rng(1)
    new = Path(f"{path}.part")
    new.mkdir(parents=True, exist_ok=True)
    with lmdb.open(str(new), map_size=1 << 40) as env, env.begin(write=True) as txn:
        for i in range(records):
            photo = photos[i % len(photos)]
            side = int(rng.integers(PIXELS, min(photo.size) + 1))
            left, top = (int(rng.integers(0, length - side + 1)) for length in photo.size)
            cut = photo.crop((left, top, left + side, top + side)).resize((PIXELS, PIXELS), Image.Resampling.LANCZOS)
            file = io.BytesIO()
            cut.save(file, "JPEG", quality=QUALITY)
            txn.put(b"%08d" % i, file.getvalue())
    os.rename(new, path)
    return str(path)


class Side:
    """A worker that runs an epoch whenever it is asked to."""

    def __init__(self, arguments: list[str], python: str, ranks: int) -> None:
        command = [python, "-m", *arguments]
        if ranks > 1:
            command = [mpiexec(), "-n", str(ranks), *command]
        self.child = subprocess.Popen(
            command, cwd=ROOT, env=job_environment(ranks, 1), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip

    def epoch(self) -> dict[str, Any]:
        """{"ranks": [{"seconds", "cpu", "records"}]}"""
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.child.stdin.write("epoch\n")
            self.child.stdin.flush()
        for line in self.child.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise WorkerError(f"{self.child.args} ended with {self.child.wait()}")

    def end(self) -> None:
        if self.child.stdin:
            with contextlib.suppress(BrokenPipeError):
                self.child.stdin.close()
        try:
            self.child.wait(20)
        except subprocess.TimeoutExpired:
            kill_tree(self.child.pid)
            self.child.wait()


@contextlib.contextmanager
def side(arguments: list[str], python: str, ranks: int) -> Iterator[Side]:
    made = Side(arguments, python, ranks)
    try:
        yield made
    finally:
        made.end()


def rate(run: dict[str, Any]) -> float:
    return sum(rank["records"] for rank in run["ranks"]) / max(rank["seconds"] for rank in run["ranks"])


def cpu(run: dict[str, Any]) -> float:
    """Microseconds per record, of all threads and ranks."""
    return 1e6 * sum(rank["cpu"] for rank in run["ranks"]) / sum(rank["records"] for rank in run["ranks"])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.jpeg", description=__doc__.split("\n")[0])
    parser.add_argument("--data", required=True, help="folder for the LMDB and FFCV's file")
    parser.add_argument("--python", required=True, help="the interpreter of the environment that has FFCV")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--records", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--works", default=",".join(WORKS))
    parser.add_argument("--cells", default=",".join(name for name, _, _ in CELLS))
    parser.add_argument("--tiers", help="pario's, as in PARIO_TIERS; by default records come from the page cache")
    parser.add_argument("--out", help="JSON file (default: jpeg.json in the data folder)")
    options = parser.parse_args()
    path = make(options.data, options.records)
    speed = Section("jpeg", "JPEG of 256 pixels, random order: records/s ÷ FFCV's", "warm")
    cost = Section("jpeg_cpu", "JPEG of 256 pixels, random order: CPU time per record ÷ FFCV's", "warm")
    for work in options.works.split(","):
        for name, ranks, threads in CELLS:
            if name not in options.cells.split(","):
                continue
            given = [path, "--work", work, "--batch", str(options.batch), "--threads", str(threads)]
            theirs = ["benchmarks.worker_ffcv_jpeg", *given, "--beton", f"{path}.beton"]
            mine = ["benchmarks.worker_jpeg", *given, *(("--tiers", options.tiers) if options.tiers else ())]
            with (
                side(mine, sys.executable, ranks) as pario,
                side(theirs, options.python, ranks) as ffcv,
            ):
                for each in (pario, ffcv, pario, ffcv):  # compile, fill caches
                    each.epoch()
                runs = [(pario.epoch(), ffcv.epoch()) for _ in range(options.rounds)]
            case = f"{work}, {name}"
            compare(speed, case, [rate(a) for a, _ in runs], [rate(b) for _, b in runs], 1.0, "FFCV", 1.0, "records/s")
            ours, other = [cpu(a) for a, _ in runs], [cpu(b) for _, b in runs]
            found = ratios(ours, other)
            said = [f"{sorted(values)[len(values) // 2]:.0f} µs" for values in (ours, other)]
            cost.raw[case] = {"ours": ours, "theirs": other}
            cost.add(
                Row(
                    case, found["median"], found["min"], found["max"], "<=", 1.0, ours=f"pario {said[0]}",
                    theirs=f"FFCV {said[1]}",
                )
            )  # fmt: skip
    save(options.out or Path(options.data) / "jpeg.json", [speed, cost], command=sys.argv, rounds=options.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
