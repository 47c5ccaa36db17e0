"""Datasets as projects publish them: what their writers put into an LMDB, what a user of pario writes, and the truth.

Each writer is imitated by hand after its source: keys, serialisation, files or folders, counts beside the samples. The
truth comes from py-lmdb and the library that made the values (protobuf, OpenCV, pickle, json, gzip, zlib, msgpack,
NumPy); pario has no part in it. docs/your-dataset.md is a table of LAYOUTS.
"""

from __future__ import annotations

import collections
import gzip
import io
import json
import os
import pickle
import sys
import types
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import lmdb
import msgpack
import numpy as np
from caffe2_message import tensor_protos
from datum_message import Message, datum, encoded

Pair = tuple[bytes, bytes]
#: array of a batch -> its row
Row = dict[str, Any]
#: the records of a file in cursor order -> (position, or number of the sample) -> row
Truth = Callable[[list[Pair]], dict[int, Row]]

#: What takes a user more lines than three.
LONGER = {"folder2lmdb_images": 7}
#: samples of most sets, of which batches of 7 make neither whole steps nor one
N = 24
#: what a module of rosinality's is called, and what its pickles name
CODES: Any = types.ModuleType("dataset")
CODES.CodeRow = collections.namedtuple("CodeRow", "top bottom filename", module="dataset")
sys.modules["dataset"] = CODES


class Layout(NamedTuple):
    """One kind of dataset.

    dataset, keys, values : in a few words
    lines : what a user writes after `import pario`
    files : path -> what the project's writer puts, in its order
    truth : of each file
    samples : how many there are
    subdir : whether a file is a folder with a data.mdb
    commit_every : puts per transaction; 0: one for all
    """

    dataset: str
    keys: str
    values: str
    lines: str
    files: Callable[[], dict[str, Iterable[Pair]]]
    truth: Truth
    samples: int = N
    subdir: bool = True
    commit_every: int = 0


def write(layout: Layout, folder: Path) -> None:
    for name, pairs in layout.files().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with lmdb.open(os.fspath(path), map_size=1 << 26, subdir=layout.subdir, sync=False) as env:
            waiting = list(pairs)
            step = layout.commit_every or len(waiting)
            for begin in range(0, len(waiting), step):
                with env.begin(write=True) as txn:
                    for key, value in waiting[begin : begin + step]:
                        txn.put(key, value)


def truth(layout: Layout, folder: Path) -> dict[int, Row]:
    """id in a batch -> row, counted through the files in the order of their names."""
    found: dict[int, Row] = {}
    before = 0
    for path in sorted(folder / name for name in layout.files()):
        with lmdb.open(os.fspath(path), subdir=layout.subdir, readonly=True, lock=False) as env, env.begin() as txn:
            pairs = [(bytes(key), bytes(value)) for key, value in txn.cursor()]
        found |= {before + i: row for i, row in layout.truth(pairs).items()}
        before += len(pairs)
    return found


def lines_of(layout: Layout) -> int:
    """How many lines a user writes, without empty ones."""
    return len(["import pario", *filter(None, layout.lines.splitlines())])


def load(layout: Layout, shuffle: Any) -> Any:
    """Execute the lines, in the current folder, with another batch size and order. -> the Loader"""
    size, order = "64, ", 'shuffle="global"'
    assert layout.lines.count(size) == layout.lines.count(order) == 1
    names: dict[str, Any] = {}
    exec("import pario\n" + layout.lines.replace(size, "7, ").replace(order, f"shuffle={shuffle!r}"), names)
    return names["loader"]


def check(batch: Any, right: dict[int, Row]) -> list[int]:
    """The ids of the batch, whose rows are those of the truth."""
    ids: list[int] = batch.ids.tolist()
    assert not batch.skipped
    for k, i in enumerate(ids):
        assert set(batch.keys()) == right[i].keys()
        for name, theirs in right[i].items():
            same(batch[name][k], theirs)
    return ids


def same(mine: Any, theirs: Any) -> None:
    if isinstance(mine, np.generic) and not isinstance(theirs, np.generic):
        mine = mine.item()
    assert type(mine) is type(theirs)
    if isinstance(theirs, dict):
        assert list(mine) == list(theirs)
    if isinstance(theirs, (dict, list, tuple)):
        assert len(mine) == len(theirs)
        for key in theirs if isinstance(theirs, dict) else range(len(theirs)):
            same(mine[key], theirs[key])
    elif isinstance(theirs, np.ndarray):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        np.testing.assert_array_equal(mine, theirs)
    else:
        assert mine == theirs


