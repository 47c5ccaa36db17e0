"""How training code reads LMDBs: one small Dataset per convention, with the lmdb module as its first argument.

Each keeps to what the public code of its name does: the arguments of lmdb.open, the calls, when the environment is
opened. `write_<name>(folder, rng)` writes a set of that kind with the real lmdb; USERS names all pairs. `outcome` reads
all of a Dataset, so that py-lmdb's and pario's results can be compared.
"""

from __future__ import annotations

import bisect
import copyreg
import gzip
import importlib
import io
import json
import os
import pickle
import random
import types
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb as real
import numpy as np

Rng = random.Random

# Real code imports lmdb and pickles no module; ours has it as an attribute.
copyreg.pickle(types.ModuleType, lambda module: (importlib.import_module, (module.__name__,)))


def some_image(rng: Rng, i: int) -> bytes:
    """Bytes that begin like a JPEG or PNG file."""
    return (b"\xff\xd8\xff\xe0", b"\x89PNG\r\n\x1a\n")[i % 2] + rng.randbytes(
        rng.choice((900, 1990, 2050, 6000, 40_000))
    )


def put_all(path: str, pairs: Iterator[tuple[bytes, bytes]], **options: Any) -> None:
    env = real.open(path, map_size=1 << 30, sync=False, **options)
    with env.begin(write=True) as txn:
        for key, value in pairs:
            txn.put(key, value)
    env.close()


class Dataset:
    """What all of them have: a length, and items by number."""

    lmdb: Any

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> Any:
        raise NotImplementedError


# -- scene text recognition (deep-text-recognition-benchmark, PARSeq, ...) ---------------------------------------------


def write_str(folder: Path, rng: Rng) -> str:
    def pairs() -> Iterator[tuple[bytes, bytes]]:
        for i in range(1, 61):
            yield f"image-{i:09d}".encode(), some_image(rng, i)
            yield f"label-{i:09d}".encode(), "".join(rng.choices("abcdeé123", k=1 + i % 25)).encode()
        yield b"num-samples", b"60"

    put_all(str(folder), pairs())
    return str(folder)


class Str(Dataset):
    """Opens in the constructor and keeps the environment: the code that could not be pickled."""

    def __init__(self, lmdb: Any, root: str) -> None:
        self.lmdb, self.root = lmdb, root
        self.env = lmdb.open(root, max_readers=32, readonly=True, lock=False, readahead=False, meminit=False)
        if not self.env:
            raise OSError(f"cannot open {root}")
        with self.env.begin(write=False) as txn:
            self.n = int(txn.get(b"num-samples"))
        self.kept = [i for i in range(1, self.n + 1) if len(self.label(i)) <= 20]

    def label(self, i: int) -> str:
        with self.env.begin(write=False) as txn:
            return str(txn.get(b"label-%09d" % i).decode("utf-8"))

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, index: int) -> tuple[bytes, str]:
        i = self.kept[index]
        with self.env.begin(write=False) as txn:
            buffer = io.BytesIO()
            buffer.write(txn.get(b"image-%09d" % i))
        return buffer.getvalue(), self.label(i)


# -- image restoration (BasicSR, MMEditing, mmagic) --------------------------------------------------------------------


def write_basicsr(folder: Path, rng: Rng) -> str:
    folder.mkdir()
    for which in ("gt.lmdb", "lq.lmdb"):
        names = [f"{i // 10:03d}/{i:08d}" for i in range(30)]
        put_all(str(folder / which), ((name.encode("ascii"), some_image(rng, 1)) for name in names))
        (folder / which / "meta_info.txt").write_text("".join(f"{name}.png (480,320,3) 1\n" for name in names))
    return str(folder)


class BasicSR(Dataset):
    """Pairs of images from two environments, through a client that is made at the first item."""

    def __init__(self, lmdb: Any, root: str, folders: tuple[str, ...] = ("lq.lmdb", "gt.lmdb"), **options: Any) -> None:
        self.lmdb, self.options = lmdb, options
        self.folders = {name: os.path.join(root, name) for name in folders}
        with open(os.path.join(self.folders[folders[0]], "meta_info.txt")) as f:
            self.names = [line.split(".")[0] for line in f]
        self.client: dict[str, Any] | None = None

    def get(self, which: str, name: str) -> bytes:
        if self.client is None:
            options: dict[str, Any] = {"readonly": True, "lock": False, "readahead": False, **self.options}
            self.client = {key: self.lmdb.open(path, **options) for key, path in self.folders.items()}
        with self.client[which].begin(write=False) as txn:
            return bytes(txn.get(name.encode("ascii")))

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        name = self.names[index % len(self.names)]
        images = [np.frombuffer(self.get(which, name), np.uint8).copy() for which in self.folders]
        return (name, *images)


