"""The HDF5 file of a node: how h5py lays it out, without the data.

h5py makes the file once per structure of the tree, as a sparse file in memory: contiguous datasets, allocated early, at
aligned offsets. What HDF5 itself writes, the bytes between the data, is kept; each checkpoint is then written by plain
`pwrite` of these bytes and of the data, by several threads and processes, without HDF5's lock. h5py and h5dump read the
result:

    /arrays/PATH           a piece of 1 MiB or more: a dataset of the array's type and the piece's shape
    /packed                u8: all smaller pieces, one after another
    /packed_index          a row per smaller piece: path, dtype, shape (JSON), offset in /packed, nbytes, part_of (JSON)

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

__all__ = ["Row", "Skeleton", "skeleton"]

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


def skeleton(large: Sequence[tuple[Spec, Box]], nbytes: Sequence[int], rows: Sequence[Row], packed: int) -> Skeleton:
    """Lays out a file. large, nbytes : the large pieces and their sizes; rows : the small ones; packed : bytes of
    /packed"""
    with os.fdopen(os.memfd_create("pario-checkpoint", os.MFD_CLOEXEC), "r+b", buffering=0) as memory:
        with h5py.File(memory, "w", alignment_threshold=_ALIGN, alignment_interval=_ALIGN) as file:
            file.attrs["format"] = "pario checkpoint"
            offsets = [_dataset(file, spec, box) for spec, box in large]
            begin = _contiguous(file, "packed", (packed,), np.dtype(np.uint8)).id.get_offset() if packed else 0
            if rows:
                file["packed_index"] = _index(rows)
        size = memory.seek(0, os.SEEK_END)
        data = sorted([*zip(offsets, nbytes, strict=True), *([(begin, packed)] if packed else [])])
        rest, at = [], 0
        for offset, count in [*data, (size, 0)]:
            if offset > at:
                rest.append((at, os.pread(memory.fileno(), offset - at, at)))
            at = offset + count
    return Skeleton(size, offsets, begin, rest)


def _dataset(file: Any, spec: Spec, box: Box) -> int:
    dtype = dtype_of(spec.dtype)
    shape = box[1]
    if spec.dtype not in FOREIGN and (dtype.kind not in _NATIVE or dtype.itemsize > 16 or dtype == np.longdouble):
        shape, dtype = (*shape, dtype.itemsize), np.dtype(np.uint8)
    name = f"arrays/{spec.path or 'root'}"
    if spec.kind == "shard":
        name += "@" + ",".join(map(str, box[0]))
    made = _contiguous(file, name, shape, dtype)
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