def records(row: Callable[[bytes], Any], *others: bytes, prefix: bytes = b"") -> Truth:
    """Each record whose key begins with `prefix` and is none of `others`; a row that is no dict is the array "data"."""

    def of(pairs: list[Pair]) -> dict[int, Row]:
        chosen = {i: row(v) for i, (k, v) in enumerate(pairs) if k.startswith(prefix) and k not in others}
        return {i: value if type(value) is dict else {"data": value} for i, value in chosen.items()}

    return of


def whole(row: Callable[[bytes], Any], *others: bytes, prefix: bytes = b"") -> Truth:
    """The same, where the whole value is one object, a dict perhaps."""
    return records(lambda value: {"data": row(value)}, *others, prefix=prefix)


def numbered(fields: dict[str, tuple[str, Callable[[bytes], Any]]], numbers: range) -> Truth:
    def of(pairs: list[Pair]) -> dict[int, Row]:
        known = dict(pairs)
        return {n: {f: row(known[(key % n).encode()]) for f, (key, row) in fields.items()} for n in numbers}

    return of


# -- pictures ----------------------------------------------------------------------------------------------------------


def pixels(i: int, height: int = 0, width: int = 0) -> np.ndarray:
    """u8[h, w, 3], smooth; of sizes that differ from picture to picture unless one is given."""
    height, width = height or 8 + i % 5, width or 9 + i % 7
    corners = np.random.default_rng(i).integers(0, 256, (2, 2, 3), np.uint8)
    return cv2.resize(corners, (width, height), interpolation=cv2.INTER_LINEAR)


def picture(i: int, height: int = 0, width: int = 0, kind: str = ".jpg") -> bytes:
    return cv2.imencode(kind, pixels(i, height, width))[1].tobytes()


def bgr(value: bytes) -> np.ndarray:
    return cv2.imdecode(np.frombuffer(value, np.uint8), cv2.IMREAD_COLOR)


def rgb(value: bytes) -> np.ndarray:
    return bgr(value)[:, :, ::-1]


def rgb_of(height: int, width: int) -> Callable[[bytes], np.ndarray]:
    """All pictures of these tests are smaller."""
    return lambda value: cv2.resize(rgb(value), (width, height), interpolation=cv2.INTER_LINEAR)


def text_in_picture(i: int) -> tuple[Pair, Pair]:
    return (b"image-%09d" % i, picture(i)), (b"label-%09d" % i, "abcdeé123"[i % 7 :].encode())


# -- Caffe, Caffe2 -----------------------------------------------------------------------------------------------------


def datum_row(value: bytes) -> Row:
    message = Message.FromString(value)
    shape = message.channels, message.height, message.width
    if message.encoded:
        array = bgr(message.data).transpose(2, 0, 1)
    elif message.float_data:
        array = np.array(message.float_data, np.float32).reshape(shape)
    else:
        array = np.frombuffer(message.data, np.uint8).reshape(shape)
    return {"data": array, "label": message.label}


def channels_first(i: int, channels: int, size: int) -> np.ndarray:
    return np.ascontiguousarray(pixels(i, size, size).transpose(2, 0, 1)[:channels])


def protos(i: int) -> tuple[np.ndarray, int]:
    return np.random.default_rng(i).standard_normal((3, 4, 5)).astype("f4"), i % 10


def as_protos(i: int) -> bytes:
    data, label = protos(i)
    return tensor_protos(("FLOAT", data.shape, data.reshape(-1).tolist()), ("INT32", (1,), [label]))


# These messages are made by hand: the truth is what was put into them.


def protos_truth(pairs: list[Pair]) -> dict[int, Row]:
    return {i: dict(zip(("data", "label"), protos(int(key)), strict=True)) for i, (key, _) in enumerate(pairs)}


def protos_images(pairs: list[Pair]) -> dict[int, Row]:
    resized = rgb_of(64, 64)
    return {i: {"data": resized(picture(int(key))), "label": int(key) % 10} for i, (key, _) in enumerate(pairs)}


# -- molecules, proteins -----------------------------------------------------------------------------------------------


def molecule(i: int) -> tuple[list[int], np.ndarray]:
    """Atomic numbers, and positions f64[n, 3]."""
    draw = np.random.default_rng(i)
    n = 2 + i % 6
    return draw.integers(1, 90, n).tolist(), draw.standard_normal((n, 3))