# -- LSUN (torchvision) ------------------------------------------------------------------------------------------------


def write_lsun(folder: Path, rng: Rng) -> str:
    put_all(str(folder), ((rng.randbytes(20).hex().encode(), some_image(rng, i)) for i in range(80)))
    return str(folder)


class Lsun(Dataset):
    """Counts by stat, and keeps a list of keys in a file beside."""

    def __init__(self, lmdb: Any, root: str, cache: str | None = None, **options: Any) -> None:
        self.lmdb = lmdb
        settings = {"max_readers": 1, "readonly": True, "lock": False, "readahead": False, "meminit": False, **options}
        self.env = lmdb.open(root, **settings)
        with self.env.begin(write=False) as txn:
            self.length = txn.stat()["entries"]
        cache = cache or os.path.join(root, f"_cache_{lmdb.__name__}")
        if os.path.isfile(cache):
            with open(cache, "rb") as f:
                self.keys = pickle.load(f)
        else:
            with self.env.begin(write=False) as txn:
                self.keys = [key for key in txn.cursor().iternext(keys=True, values=False)]
            with open(cache, "wb") as f:
                pickle.dump(self.keys, f)

    def __len__(self) -> int:
        return int(self.length)

    def __getitem__(self, index: int) -> bytes:
        env = self.env
        with env.begin(write=False) as txn:
            imgbuf = txn.get(self.keys[index])
        buf = io.BytesIO()
        buf.write(imgbuf)
        buf.seek(0)
        return buf.read()


# -- Open Catalyst, Open MatSci: several files -------------------------------------------------------------------------


def write_oc20(folder: Path, rng: Rng) -> str:
    folder.mkdir()
    for shard, n in enumerate((23, 1, 40)):
        records = [{"pos": np.arange(3.0 * (5 + i % 50)), "sid": shard * 100 + i} for i in range(n)]
        pairs = [(f"{i}".encode("ascii"), pickle.dumps(record, protocol=-1)) for i, record in enumerate(records)]
        pairs.append((b"length", pickle.dumps(n, protocol=-1)))
        put_all(str(folder / f"data.{shard:04d}.lmdb"), iter(pairs), subdir=False, meminit=False, map_async=True)
    return str(folder)


class Oc20(Dataset):
    """All environments of a folder opened at once; the length pickled in each."""

    def __init__(
        self, lmdb: Any, root: str, pattern: str = "*.lmdb", loads: Callable[[bytes], Any] = pickle.loads
    ) -> None:
        self.lmdb, self.loads = lmdb, loads
        paths = sorted(Path(root).glob(pattern))
        self.envs = [self.connect(path) for path in paths]
        self.lengths = []
        for env in self.envs:
            length = env.begin().get(b"length")
            self.lengths.append(pickle.loads(length) if length is not None else env.stat()["entries"])
        self.sums = np.cumsum(self.lengths).tolist()

    def connect(self, path: Path) -> Any:
        return self.lmdb.open(
            str(path), subdir=False, readonly=True, lock=False, readahead=True, meminit=False, max_readers=1
        )

    def __len__(self) -> int:
        return sum(self.lengths)

    def __getitem__(self, index: int) -> Any:
        shard = bisect.bisect(self.sums, index)
        within = index - (self.sums[shard - 1] if shard else 0)
        data = self.envs[shard].begin().get(f"{within}".encode("ascii"))
        return shard, within, None if data is None else self.loads(data)


# -- ASE-LMDB by hand (OMat24, OMol25, fairchem) -----------------------------------------------------------------------


def write_aselmdb(folder: Path, rng: Rng) -> str:
    def packed(thing: Any) -> bytes:
        return zlib.compress(json.dumps(thing).encode("utf-8"))

    pairs = [(b"%d" % i, packed({"numbers": [rng.randrange(1, 90) for _ in range(50 * i)]})) for i in range(1, 41)]
    gone = [3, 17]
    del pairs[16], pairs[2]
    pairs += [(b"nextid", packed(41)), (b"deleted_ids", packed(gone)), (b"metadata", packed({"format": "test"}))]
    folder.mkdir()
    put_all(str(folder / "set.aselmdb"), iter(pairs), subdir=False)
    return str(folder / "set.aselmdb")


