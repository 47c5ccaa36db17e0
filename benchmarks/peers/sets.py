"""The records: cut-outs of photographs that lie inside scikit-learn and scikit-image, which nobody needs to download.

DIR/NAME/source is an LMDB of plain values, set.json describes it, truth.npy has what judging.py compares with. Peers
add folders of their own beside it. Runs in pario's environment.
"""

from __future__ import annotations

import io
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb
import numpy as np

from benchmarks.peers.judging import PIXELS, Truth, stamp

__all__ = ["SETS", "Shape", "damage", "make"]

QUALITY = 90
#: of scikit-image's photographs, those that are in its wheel, in colour
_PHOTOS = ("astronaut", "chelsea", "coffee", "rocket", "retina", "hubble_deep_field")


@dataclass(frozen=True)
class Shape:
    """records : divisible by batch and by 2 and 4 ranks, so that all batches are whole
    record_bytes : 0: JPEGs
    """

    title: str
    records: int
    record_bytes: int
    batch: int


SETS = {
    "3k": Shape("raw, 3 KB", 40_960, 3 * 1024, 256),
    "150k": Shape("raw, 150 KB", 2_048, 150 * 1024, 64),
    "jpeg": Shape("JPEG, 256 × 256", 2_048, 0, 64),
}


def _photos() -> tuple[list[Any], list[str]]:
    from PIL import Image
    from sklearn.datasets import load_sample_images

    held = load_sample_images()
    photos = [Image.fromarray(photo) for photo in held.images]
    names = [Path(name).name for name in held.filenames]
    try:
        import skimage
    except ImportError:  # a smoke test does without
        return photos, names
    for name in _PHOTOS:
        for file in sorted((Path(skimage.__file__).parent / "data").glob(f"{name}.*")):
            photo = Image.open(file).convert("RGB")
            if min(photo.size) >= PIXELS:
                photos.append(photo)
                names.append(file.name)
    return photos, names


def make(folder: str | os.PathLike[str], name: str, records: int = 0) -> Path:
    """The set of that name below `folder`, made if it is missing. records: 0: as in SETS."""
    shape = SETS[name]
    n = records or shape.records
    path = Path(folder) / (f"{name}-{n}" if records else name)
    if (path / "set.json").exists():
        return path
    from PIL import Image

    shutil.rmtree(path, ignore_errors=True)
    (path / "source").mkdir(parents=True)
    photos, names = _photos()
    rng = np.random.default_rng(20261124)
    flat = [np.asarray(photo).reshape(-1) for photo in photos]
    digests = []
    with lmdb.open(str(path / "source"), map_size=1 << 40) as env:
        for begin in range(0, n, 1000):
            with env.begin(write=True) as txn:
                for i in range(begin, min(begin + 1000, n)):
                    if shape.record_bytes:
                        pixels = flat[i % len(flat)]
                        at = int(rng.integers(0, len(pixels) - shape.record_bytes))
                        record = pixels[at : at + shape.record_bytes].copy()
                        stamp(record, i)
                        value = record.tobytes()
                    else:
                        photo = photos[i % len(photos)]
                        side = int(rng.integers(PIXELS, min(photo.size) + 1))
                        left, top = (int(rng.integers(0, length - side + 1)) for length in photo.size)
                        cut = photo.crop((left, top, left + side, top + side))
                        record = np.array(cut.resize((PIXELS, PIXELS), Image.Resampling.LANCZOS))
                        stamp(record, i)
                        file = io.BytesIO()
                        Image.fromarray(record).save(file, "JPEG", quality=QUALITY)
                        value = file.getvalue()
                    txn.put(b"%08d" % i, value)
                    digests.append(Truth.of([record]))
    np.save(path / "truth.npy", np.concatenate(digests))
    facts = {
        "name": name, "records": n, "record_bytes": shape.record_bytes, "jpeg": not shape.record_bytes,
        "batch": shape.batch, "photos": names,
    }  # fmt: skip
    (path / "set.json").write_text(json.dumps(facts, indent=1) + "\n")
    return path


def damage(path: Path, to: Path) -> list[int]:
    """A copy of a set of JPEGs in which three records are damaged before any peer writes its files; returns them.

    One is truncated, one has zeros instead of its pixels, one is no JPEG.
    """
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir(parents=True)
    facts = json.loads((path / "set.json").read_text())
    n = facts["records"]
    bad = [n // 5, n // 2, 4 * n // 5]
    with (
        lmdb.open(str(path / "source"), readonly=True, lock=False) as old,
        lmdb.open(str(to / "source"), map_size=1 << 40) as new,
        old.begin() as reading,
        new.begin(write=True) as writing,
    ):
        for i in range(n):
            value = reading.get(b"%08d" % i)
            if i == bad[0]:
                value = value[: len(value) // 2]
            elif i == bad[1]:
                scan = value.index(b"\xff\xda") + 14
                value = value[:scan] + bytes(len(value) - scan - 2) + value[-2:]
            elif i == bad[2]:
                value = b"this is no picture. " * (len(value) // 20)
            writing.put(b"%08d" % i, value)
    shutil.copy(path / "truth.npy", to)
    (to / "set.json").write_text(json.dumps(facts, indent=1) + "\n")
    return bad