def oc20(i: int) -> bytes:
    """A namespace stands in for torch_geometric's Data, whose fields are attributes, too."""
    numbers, positions = molecule(i)
    data = types.SimpleNamespace(
        atomic_numbers=np.array(numbers, "f4"), pos=positions.astype("f4"), y_relaxed=-1.5 * i, sid=i, tags=[0, 1]
    )
    return pickle.dumps(data, protocol=-1)


def oc20_row(value: bytes) -> Row:
    data = pickle.loads(value)
    return {"atomic_numbers": data.atomic_numbers, "pos": data.pos}


def ase_file(first: int, n: int, gone: tuple[int, ...]) -> list[Pair]:
    def packed(thing: Any) -> bytes:
        return zlib.compress(json.dumps(thing).encode("utf-8"))

    def row(i: int) -> dict[str, Any]:
        numbers, positions = molecule(i)
        return {
            "numbers": {"__ndarray__": [[len(numbers)], "int64", numbers]},
            "positions": {"__ndarray__": [list(positions.shape), "float64", positions.reshape(-1).tolist()]},
            "pbc": {"__ndarray__": [[3], "bool", [True, True, False]]},
            "energy": -0.25 * i,
            "unique_id": f"{i:032x}",
            "data": {},
        }

    pairs = [(b"%d" % i, packed(row(first + i))) for i in range(1, n + 1) if i not in gone]
    return [*pairs, (b"nextid", packed(n + 1)), (b"deleted_ids", packed(list(gone))), (b"metadata", packed({}))]


def ase_row(value: bytes) -> Row:
    said = json.loads(zlib.decompress(value))
    arrays = {name: said[name]["__ndarray__"] for name in ("numbers", "positions")}
    found = {name: np.array(items, kind).reshape(shape) for name, (shape, kind, items) in arrays.items()}
    return {**found, "energy": said["energy"]}


def tape(i: int) -> bytes:
    n = 5 + 7 * i % 40
    numbers = np.random.default_rng(i).integers(0, 8, n)
    item = {"primary": "ACDEFGHIKL"[i % 9 :] * 3, "protein_length": n, "id": str(i), "ss8": numbers}
    return pickle.dumps(item)


def zipped(data: bytes) -> bytes:
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", compresslevel=6, mtime=0) as file:
        file.write(data)
    return buffer.getvalue()


def atom3d(dumps: Callable[[Any], bytes], serialisation: bytes) -> list[Pair]:
    """A data frame is a dict of columns, index and data, and its type stands beside it."""
    pairs = []
    for i in range(N):
        numbers, positions = molecule(i)
        rows = [[number, *xyz] for number, xyz in zip(numbers, positions.tolist(), strict=True)]
        frame = {"columns": ["element", "x", "y", "z"], "index": list(range(len(rows))), "data": rows}
        item = {"atoms": frame, "id": f"{i}.pdb", "types": {"atoms": "<class 'pandas.core.frame.DataFrame'>"}}
        pairs.append((str(i).encode(), zipped(dumps(item))))
    names = {f"{i}.pdb": i for i in range(N)}
    return [
        *pairs, (b"num_examples", b"%d" % N), (b"serialization_format", serialisation), (b"id_to_idx", dumps(names))
    ]  # fmt: skip


ATOM3D_META = (b"num_examples", b"serialization_format", b"id_to_idx")


def unimol(i: int) -> dict[str, Any]:
    numbers, positions = molecule(i)
    return {
        "atoms": ["HCNOF"[number % 5] for number in numbers],
        "coordinates": [(positions + k).astype("f4") for k in range(1 + i % 4)],
        "smi": "C" * i,
        "target": np.array([0.5 * i]),
    }


def unimol_row(value: bytes) -> Row:
    said = pickle.loads(value)
    return {name: said[name] for name in ("atoms", "coordinates")}


# -- pairs of image and label, features, latents -----------------------------------------------------------------------


def tensorpack(dumps: Callable[[Any], bytes]) -> dict[str, Iterable[Pair]]:
    keys = [f"{i:08}".encode("ascii") for i in range(N)]
    pairs = [(key, dumps([picture(i), i % 10])) for i, key in enumerate(keys)]
    return {"train.lmdb": [*pairs, (b"__keys__", dumps(keys))]}


