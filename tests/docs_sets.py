"""What the pages of the documentation take for granted: datasets, scripts, names; and what must hold after a block."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lmdb
import numpy as np
from datasets import datum
from tars import write_tar

__all__ = ["AFTER", "BEFORE", "ENVIRONMENT", "RANKS", "SETS", "common"]

Names = dict[str, Any]
N = 96

TRAIN = """
import sys
import pario

with pario.Loader("train.lmdb", 4, pario.decode.Datum(), shuffle="global") as loader:
    seen = [int(i) for batch in loader for i in batch.ids]
    assert len(set(seen)) == len(seen) <= 96
"""

TRAIN_LMDB = """
import lmdb

with lmdb.open("train.lmdb", readonly=True, lock=False) as env, env.begin() as txn:
    assert len(list(txn.cursor())) == 96
"""


def write(path: Path, values: Iterable[bytes] | Mapping[bytes, bytes], *, subdir: bool = True) -> None:
    pairs = values if isinstance(values, Mapping) else {b"%08d" % i: value for i, value in enumerate(values)}
    path.parent.mkdir(parents=True, exist_ok=True)
    with lmdb.open(str(path), map_size=64 << 20, subdir=subdir) as env, env.begin(write=True) as txn:
        for key, value in pairs.items():
            txn.put(key, value)


def digits(n: int = N) -> list[bytes]:
    rng = np.random.default_rng(7)
    return [datum(rng.integers(0, 16, (1, 8, 8), np.uint8), i % 10) for i in range(n)]


def pictures(n: int = 16, kind: str = ".jpg") -> list[bytes]:
    import cv2

    rng = np.random.default_rng(8)
    return [cv2.imencode(kind, rng.integers(0, 256, (32, 100, 3), np.uint8))[1].tobytes() for _ in range(n)]


def common(folder: Path) -> Names:
    """A dataset of Datums, a script that trains on it, and the names that most pages use."""
    import pario

    write(folder / "train.lmdb", digits())
    (folder / "train.py").write_text(TRAIN)
    for name in ("scratch/me/results", "local/nvme", "data", "mnt/train/cats", "mnt/data", "run", "tmp"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for name in ("scratch/train.lmdb", "data/val.lmdb", "val.lmdb", "digits/train.lmdb"):
        write(folder / name, digits(24))

    def step(*arrays: Any) -> None:
        assert arrays

    return {
        "pario": pario,
        "np": np,
        "io": io,
        "json": json,
        "comm": None,
        "rank": 0,
        "step": step,
        "trainer": SimpleNamespace(fit=lambda model, loader: [step(batch) for batch in loader]),
        "model": None,
        "decoder": pario.decode.Datum(),
    }


def start(folder: Path) -> Names:
    """What the page's own script makes, for its blocks with torch, which run without the others."""
    rng = np.random.default_rng(9)
    write(folder / "own.lmdb", (bytes([i % 10]) + rng.bytes(64) for i in range(1000)))
    return {}


def texts(folder: Path) -> Names:
    write(folder / "texts.lmdb", (b"word " * (1 + i % 7) for i in range(N)))
    np.save(folder / "tokens.npy", 1 + np.arange(N) % 7)
    return {}


def training(folder: Path) -> Names:
    """Of the pages about checkpoints: the step that is saved comes at once."""
    import pario

    return {
        "loader": pario.Loader("train.lmdb", 8, pario.decode.Datum(), shuffle="global"),
        "weights": np.zeros(4),
        "step": 999,
        "epochs": 1,
        "train": lambda weights, batch: None,
    }


def files(folder: Path) -> Names:
    write(folder / "data" / "train.lmdb", {b"tables/7.csv": b"a,b\n1,2\n", b"cats/1": b"meow"})
    (folder / "convert.sh").write_text("#!/bin/sh\n")
    return {}