class AseLmdb(Dataset):
    """One long transaction, as in the package's context manager."""

    def __init__(self, lmdb: Any, path: str) -> None:
        self.lmdb, self.path = lmdb, path
        env = self.open()
        with env.begin() as txn:
            nextid = self.unpacked(txn.get(b"nextid"))
            deleted = self.unpacked(txn.get(b"deleted_ids"))
            self.metadata = self.unpacked(txn.get(b"metadata"))
        env.close()
        self.ids = [i for i in range(1, nextid) if i not in set(deleted)]

    def open(self) -> Any:
        return self.lmdb.open(
            self.path, subdir=False, meminit=False, map_async=True, readonly=True, lock=False, readahead=False
        )

    @staticmethod
    def unpacked(data: bytes) -> Any:
        return json.loads(zlib.decompress(data).decode("utf-8"))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Any:
        with self.open() as env, env.begin(write=False) as txn:
            return self.metadata, self.unpacked(txn.get(b"%d" % self.ids[index]))


# -- proteins: TAPE ----------------------------------------------------------------------------------------------------


def write_tape(folder: Path, rng: Rng) -> str:
    records = [{"primary": "".join(rng.choices("ACDEFGHIKLMNPQRSTVWY", k=20 + 40 * i)), "id": i} for i in range(90)]
    pairs = [(str(i).encode(), pickle.dumps(record)) for i, record in enumerate(records)]
    put_all(str(folder), iter([*pairs, (b"num_examples", pickle.dumps(len(records)))]))
    return str(folder)


class Tape(Dataset):
    def __init__(self, lmdb: Any, root: str) -> None:
        self.lmdb = lmdb
        env = lmdb.open(str(root), max_readers=1, readonly=True, lock=False, readahead=False, meminit=False)
        with env.begin(write=False) as txn:
            self.n = pickle.loads(txn.get(b"num_examples"))
        self.env = env

    def __len__(self) -> int:
        return int(self.n)

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.n:
            raise IndexError(index)
        with self.env.begin(write=False) as txn:
            item = pickle.loads(txn.get(str(index).encode()))
        if "id" not in item:
            item["id"] = str(index)
        return item


# -- biomolecules: ATOM3D ----------------------------------------------------------------------------------------------


def write_atom3d(folder: Path, rng: Rng) -> str:
    ids = [f"{rng.randrange(1000, 9999)}.pdb" for _ in range(20)]

    def pairs() -> Iterator[tuple[bytes, bytes]]:
        for i, name in enumerate(ids):
            record = {"id": name, "atoms": [rng.random() for _ in range(300)], "types": {"id": "<class 'str'>"}}
            buffer = io.BytesIO()
            with gzip.GzipFile(fileobj=buffer, mode="wb", compresslevel=6) as f:
                f.write(json.dumps(record).encode())
            yield str(i).encode(), buffer.getvalue()
        yield b"num_examples", str(len(ids)).encode()
        yield b"serialization_format", b"json"
        yield b"id_to_idx", json.dumps({name: i for i, name in enumerate(ids)}).encode()

    put_all(str(folder), pairs())
    return str(folder)


class Atom3D(Dataset):
    def __init__(self, lmdb: Any, data_file: str, subdir: bool = True) -> None:
        self.lmdb = lmdb
        self.env = lmdb.open(
            data_file, max_readers=1, readonly=True, lock=False, readahead=False, meminit=False, subdir=subdir
        )
        with self.env.begin(write=False) as txn:
            self.n = int(txn.get(b"num_examples"))
            self.format = txn.get(b"serialization_format").decode()
            self.id_to_idx = json.loads(txn.get(b"id_to_idx")) if self.format == "json" else None

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        with self.env.begin(write=False) as txn:
            compressed = txn.get(str(index).encode())
            with gzip.GzipFile(fileobj=io.BytesIO(compressed), mode="rb") as f:
                item = json.loads(f.read())
        item["file_path"] = os.path.basename(self.env.path())
        return item


# -- molecules: Uni-Mol, Uni-Mol+ --------------------------------------------------------------------------------------


