"""torchvision's ImageFolder over a view, with four workers, in one process and on two ranks: every tensor is compared.

    python -m benchmarks.files_images [--data FOLDER]      (pip install torch torchvision pillow)

Not among the tests: torchvision must fit torch, and CI's torch has no torchvision.
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import lmdb
import numpy as np

CLASSES, EACH, EPOCHS, WORKERS = ("cat", "dog", "owl"), 120, 2, 4
_LIMIT_S = 300


def make(path: Path) -> None:
    """An LMDB of JPEGs and PNGs, whose keys make a folder per class."""
    from PIL import Image

    rng = np.random.default_rng(1)
    with lmdb.open(str(path), map_size=1 << 30, subdir=False) as env, env.begin(write=True) as txn:
        for name in CLASSES:
            for i in range(EACH):
                kind, suffix = (("PNG", "png"), ("JPEG", "jpg"))[i % 2]
                data = io.BytesIO()
                Image.fromarray(rng.integers(0, 256, (48, 64, 3), np.uint8)).save(data, kind)
                txn.put(f"{name}/{i:04d}.{suffix}".encode(), data.getvalue())


def train(folder: str, path: str) -> None:
    """Under the view: this rank's part of ImageFolder, against what py-lmdb and PIL give."""
    from PIL import Image
    from torch import equal
    from torch.utils.data import DataLoader, Subset
    from torchvision.datasets import ImageFolder
    from torchvision.transforms.functional import pil_to_tensor

    rank, size = int(os.environ.get("PMI_RANK", 0)), int(os.environ.get("PMI_SIZE", 1))
    images = ImageFolder(folder, transform=pil_to_tensor)
    assert images.classes == list(CLASSES), images.classes
    assert len(images) == len(CLASSES) * EACH, len(images)
    truth = {}
    with lmdb.open(path, subdir=False, readonly=True, lock=False) as env, env.begin() as txn:
        for key, value in txn.cursor():
            truth[bytes(key).decode()] = pil_to_tensor(Image.open(io.BytesIO(value)).convert("RGB"))
    mine = range(rank, len(images), size)
    right = 0
    for _ in range(EPOCHS):
        rows = iter(mine)
        for batch, labels in DataLoader(Subset(images, mine), batch_size=8, num_workers=WORKERS):
            for tensor, label in zip(batch, labels, strict=True):
                name, wanted = images.samples[next(rows)]
                assert wanted == int(label), name
                assert equal(tensor, truth[os.path.relpath(name, folder)]), name
                right += 1
    assert right == EPOCHS * len(mine), right
    print(f"rank {rank} of {size}: {right} images are right")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="an empty folder (default: a temporary one)")
    parser.add_argument("--train", nargs=2, metavar=("FOLDER", "LMDB"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(*options.train)
        return 0
    with tempfile.TemporaryDirectory(dir=options.data) as folder:
        path, shown = Path(folder, "images.lmdb"), Path(folder, "shown")
        make(path)
        view = [sys.executable, "-m", "pario", "files", "view", f"{path}={shown}", "--"]
        command = [sys.executable, "-m", "benchmarks.files_images", "--train", str(shown), str(path)]
        launcher = Path(sys.executable).with_name("mpiexec")
        for ranks in ([], [str(launcher), "-n", "2"]):
            subprocess.run([*view, *ranks, *command], check=True, timeout=_LIMIT_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())