def folder2lmdb(dumps: Callable[[Any], bytes]) -> dict[str, Iterable[Pair]]:
    keys = [f"{i}".encode("ascii") for i in range(N)]
    pairs = [(key, dumps((picture(i), i % 10))) for i, key in enumerate(keys)]
    return {"train.lmdb": [*pairs, (b"__keys__", dumps(keys)), (b"__len__", dumps(len(keys)))]}


def packed(thing: Any) -> bytes:
    """As msgpack-numpy does, which projects patch into msgpack."""

    def known(item: Any) -> Any:
        assert isinstance(item, np.ndarray)
        return {b"nd": True, b"type": item.dtype.str, b"kind": b"", b"shape": item.shape, b"data": item.tobytes()}

    return bytes(msgpack.packb(thing, use_bin_type=True, default=known))


def unpacked(value: bytes) -> Any:
    def known(said: dict[Any, Any]) -> Any:
        return np.frombuffer(said[b"data"], said[b"type"]).reshape(said[b"shape"]) if b"nd" in said else said

    return msgpack.unpackb(value, raw=False, object_hook=known, strict_map_key=False)


def pair_row(loads: Callable[[bytes], Any]) -> Callable[[bytes], Row]:
    return lambda value: dict(zip(("data", "label"), loads(value), strict=True))


def decoded_pair(value: bytes) -> Row:
    image, label = msgpack.unpackb(value)
    return {"image": rgb_of(224, 224)(image), "label": label}


def regions(i: int) -> dict[str, np.ndarray]:
    """Boxes of a picture with what a detector says of them, some in each."""
    draw, n = np.random.default_rng(i), 3 + i % 4
    sizes = {"norm_bb": (n, 6), "features": (n, 16), "conf": (n,), "soft_labels": (n, 5)}
    return {name: draw.standard_normal(size).astype("f2") for name, size in sizes.items()}


def uniter(dumps: Callable[[dict[str, np.ndarray]], bytes]) -> dict[str, Iterable[Pair]]:
    names = [f"coco_train2014_{i * 7919:012d}.npz" for i in range(N)]
    pairs = [(name.encode("utf-8"), dumps(regions(i))) for i, name in enumerate(names)]
    return {"feat.lmdb": [*pairs, (b"__keys__", json.dumps(names).encode("utf-8"))]}