def write_unimol(folder: Path, rng: Rng) -> str:
    folder.mkdir()
    records = [
        {"atoms": ["C"] * (i % 40), "coordinates": [np.full((i % 40, 3), i, np.float32)] * (i % 11), "smi": "C" * i}
        for i in range(70)
    ]
    put_all(
        str(folder / "train.lmdb"),
        ((f"{i}".encode("ascii"), pickle.dumps(record, protocol=5)) for i, record in enumerate(records)),
        subdir=False,
    )
    return str(folder / "train.lmdb")


class UniMol(Dataset):
    """The keys from one environment that is dropped, the records from another that is opened at the first item."""

    def __init__(self, lmdb: Any, db_path: str) -> None:
        self.lmdb, self.db_path = lmdb, db_path
        assert os.path.isfile(db_path)
        env = self.connect_db(db_path)
        with env.begin() as txn:
            self._keys = list(txn.cursor().iternext(values=False))
        env.close()

    def connect_db(self, path: str, keep: bool = False) -> Any:
        env = self.lmdb.open(
            path, subdir=False, readonly=True, lock=False, readahead=False, meminit=False, max_readers=256
        )
        if keep:
            self.env = env
        return env

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: int) -> Any:
        if not hasattr(self, "env"):
            self.connect_db(self.db_path, keep=True)
        return pickle.loads(self.env.begin().get(self._keys[index]))


def write_unimol_plus(folder: Path, rng: Rng) -> str:
    folder.mkdir()
    put_all(
        str(folder / "train.lmdb"),
        (
            (i.to_bytes(4, byteorder="big"), gzip.compress(pickle.dumps({"pos": [rng.random()] * (i % 90)}), mtime=0))
            for i in range(300)
        ),
        subdir=False,
    )
    return str(folder / "train.lmdb")


class UniMolPlus(UniMol):
    def __getitem__(self, index: int) -> Any:
        if not hasattr(self, "env"):
            self.connect_db(self.db_path, keep=True)
        key = self._keys[index]
        return int.from_bytes(key, "big"), pickle.loads(gzip.decompress(self.env.begin().get(key)))


# -- tensorpack's LMDBSerializer ---------------------------------------------------------------------------------------


def write_tensorpack(folder: Path, rng: Rng) -> str:
    n = 50
    keys = [f"{i:08}".encode("ascii") for i in range(n)]
    points = [[rng.randbytes(700 * (i % 7)), i] for i in range(n)]
    pairs = [(key, pickle.dumps(point, protocol=-1)) for key, point in zip(keys, points, strict=True)]
    put_all(str(folder), iter([*pairs, (b"__keys__", pickle.dumps(keys, protocol=-1))]))
    return str(folder)


class Tensorpack(Dataset):
    """Walks a cursor of a transaction that stays open; every process calls reset_state first."""

    def __init__(self, lmdb: Any, path: str) -> None:
        self.lmdb, self.path = lmdb, path
        self.open()
        self.size = self.txn.stat()["entries"]
        listed = self.txn.get(b"__keys__")
        self.keys = pickle.loads(listed) if listed is not None else None
        self.close()

    def open(self) -> None:
        self.env = self.lmdb.open(
            self.path, subdir=os.path.isdir(self.path), readonly=True, lock=False, readahead=True,
            map_size=1099511627776 * 2, max_readers=100,
        )  # fmt: skip
        self.txn = self.env.begin()

    def close(self) -> None:
        self.env.close()
        del self.env, self.txn

    def __len__(self) -> int:
        return self.size - 1

    def __iter__(self) -> Iterator[list[bytes]]:
        with self.txn.cursor() as cursor:
            while cursor.next():
                key, value = cursor.item()
                if key != b"__keys__":
                    yield [key, value]

    def __getitem__(self, index: int) -> Any:
        self.open()
        try:
            if index == 0:
                return [(key, pickle.loads(value)) for key, value in self]
            return pickle.loads(self.txn.get(self.keys[index]))
        finally:
            self.close()


# -- latents (MeanFlow) ------------------------------------------------------------------------------------------------


def write_meanflow(folder: Path, rng: Rng) -> str:
    def pairs() -> Iterator[tuple[bytes, bytes]]:
        for i in range(40):
            moments = np.full((8, 16, 16), i, np.float32)
            yield f"{i}".encode(), pickle.dumps({"moments": moments, "moments_flip": moments[::-1], "label": i % 10})
        yield b"num_samples", b"40"
        yield b"created_at", b"2025-06-01"

    put_all(str(folder), pairs())
    return str(folder)


