"""The HDF5 file of a node: how h5py lays it out, without the data.

h5py makes the file once per structure of the tree, as a sparse file in memory: contiguous datasets, allocated early, at
aligned offsets. What HDF5 itself writes, the bytes between the data, is kept; each checkpoint is then written by plain
`pwrite` of these bytes and of the data, by several threads and processes, without HDF5's lock. h5py and h5dump read the
result:

    /arrays/PATH           a piece of 1 MiB or more: a dataset of the array's type and the piece's shape
    /packed                u8: all smaller pieces, one after another
    /packed_index          a row per smaller piece: path, dtype, shape (JSON), offset in /packed, nbytes, part_of (JSON)

What an incremental checkpoint takes over from an older one is an external link to its file, which lies in the same
folder. A compressed checkpoint has its blocks, packed by a codec, in /blocks instead: only pario reads them.

PATH has the keys of the tree; a piece of a divided array ends with "@" and its offset, and says in the attributes
`global_shape` and `offset` what it is a part of. An array of a type that HDF5 does not know (bfloat16, text, dates) is
held as integers or bytes, and the attribute `dtype` names its type.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import h5py
import numpy as np

from pario.checkpoint.boxes import Box
from pario.checkpoint.tree import FOREIGN, Spec, dtype_of

__all__ = ["Row", "Skeleton", "coded_skeleton", "dataset_name", "skeleton"]

#: Datasets of at least so many bytes begin at a multiple of _ALIGN: O_DIRECT can write them.
_ALIGN = 4096
#: Kinds of NumPy dtypes that HDF5 has types for, bit by bit the same.
_NATIVE = "biufc"


class Row(NamedTuple):
    """A piece in /packed."""

    spec: Spec
    box: Box
    offset: int
    nbytes: int


class Skeleton(NamedTuple):
    """size : of the file in bytes; offsets : of the large pieces' bytes; packed : offset of /packed; rest : (offset,
    bytes) of everything else, in order"""

    size: int
    offsets: list[int]
    packed: int
    rest: list[tuple[int, bytes]]


def skeleton(
    large: Sequence[tuple[Spec, Box]], nbytes: Sequence[int], rows: Sequence[Row], packed: int,
    links: Sequence[tuple[str, str]] = (),
) -> Skeleton:  # fmt: skip
    """Lays out a file. large, nbytes : the large pieces and their sizes; rows : the small ones; packed : bytes of
    /packed; links : (name, file in the same folder that has it under this name)"""
    with _memory() as memory:
        with _file(memory) as file:
            offsets = [_dataset(file, spec, box) for spec, box in large]
            begin = _contiguous(file, "packed", (packed,), np.dtype(np.uint8)).id.get_offset() if packed else 0
            if rows:
                file["packed_index"] = _index(rows)
            for name, other in links:
                file[name] = h5py.ExternalLink(other, name)
        data = [*zip(offsets, nbytes, strict=True), *([(begin, packed)] if packed else [])]
        size, rest = _between(memory, data)
    return Skeleton(size, offsets, begin, rest)


def coded_skeleton(nbytes: int, codec: str) -> Skeleton:
    """A file with `nbytes` bytes of coded blocks, at `packed`."""
    with _memory() as memory:
        with _file(memory) as file:
            begin = _contiguous(file, "blocks", (nbytes,), np.dtype(np.uint8)).id.get_offset() if nbytes else 0
            file.attrs["codec"] = codec
            file.attrs["read with"] = "pario.Checkpointer, or python -m pario checkpoint restore-to-npz"
        size, rest = _between(memory, [(begin, nbytes)] if nbytes else [])
    return Skeleton(size, [], begin, rest)


def _memory() -> Any:
    """A file in memory."""
    return os.fdopen(os.memfd_create("pario-checkpoint", os.MFD_CLOEXEC), "r+b", buffering=0)


def _file(memory: Any) -> Any:
    file = h5py.File(memory, "w", alignment_threshold=_ALIGN, alignment_interval=_ALIGN)
    file.attrs["format"] = "pario checkpoint"
    return file


def _between(memory: Any, data: list[tuple[int, int]]) -> tuple[int, list[tuple[int, bytes]]]:
    """(size of the file, what HDF5 has written between the data). data : (offset, bytes)"""
    size = memory.seek(0, os.SEEK_END)
    rest, at = [], 0
    for offset, count in [*sorted(data), (size, 0)]:
        if offset > at:
            rest.append((at, os.pread(memory.fileno(), offset - at, at)))
        at = offset + count
    return size, rest


def dataset_name(spec: Spec, box: Box) -> str:
    """Of a large piece."""
    name = f"arrays/{spec.path or 'root'}"
    return name + "@" + ",".join(map(str, box[0])) if spec.kind == "shard" else name


def _dataset(file: Any, spec: Spec, box: Box) -> int:
    dtype = dtype_of(spec.dtype)
    shape = box[1]
    if spec.dtype not in FOREIGN and (dtype.kind not in _NATIVE or dtype.itemsize > 16 or dtype == np.longdouble):
        shape, dtype = (*shape, dtype.itemsize), np.dtype(np.uint8)
    made = _contiguous(file, dataset_name(spec, box), shape, dtype)
    made.attrs["dtype"] = spec.dtype
    if spec.kind == "shard":
        made.attrs["global_shape"] = spec.shape
        made.attrs["offset"] = box[0]
    return int(made.id.get_offset())


def _contiguous(file: Any, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """A dataset whose bytes have their offset now, and which HDF5 does not fill."""
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_layout(h5py.h5d.CONTIGUOUS)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)
    space = h5py.h5s.create_simple(shape)
    h5type = h5py.h5t.py_create(dtype, logical=True)
    return h5py.Dataset(h5py.h5d.create(file.id, name.encode(), h5type, space, dcpl=properties, lcpl=links))


def _index(rows: Sequence[Row]) -> np.ndarray:
    def part_of(row: Row) -> bytes:
        if row.spec.kind != "shard":
            return b""
        return json.dumps({"global_shape": row.spec.shape, "offset": row.box[0]}).encode()

    columns: list[list[Any]] = [
        [row.spec.path.encode() for row in rows],
        [row.spec.dtype.encode() for row in rows],
        [json.dumps(row.box[1]).encode() for row in rows],
        [row.offset for row in rows],
        [row.nbytes for row in rows],
        [part_of(row) for row in rows],
    ]
    names = ("path", "dtype", "shape", "offset", "nbytes", "part_of")
    kinds = ["i8" if isinstance(column[0], int) else f"S{max(1, *map(len, column))}" for column in columns]
    table = np.zeros(len(rows), list(zip(names, kinds, strict=True)))
    for name, column in zip(names, columns, strict=True):
        table[name] = column
    return table