def names_and_fields(folder: Path) -> Names:
    values = digits(8) * 1280
    _clear(folder)
    write(folder / "train.lmdb", {b"image-%05d.jpg" % i: value for i, value in enumerate(values)} | {b"_1": values[0]})
    pairs = {}
    for i, picture in enumerate(pictures(12), 1):
        pairs |= {b"image-%09d" % i: picture, b"label-%09d" % i: b"word"}
    write(folder / "lmdb_train", pairs | {b"num-samples": b"12"})
    names = ("a.lmdb", "b.lmdb", "web.lmdb", "books.lmdb", "shards/part-0.lmdb", "shards/part-1.lmdb")
    for name in (*names, "data.0000.lmdb", "data.0001.lmdb"):
        write(folder / name, digits(12))
    return {}


def labels(folder: Path, names: Names) -> None:
    """One record in ten is of the rare class."""
    import pario

    with pario.Reader(str(folder / "train.lmdb"), comm="self") as reader:
        np.save(folder / "labels.npy", np.arange(len(reader)) % 10 == 3)


def selections(folder: Path) -> Names:
    return names_and_fields(folder) | texts(folder)


def py_lmdb(folder: Path) -> Names:
    """The scripts of other projects, which read by `import lmdb`."""
    import pickle

    import pario.lmdb

    pario.lmdb.install()  # as `python -m pario run` does
    (folder / "train.py").write_text(TRAIN_LMDB)
    (folder / "my_package").mkdir()
    (folder / "my_package" / "train.py").write_text(TRAIN_LMDB)
    pairs = {b"num-samples": b"1", b"label-%09d" % 1: b"word", b"a.png": b"png", b"0": pickle.dumps({"x": 1})}
    write(folder / "others.lmdb", pairs)
    write(folder / "one.lmdb", pairs, subdir=False)
    here = str(folder / "others.lmdb")
    return {"root": here, "path": here, "name": "a.png", "i": 0, "paths": [folder / "one.lmdb"], "pickle": pickle,
            "self": SimpleNamespace(), "dataset": Records()}  # fmt: skip


class Records:
    """A torch dataset over train.lmdb, for the page's DataLoader."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> int:
        return i


def images(folder: Path) -> Names:
    for i, picture in enumerate(pictures(8)):
        (folder / "images" / "cats").mkdir(parents=True, exist_ok=True)
        (folder / "images" / "cats" / f"{i}.jpg").write_bytes(picture)
    return {}


def pairs_of_files(folder: Path) -> Names:
    import msgpack

    _replace(folder, [msgpack.dumps((picture, i)) for i, picture in enumerate(pictures())])
    return {}


def rules(folder: Path) -> Names:
    (folder / "rules.toml").touch()  # the page shows it below
    for name in ("anna", "root"):
        (folder / "tokens").mkdir(exist_ok=True)
        (folder / "tokens" / name).write_text("0123456789abcdef" * 4)
        (folder / "tokens" / name).chmod(0o600)
    return {}


def _replace(folder: Path, values: list[bytes]) -> None:
    """train.lmdb, from this block on."""
    _clear(folder)
    write(folder / "train.lmdb", values)


def _clear(folder: Path) -> None:
    for file in (folder / "train.lmdb").iterdir():
        file.unlink()


def arrays_in_npz(folder: Path, names: Names) -> None:
    values = []
    for i in range(N):
        file = io.BytesIO()
        np.savez(file, x=np.arange(3.0) + i, y=i)
        values.append(file.getvalue())
    _replace(folder, values)


def floats(folder: Path, names: Names) -> None:
    _replace(folder, [np.zeros((3, 224, 224), "f4").tobytes()] * 8)


def ten_tars(folder: Path, names: Names) -> None:
    for k, picture in enumerate(pictures(10)):
        write_tar(folder / f"shard-{k:03d}.tar", [(f"{k}.jpg", picture), (f"{k}.cls", b"%d" % k)])


def cifar(folder: Path, names: Names) -> None:
    _replace(folder, [bytes([i % 10]) + bytes(3072) for i in range(N)])


def a_checkpoint(folder: Path, names: Names) -> None:
    """The page shows the name of a checkpoint, which ends with random digits."""
    import pario

    run = folder / "scratch" / "run1"
    with pario.Checkpointer(slow=run) as saved:
        saved.save(2000, {"model": {"weights": np.zeros(1 << 18), "bias": np.arange(3.0)}})
    (made,) = run.glob("step-000000002000-*")
    os.symlink(made, run / "step-000000001000-0123456789abcdef")


def no_link(folder: Path, names: Names) -> None:
    os.unlink(folder / "scratch" / "run1" / "step-000000001000-0123456789abcdef")


def a_loader(folder: Path, names: Names) -> None:
    import pario

    names["loader"] = pario.Loader("train.lmdb", 8, pario.decode.Datum(), shuffle="global")


def a_transaction(folder: Path, names: Names) -> None:
    import pario.lmdb

    names["txn"] = pario.lmdb.open(names["root"], readonly=True, lock=False).begin()


def read_rules(folder: Path, names: Names) -> None:
    from pario.plane.rules import read_rules as read

    assert [job.user for job in read(str(folder / "rules.toml")).jobs] == ["anna"]


def batches(folder: Path, names: Names) -> None:
    """The page's loader delivers each record once."""
    with names["loader"] as loader:
        seen = [int(i) for batch in loader for i in batch.ids]
    assert sorted(seen) == list(range(loader.records))