class MeanFlow(Dataset):
    """Opened at the first item of each process."""

    def __init__(self, lmdb: Any, path: str) -> None:
        self.lmdb, self.path = lmdb, path
        self.env: Any = None
        with lmdb.open(path, readonly=True, lock=False, readahead=False, meminit=False) as env, env.begin() as txn:
            self.n = int(txn.get(b"num_samples").decode())

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        if self.env is None:
            self.env = self.lmdb.open(self.path, readonly=True, lock=False, readahead=False, meminit=False)
        with self.env.begin(write=False, buffers=True) as txn:
            record = pickle.loads(txn.get(f"{index}".encode()))
        return record["moments"], record["moments_flip"], record["label"]


# -- structure caches (OpenFold3): prefixes ----------------------------------------------------------------------------


def write_prefixes(folder: Path, rng: Rng) -> str:
    def pairs() -> Iterator[tuple[bytes, bytes]]:
        for i in range(30):
            yield f"structure_data:{i:x}".encode(), json.dumps({"chains": [i] * (i * 40)}).encode()
            yield f"reference_molecule_data:{i:x}".encode(), pickle.dumps({"conformer": i})
        yield b"_type", b"ProteinMonomer"
        yield b"name", b"test"

    put_all(str(folder), pairs())
    return str(folder)


class Prefixes(Dataset):
    prefix = b"structure_data:"

    def __init__(self, lmdb: Any, path: str) -> None:
        self.lmdb = lmdb
        self.env = lmdb.open(path, readonly=True, lock=False, subdir=True)
        self.names = []
        with self.env.begin() as txn:
            cursor = txn.cursor()
            if cursor.set_range(self.prefix):
                for key in cursor.iternext(values=False):
                    if not key.startswith(self.prefix):
                        break
                    self.names.append(key[len(self.prefix) :].decode())

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Any:
        with self.env.begin(buffers=True) as txn:
            return json.loads(str(txn.get(self.prefix + self.names[index].encode()), "utf-8"))


#: name -> (writer, Dataset)
USERS: dict[str, tuple[Callable[[Path, Rng], str], Callable[[Any, str], Dataset]]] = {
    "STR": (write_str, Str),
    "BasicSR": (write_basicsr, BasicSR),
    "LSUN": (write_lsun, Lsun),
    "OC20": (write_oc20, Oc20),
    "ASE-LMDB": (write_aselmdb, AseLmdb),
    "TAPE": (write_tape, Tape),
    "ATOM3D": (write_atom3d, Atom3D),
    "Uni-Mol": (write_unimol, UniMol),
    "Uni-Mol+": (write_unimol_plus, UniMolPlus),
    "tensorpack": (write_tensorpack, Tensorpack),
    "MeanFlow": (write_meanflow, MeanFlow),
    "prefixes": (write_prefixes, Prefixes),
}


def comparable(item: Any) -> Any:
    """An item with its arrays as (dtype, shape, bytes)."""
    if isinstance(item, np.ndarray):
        return (str(item.dtype), item.shape, item.tobytes())
    if isinstance(item, (list, tuple)):
        return [comparable(part) for part in item]
    if isinstance(item, dict):
        return {key: comparable(part) for key, part in item.items()}
    return item


def outcome(dataset: Dataset) -> list[Any]:
    """Every item, in an order like a shuffled epoch's."""
    order = list(range(len(dataset)))
    random.Random(0).shuffle(order)
    return [comparable(dataset[i]) for i in order]


def close(dataset: Dataset) -> None:
    """Close what a Dataset holds open: py-lmdb opens a file once per process only."""
    held = [*vars(dataset).get("envs", []), vars(dataset).get("env"), *(vars(dataset).get("client") or {}).values()]
    for env in held:
        if env is not None:
            env.close()


# -- in other processes: functions that can be pickled -----------------------------------------------------------------


def outcome_of_pickled(data: bytes) -> list[Any]:
    """In a spawned worker: the Dataset as its parent had it, environments and all."""
    return outcome(pickle.loads(data))


def outcome_of_inherited(connection: Any, dataset: Dataset) -> None:
    """In a forked worker: the parent's own object."""
    try:
        connection.send(outcome(dataset))
    except BaseException as e:
        connection.send(f"{type(e).__name__}: {e}")