def npz(arrays: dict[str, np.ndarray]) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def npz_row(value: bytes) -> Row:
    with np.load(io.BytesIO(value), allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def vilbert() -> dict[str, Iterable[Pair]]:
    ids = [str(i * 7919).encode() for i in range(N)]

    def item(i: int) -> dict[str, Any]:
        arrays = {"features": regions(i)["features"], "boxes": regions(i)["norm_bb"].astype("f4")}
        return {"image_id": ids[i], "image_h": 480, "image_w": 640, "num_boxes": 3 + i % 4, **arrays}

    pairs = [(key, pickle.dumps(item(i))) for i, key in enumerate(ids)]
    return {"features.lmdb": [*pairs, (b"keys", pickle.dumps(ids))]}


def meanflow() -> dict[str, Iterable[Pair]]:
    def item(i: int) -> dict[str, Any]:
        moments = np.random.default_rng(i).standard_normal((8, 4, 4)).astype("f4")
        return {"moments": moments, "moments_flip": moments[::-1], "label": i % 10}

    pairs = [(f"{i}".encode(), pickle.dumps(item(i))) for i in range(N)]
    return {"latents.lmdb": [*pairs, (b"num_samples", b"%d" % N), (b"created_at", b"2025-06-01 12:00:00")]}


def codes(i: int) -> Any:
    draw = np.random.default_rng(i)
    return CODES.CodeRow(top=draw.integers(0, 512, (4, 4)), bottom=draw.integers(0, 512, (8, 8)), filename=f"{i}.png")


def codes_row(value: bytes) -> Row:
    return dict(pickle.loads(value)._asdict())


def openfold(dumps: Callable[[Any], bytes]) -> dict[str, Iterable[Pair]]:
    structures = [(f"structure_data:{i:x}abc".encode(), dumps({"chains": {"A": {"length": i}}})) for i in range(N)]
    molecules = [(f"reference_molecule_data:{i}".encode(), dumps({"conformer": i})) for i in range(N // 2)]
    return {"cache.lmdb": [(b"_type", b"ProteinMonomer"), (b"name", b"pdb"), *structures, *molecules]}


def as_json(thing: Any) -> bytes:
    return json.dumps(thing).encode("utf-8")


def videos(i: int) -> bytes:
    return b"\0\0\0\x20ftypisom" + np.random.default_rng(i).bytes(500 + 300 * i)


LAYOUTS: dict[str, Layout] = {
    "mnist": Layout(
        "Caffe: MNIST",
        "`%08d`",
        "`Datum`, grey pixels",
        'loader = pario.Loader("train_lmdb", 64, pario.decode.Datum(), shuffle="global")',
        lambda: {"train_lmdb": [(b"%08d" % i, datum(channels_first(i, 1, 28), i % 10)) for i in range(N)]},
        records(datum_row),
    ),
    "cifar": Layout(
        "Caffe: CIFAR-10",
        "`%05d`",
        "`Datum`, pixels",
        'loader = pario.Loader("train_lmdb", 64, pario.decode.Datum(scale=1 / 255), shuffle="global")',
        lambda: {"train_lmdb": [(b"%05d" % i, datum(channels_first(i, 3, 32), i % 10)) for i in range(N)]},
        records(lambda value: {**datum_row(value), "data": datum_row(value)["data"] * np.float32(1 / 255)}),
    ),
    "convert_imageset": Layout(
        "Caffe: `convert_imageset`",
        "`%08d_` and a path",
        "`Datum`, pixels of one size",
        'loader = pario.Loader("train_lmdb", 64, pario.decode.Datum(), shuffle="global")',
        lambda: {"train_lmdb": [
            (b"%08d_n%d/%d.JPEG" % (i, i % 3, i), datum(channels_first(i, 3, 16), i % 3)) for i in range(N)
        ]},
        records(datum_row),
    ),
    "convert_imageset_encoded": Layout(
        "Caffe: `convert_imageset --encoded`",
        "`%08d_` and a path",
        "`Datum` around an image file of one size",
        'loader = pario.Loader("train_lmdb", 64, pario.decode.Datum(layout="HWC"), shuffle="global")',
        lambda: {"train_lmdb": [(b"%08d_%d.jpg" % (i, i), encoded(picture(i, 16, 20), i % 3)) for i in range(N)]},
        records(lambda value: {**datum_row(value), "data": datum_row(value)["data"].transpose(1, 2, 0)}),
    ),
    "caffe_features": Layout(
        "Caffe: `extract_features`",
        "`%010d`",
        "`Datum`, floats",
        'loader = pario.Loader("features", 64, pario.decode.Datum(), shuffle="global")',
        lambda: {"features": [
            (b"%010d" % i, datum(np.random.default_rng(i).standard_normal((40, 1, 1)).astype("f4"))) for i in range(N)
        ]},
        records(datum_row),
    ),
    "caffe2": Layout(
        "Caffe2",
        "`%d`",
        "`TensorProtos`, numbers",
        'loader = pario.Loader("train.lmdb", 64, pario.decode.TensorProtos(), shuffle="global")',
        lambda: {"train.lmdb": [(b"%d" % i, as_protos(i)) for i in range(N)]},
        protos_truth,
    ),
    "caffe2_encoded": Layout(
        "Caffe2, encoded",
        "`%d`",
        "`TensorProtos` with an image file",
        'loader = pario.Loader("train.lmdb", 64, pario.decode.TensorProtos(image=pario.decode.Image(64)), '
        'shuffle="global")',
        lambda: {"train.lmdb": [
            (b"%d" % i, tensor_protos(("STRING", (1,), [picture(i)]), ("INT32", (1,), [i % 10]))) for i in range(N)
        ]},
        protos_images,
    ),
    "lsun": Layout(
        "LSUN",
        "hash, 40 digits",
        "JPEG or WebP file",
        'loader = pario.Loader("bedroom_train_lmdb", 64, pario.decode.preset("lsun", size=256), shuffle="global")',
        lambda: {"bedroom_train_lmdb": [
            (np.random.default_rng(i).bytes(20).hex().encode(), picture(i, kind=(".jpg", ".webp")[i % 2]))
            for i in range(N)
        ]},
        records(rgb_of(256, 256)),
    ),
    "str": Layout(
        "scene text: deep-text-recognition, PARSeq, OpenOCR, MMOCR",
        "`image-%09d`, `label-%09d`, from 1; `num-samples`",
        "image file; UTF-8",
        'fields = {"image": ("image-%09d", pario.decode.Image((32, 100))), '
        '"label": ("label-%09d", pario.decode.Text())}\n'
        'loader = pario.Loader("train", 64, fields=fields, shuffle="global")',
        lambda: {"train": [
            *(pair for i in range(1, N + 1) for pair in text_in_picture(i)),
            (b"num-samples", b"%d" % N),
        ]},
        numbered({"image": ("image-%09d", rgb_of(32, 100)), "label": ("label-%09d", bytes.decode)}, range(1, N + 1)),
        commit_every=1000,
    ),
    "basicsr": Layout(
        "BasicSR, MMEditing, mmagic: REDS, DIV2K, Vimeo",
        "name of the image",
        "PNG of one size",
        'loader = pario.Loader("train_sharp.lmdb", 64, pario.decode.Image(color="BGR"), shuffle="global")',
        lambda: {"train_sharp.lmdb": [
            (b"%03d/%08d" % (i // 10, i % 10), picture(i, 12, 14, ".png")) for i in range(N)
        ]},
        records(bgr),
    ),
    "imaginaire": Layout(
        "NVIDIA imaginaire, one LMDB per data type",
        "sequence/name",
        "original file",
        'loader = pario.Loader("train/images", 64, pario.decode.Image((256, 512)), shuffle="global")',
        lambda: {"train/images": [(b"seq%04d/frame_%06d" % (i // 10, i), picture(i)) for i in range(N)]},
        records(rgb_of(256, 512)),
    ),
    "oc20": Layout(
        "OC20, OC22: `data.0000.lmdb`, ...",
        "`%d`, `length`",
        "pickled torch_geometric `Data`",
        'loader = pario.Loader("train/data.%04d.lmdb", 64, pario.decode.preset("oc20", allow_pickle=True), '
        'shuffle="global")',
        lambda: {f"train/data.{shard:04d}.lmdb": [
            *((b"%d" % i, oc20(100 * shard + i)) for i in range(n)), (b"length", pickle.dumps(n, protocol=-1))
        ] for shard, n in enumerate((13, 1, 20))},
        records(oc20_row, b"length"),
        samples=34,
        subdir=False,
        commit_every=1,
    ),
    "matsciml": Layout(
        "Open MatSci ML",
        "`%d`, `metadata`",
        "pickled dict",
        'loader = pario.Loader("train/data.lmdb", 64, pario.decode.Pickle(allow=[]), shuffle="global")',
        lambda: {"train/data.lmdb": [
            *((b"%d" % i, pickle.dumps({"pos": molecule(i)[1], "targets": {"energy": -0.5 * i}})) for i in range(N)),
            (b"metadata", pickle.dumps({"origin": "test"})),
        ]},
        whole(pickle.loads, b"metadata"),
        subdir=False,
    ),
    "ase": Layout(
        "ASE-LMDB: OMat24, OMol25",
        "`%d` from 1; `nextid`, `deleted_ids`, `metadata`",
        "zlib of ASE's JSON",
        'decoder = pario.decode.preset("ase", fields=["numbers", "positions", "energy"])\n'
        'loader = pario.Loader("train/*.aselmdb", 64, decoder, shuffle="global")',
        lambda: {"train/data0000.aselmdb": ase_file(0, 20, (3, 17)), "train/data0001.aselmdb": ase_file(20, 12, ())},
        records(ase_row, b"nextid", b"deleted_ids", b"metadata"),
        samples=30,
        subdir=False,
        commit_every=1,
    ),
    "tape": Layout(
        "TAPE",
        "`%d`, `num_examples`",
        "pickled dict",
        'loader = pario.Loader("pfam_train.lmdb", 64, pario.decode.preset("tape", allow=[]), shuffle="global")',
        lambda: {"pfam_train.lmdb": [
            *((str(i).encode(), tape(i)) for i in range(N)), (b"num_examples", pickle.dumps(N))
        ]},
        records(pickle.loads, b"num_examples"),
    ),
    "atom3d": Layout(
        "ATOM3D, JSON",
        "`%d`, `num_examples`, `serialization_format`, `id_to_idx`",
        "gzip of JSON",
        'loader = pario.Loader("data", 64, pario.decode.preset("atom3d"), shuffle="global")',
        lambda: {"data": atom3d(as_json, b"json")},
        whole(lambda value: json.loads(gzip.decompress(value)), *ATOM3D_META),
    ),
    "atom3d_msgpack": Layout(
        "ATOM3D, MessagePack",
        "the same",
        "gzip of MessagePack",
        'loader = pario.Loader("data", 64, pario.decode.Gzip(pario.decode.MsgPack()), shuffle="global")',
        lambda: {"data": atom3d(msgpack.packb, b"msgpack")},
        whole(lambda value: msgpack.unpackb(gzip.decompress(value)), *ATOM3D_META),
    ),
    "unimol": Layout(
        "Uni-Mol",
        "`%d`",
        "pickled dict",
        'loader = pario.Loader("train.lmdb", 64, pario.decode.preset("unimol", allow=[]), shuffle="global")',
        lambda: {"train.lmdb": [(b"%d" % i, pickle.dumps(unimol(i), protocol=5)) for i in range(N)]},
        records(unimol_row),
        subdir=False,
    ),
    "unimol_plus": Layout(
        "Uni-Mol+: PCQM4Mv2",
        "integer, 4 bytes, big-endian",
        "gzip of a pickled dict",
        'loader = pario.Loader("train.lmdb", 64, pario.decode.preset("unimol+", allow=[]), shuffle="global")',
        lambda: {"train.lmdb": [
            ((251 + i).to_bytes(4, "big"), gzip.compress(pickle.dumps(unimol(i)), mtime=0)) for i in range(N)
        ]},
        whole(lambda value: pickle.loads(gzip.decompress(value))),
        subdir=False,
    ),
    "unimol_plus_oc20": Layout(
        "Uni-Mol+: OC20",
        "`%d`",
        "pickled dict",
        'loader = pario.Loader("train.lmdb", 64, pario.decode.Pickle(allow=[]), shuffle="global")',
        lambda: {"train.lmdb": [(b"%d" % (i * 7919), pickle.dumps(unimol(i), protocol=-1)) for i in range(N)]},
        whole(pickle.loads),
        subdir=False,
    ),
    "tensorpack": Layout(
        "tensorpack, pickles",
        "`%08d`, `__keys__`",
        "pickled list: image file, label",
        'loader = pario.Loader("train.lmdb", 64, pario.decode.preset("tensorpack", allow=[]), shuffle="global")',
        lambda: tensorpack(lambda point: pickle.dumps(point, protocol=-1)),
        records(pair_row(pickle.loads), b"__keys__"),
    ),
    "tensorpack_msgpack": Layout(
        "tensorpack, MessagePack",
        "the same",
        "list: image file, label",
        'loader = pario.Loader("train.lmdb", 64, pario.decode.preset("tensorpack"), shuffle="global")',
        lambda: tensorpack(packed),
        records(pair_row(unpacked), b"__keys__"),
    ),
    "folder2lmdb": Layout(
        "folder2lmdb, MessagePack",
        "`%d`, `__keys__`, `__len__`",
        "pair: image file, label",
        'loader = pario.Loader("train.lmdb", 64, pario.decode.MsgPack("all"), shuffle="global")',
        lambda: folder2lmdb(packed),
        records(pair_row(unpacked), b"__keys__", b"__len__"),
    ),
    "folder2lmdb_pickle": Layout(
        "folder2lmdb, pickles",
        "the same",
        "the same",
        'loader = pario.Loader("train.lmdb", 64, pario.decode.Pickle("all", allow=[]), shuffle="global")',
        lambda: folder2lmdb(pickle.dumps),
        records(pair_row(pickle.loads), b"__keys__", b"__len__"),
    ),
    "folder2lmdb_images": Layout(
        "folder2lmdb, MessagePack, as pixels",
        "the same",
        "the same",
        """\
import cv2, msgpack, numpy as np

def decode(value):
    image, label = msgpack.loads(value)
    pixels = cv2.imdecode(np.frombuffer(image, "u1"), cv2.IMREAD_COLOR)[:, :, ::-1]
    return {"image": cv2.resize(pixels, (224, 224)), "label": label}

loader = pario.Loader("train.lmdb", 64, decode, shuffle="global")""",
        lambda: folder2lmdb(packed),
        records(decoded_pair, b"__keys__", b"__len__"),
    ),
    "uniter_npz": Layout(
        "UNITER, HERO: compressed features",
        "name of the image and `.npz`; `__keys__`",
        "`.npz` file",
        'loader = pario.Loader("feat.lmdb", 64, pario.decode.Npz(ragged="list"), shuffle="global")',
        lambda: uniter(npz),
        records(npz_row, b"__keys__"),
    ),
    "uniter_msgpack": Layout(
        "UNITER, HERO: features",
        "the same",
        "MessagePack of arrays",
        'loader = pario.Loader("feat.lmdb", 64, pario.decode.MsgPack("all", ragged="list"), shuffle="global")',
        lambda: uniter(packed),
        records(unpacked, b"__keys__"),
    ),
    "vilbert": Layout(
        "ViLBERT, MMF",
        "id of the image; `keys`",
        "pickled dict of arrays",
        'loader = pario.Loader("features.lmdb", 64, pario.decode.Pickle("all", allow=[], ragged="list"), '
        'shuffle="global")',
        vilbert,
        records(pickle.loads, b"keys"),
    ),
    "stylegan2": Layout(
        "StyleGAN2 (rosinality)",
        "resolution and `-%05d`; `length`",
        "JPEG",
        'loader = pario.Loader("ffhq.lmdb", 64, pario.decode.Image(), select=b"256-", shuffle="global")',
        lambda: {"ffhq.lmdb": [
            *((b"%d-%05d" % (r, i), picture(i, r // 16, r // 16)) for i in range(N) for r in (128, 256, 512)),
            (b"length", b"%d" % N),
        ]},
        records(rgb, prefix=b"256-"),
    ),
    "stylegan2_two": Layout(
        "the same, two resolutions",
        "the same",
        "the same",
        'image = pario.decode.Image()\nloader = pario.Loader("ffhq.lmdb", 64, '
        'fields={"small": ("128-%05d", image), "large": ("512-%05d", image)}, shuffle="global")',
        lambda: LAYOUTS["stylegan2"].files(),
        numbered({"small": ("128-%05d", rgb), "large": ("512-%05d", rgb)}, range(N)),
    ),
    "vqvae2": Layout(
        "VQ-VAE-2 (rosinality)",
        "`%d`, `length`",
        "pickled `CodeRow`",
        'decoder = pario.decode.Pickle(["top", "bottom", "filename"], allow=["dataset.CodeRow"])\n'
        'loader = pario.Loader("codes.lmdb", 64, decoder, shuffle="global")',
        lambda: {"codes.lmdb": [
            *((str(i).encode(), pickle.dumps(codes(i))) for i in range(N)), (b"length", str(N).encode())
        ]},
        records(codes_row, b"length"),
    ),
    "clipbert": Layout(
        "ClipBERT, images",
        "id of the image",
        "JPEG",
        'loader = pario.Loader("coco.lmdb", 64, pario.decode.Image((384, 384)), shuffle="global")',
        lambda: {"coco.lmdb": [(str(i * 7919).encode("utf-8"), picture(i)) for i in range(N)]},
        records(rgb_of(384, 384)),
    ),
    "clipbert_video": Layout(
        "ClipBERT, videos",
        "id of the video",
        "mp4 file",
        'loader = pario.Loader("msrvtt.lmdb", 64, lambda value: {"video": value}, shuffle="global")',
        lambda: {"msrvtt.lmdb": [(b"video%d" % i, videos(i)) for i in range(N)]},
        records(lambda value: {"video": value}),
    ),
    "meanflow": Layout(
        "MeanFlow and other latents",
        "`%d`, `num_samples`, `created_at`",
        "pickled dict of arrays",
        'loader = pario.Loader("latents.lmdb", 64, pario.decode.Pickle("all", allow=[]), shuffle="global")',
        meanflow,
        records(pickle.loads, b"num_samples", b"created_at"),
    ),
    "openfold3": Layout(
        "OpenFold3, JSON",
        "`structure_data:`, `reference_molecule_data:` and a name; `_type`, `name`",
        "JSON",
        'loader = pario.Loader("cache.lmdb", 64, pario.decode.Json(), select=b"structure_data:", shuffle="global")',
        lambda: openfold(as_json),
        whole(json.loads, prefix=b"structure_data:"),
    ),
    "openfold3_pickle": Layout(
        "OpenFold3, pickles",
        "the same",
        "pickled dict",
        'decoder = pario.decode.Pickle(allow=[])\n'
        'loader = pario.Loader("cache.lmdb", 64, decoder, select=b"reference_molecule_data:", shuffle="global")',
        lambda: openfold(pickle.dumps),
        whole(pickle.loads, prefix=b"reference_molecule_data:"),
        samples=N // 2,
    ),
}