def decoded(folder: Path, names: Names) -> None:
    import pario

    names["loader"] = pario.Loader("train.lmdb", 4, names["decode"])
    batches(folder, names)


def decoded_pictures(folder: Path, names: Names) -> None:
    import pario

    _replace(folder, pictures(8))
    for name in ("train", "valid"):
        names["loader"] = pario.Loader("train.lmdb", 4, names[name])
        batches(folder, names)


def script_of_packed(folder: Path, names: Names) -> None:
    import subprocess
    import sys

    command = [sys.executable, "read_packed.py", "packed.lmdb", "00000003"]
    assert subprocess.run(command, cwd=folder, capture_output=True, check=True, timeout=60).stdout == digits()[3]


#: page -> what it takes for granted besides `common`, and its own names
SETS: dict[str, Callable[[Path], Names]] = {
    "docs/checkpoints.md": training,
    "docs/files.md": files,
    "docs/packing.md": images,
    "docs/replace-py-lmdb.md": py_lmdb,
    "docs/order.md": training,
    "docs/selections.md": selections,
    "docs/sharing-a-store.md": rules,
    "docs/start.md": start,
    "docs/your-dataset.md": pairs_of_files,
}

Step = Callable[[Path, Names], None]

#: (page, how a block begins) -> what is made before it
BEFORE: dict[tuple[str, str], Step] = {
    ("docs/selections.md", "labels ="): labels,
    ("docs/checkpoints.md", "import json, h5py"): a_checkpoint,
    ("docs/checkpoints.md", "python -m pario checkpoint list"): no_link,
    ("docs/decoders.md", "def decode(value: bytes)"): arrays_in_npz,
    ("docs/decoders.md", "def decode(value, key, rng)"): floats,
    ("docs/decoders.md", "@pario.decode.kernel"): cifar,
    ("docs/replace-py-lmdb.md", "self.env ="): a_transaction,
    ("docs/replace-py-lmdb.md", "for key, value in"): a_transaction,
    ("docs/order.md", "if rank == 0"): a_loader,
    ("docs/your-dataset.md", "from pario.decode"): ten_tars,
}

#: (page, how a block begins) -> what must hold after it
AFTER: dict[tuple[str, str], Step] = {
    ("docs/selections.md", "import numpy"): batches,
    ("docs/decoders.md", "train = pario.decode.Image"): decoded_pictures,
    ("docs/decoders.md", "def decode(value: bytes)"): batches,
    ("docs/decoders.md", "def decode(value, key, rng)"): decoded,
    ("docs/decoders.md", "@pario.decode.kernel"): batches,
    ("docs/order.md", "loader ="): batches,
    ("docs/packing.md", '"""Values of a dataset'): script_of_packed,
    ("docs/sharing-a-store.md", "lease_s ="): read_rules,
    ("docs/tiers.md", "import pario"): batches,
    ("docs/your-dataset.md", "from pario.decode"): batches,
    ("docs/your-dataset.md", "import pario"): batches,
}

#: blocks of ranks that work together -> how many
RANKS = {("docs/selections.md", "from mpi4py import MPI"): 4}

#: page -> variables that it takes for granted
ENVIRONMENT = {"docs/sharing-a-store.md": {"PLANE": "head:7400", "SLURM_JOB_ID": "1"}}
