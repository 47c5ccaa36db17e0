"""Checkpoints for others and from others, in bounded memory: safetensors files here, those of torch.distributed in
pario/adapters/dcp.py. One process.

    export  windows of whole arrays, in C order, as `read_all` makes them of any pieces
    import  block after block of one node's file, out of a `Foreign`

A safetensors file is a length (u64), a header (JSON: name -> type, shape, first and last byte) and the arrays' bytes.
Its names are the keys from the root with "." between them. What else the tree holds, and how its containers lie, is
text in its metadata; a file without that is a dict.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import chain, cycle
from math import prod
from typing import Any, Protocol

import numpy as np

from pario.checkpoint import layout, manifest, store
from pario.checkpoint.finding import Opened, described
from pario.checkpoint.flat import unflatten
from pario.checkpoint.restoring import Ahead, Wish
from pario.checkpoint.store import Name, Reader, Writer, empty_bytes, sum_of
from pario.checkpoint.tree import Box, Spec, runs
from pario.checkpoint.varying import add_rest
from pario.codec.library import own_version
from pario.errors import CorruptedError, FileError, OptionError
from pario.machine import replaced
from pario.text import DAMAGED, read_json

#: Bytes that are read at once, and then written, while the next ones are read.
WINDOW = 32 << 20
#: The format's own limit.
_MOST_HEADER = 100_000_000
_TYPES = {
    **{"<f8": "F64", "<f4": "F32", "<f2": "F16", "bfloat16": "BF16", "<c8": "C64", "|b1": "BOOL"},
    **{"|i1": "I8", "|u1": "U8"} | {f"<{kind}{n}": f"{kind.upper()}{8 * n}" for kind in "iu" for n in (2, 4, 8)},
    **{"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0"},
    **{f"float8_{name}fnuz": f"F8_{name.upper()}FNUZ" for name in ("e4m3", "e5m2")},
}
_NAMES = {word: name for name, word in _TYPES.items()}


# -- export ------------------------------------------------------------------------------------------------------------


def opened_at(path: str) -> Opened:
    """A committed checkpoint of the slow tier. Raises CorruptedError, MissingError, ReadError."""
    whole, parts = described(path)
    return Opened(whole, parts, [dict.fromkeys(range(len(parts)), path)])


def _node(node: Any) -> tuple[str, Any]:
    return next(iter(node.items()), ("", None)) if isinstance(node, dict) else ("", None)


def under(description: Any, keys: Sequence[str]) -> Any:
    """What lies there. Raises OptionError."""
    for number, key in enumerate(keys):
        kind, value = _node(description)
        pairs = value if kind == "dict" else list(enumerate(value)) if kind in ("list", "tuple", "ranks") else []
        found = {str(name): child for name, child in pairs}
        if key not in found:
            there = "/".join(keys[:number]) or "the root"
            raise OptionError(f"the checkpoint has no {key!r} in {there!r}; it has {list(found)[:20]}")
        description = found[key]
    return description


def named(node: Any, name: str = "") -> Iterator[tuple[str, int]]:
    """(keys with "." between them, number) of each array of a description."""
    kind, value = _node(node)
    if kind == "array":
        yield name, value
    elif kind in ("dict", "list", "tuple", "ranks"):
        for key, child in value if kind == "dict" else enumerate(value):
            yield from named(child, f"{name}.{key}" if name else str(key))


def windows(opened: Opened, order: Sequence[int], most: int = WINDOW) -> Iterator[np.ndarray]:
    """The bytes of these arrays, one after another, u8[up to `most`]. The next ones are read meanwhile; who asks for
    another one gives its memory back."""
    before: tuple[Callable[[], None], np.ndarray] = lambda: None, np.empty(0, np.uint8)
    buffers = cycle([empty_bytes(most), empty_bytes(most)])
    with Ahead(opened) as ahead:
        for nbytes, pieces in chain(_cut(opened, order, most), [(0, [])]):
            buffer = next(buffers)
            wait = ahead.start([Wish(array, box, buffer[at : at + n]) for array, box, at, n in pieces])
            before[0]()
            yield before[1]
            before = wait, buffer[:nbytes]


def _cut(opened: Opened, order: Sequence[int], most: int) -> Iterator[tuple[int, list[tuple[int, Box, int, int]]]]:
    """(bytes, pieces) of each window. pieces : (array, box, offset in the window, bytes)"""
    pieces: list[tuple[int, Box, int, int]] = []
    used = 0
    for number in order:
        spec = opened.manifest.specs[number]
        item, elements = max(1, spec.item), prod(spec.shape)
        for start in range(0, elements, most // item):
            stop = min(start + most // item, elements)
            # A block that two windows have parts of is read twice: each array begins a window, if it needs more than
            # is left of one.
            if pieces and used + (spec.nbytes if start == 0 else (stop - start) * item) > most:
                yield used, pieces
                used, pieces = 0, []
            for box in runs(spec.shape, start, stop):
                pieces.append((number, box, used, prod(box[1]) * item))
                used += pieces[-1][3]
    yield used, pieces


def to_safetensors(opened: Opened, dst: str, keys: Sequence[str] = ()) -> int:
    """Write the arrays below `keys`; returns how many. Complete and durable, or not there. Raises OptionError for what
    the format cannot hold, FileError."""
    specs, node = opened.manifest.specs, under(opened.manifest.description, keys)
    names = {number: name or "root" for name, number in named(node)}
    for number, name in names.items():
        if specs[number].dtype not in _TYPES:
            what = f"a safetensors file cannot hold the {specs[number].dtype} of {name!r}"
            raise OptionError(what, hint="Name a part of the tree without it: --under KEY/KEY")
    if len(set(names.values())) < len(names) or "__metadata__" in names.values():
        raise OptionError("two arrays have the same keys with '.' between them, or one is called __metadata__")

    def said(each: dict[str, Any]) -> Any:
        return {specs[each["array"]].kind: names[each["array"]]} if "array" in each else each

    text = json.dumps(read_json(json.dumps(node), said))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "pario": text}}
    # Each begins aligned, most of them at a page: what lies so is written past the page cache.
    order = sorted(names, key=lambda k: (-specs[k].item, specs[k].nbytes % store.PAGE != 0, k))
    at = 0
    for number in order:
        spec = specs[number]
        places = [at, at + spec.nbytes]
        header[names[number]] = {"dtype": _TYPES[spec.dtype], "shape": spec.shape, "data_offsets": places}
        at = places[1]
    head = json.dumps(header).encode()
    begin = store.whole_pages(8 + len(head))
    if begin - 8 > _MOST_HEADER:
        raise OptionError(f"a header of {begin:,} bytes, and the format allows {_MOST_HEADER:,}")
    try:
        with replaced(dst) as part, Writer(part, begin + at) as writer:
            writer.write(np.frombuffer((begin - 8).to_bytes(8, "little") + head.ljust(begin - 8), np.uint8), 0)
            for data in windows(opened, order):
                writer.write(data, begin)
                begin += data.size
            writer.sync()
    except OSError as e:
        raise FileError(f"cannot write it: {e.strerror or e}", path=dst) from e
    return len(order)


# -- import ------------------------------------------------------------------------------------------------------------


class Foreign(Protocol):
    """A tree that somebody else has written. description, specs : as in a manifest"""

    description: Any
    specs: list[Spec]

    def read(self, number: int, begin: int, out: np.ndarray) -> None:
        """Bytes of an array from `begin` on, in C order, into `out`, u8[n]. Raises FileError."""


class SafeTensors:
    """One file, or those of a folder. Every number in them is checked. Raises FileError."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.specs: list[Spec] = []
        self._places: list[tuple[Reader, int]] = []
        for path in paths:
            try:
                text = self._read(os.path.realpath(path))
            except DAMAGED as e:
                raise CorruptedError(f"this is no safetensors file, or it is damaged: {e}", path=path) from None
        names = {spec.path: number for number, spec in enumerate(self.specs)}
        if len(names) < len(self.specs):
            raise CorruptedError("two arrays have the same name", path=os.path.dirname(paths[0]))
        self.description: Any = {"dict": [[name, {"array": number}] for name, number in names.items()]}
        if len(paths) == 1 and text is not None:
            self._rebuild(text, names, paths[0])

    def _read(self, path: str) -> Any:
        reader = Reader(path, os.stat(path).st_size)
        head = np.empty(8, np.uint8)
        reader.read(head, 0)
        length, size = int(head.view("<u8")[0]), os.stat(path).st_size
        if not 2 <= length <= min(_MOST_HEADER, size - 8):
            raise ValueError(f"a header of {length:,} bytes")
        text = np.empty(length, np.uint8)
        reader.read(text, 8)
        header, at = read_json(text.tobytes()), 0
        said = header.pop("__metadata__", {}).get("pario")
        for name, each in sorted(header.items(), key=lambda pair: pair[1]["data_offsets"]):
            first, last = each["data_offsets"]
            dtype, shape = _NAMES.get(each["dtype"]), tuple(each["shape"])
            if dtype is None:
                raise ValueError(f"{name[:80]!r} has type {str(each['dtype'])[:20]}, which pario does not read")
            if any(type(n) is not int or n < 0 for n in (*shape, first, last)) or len(shape) > 64:
                raise ValueError(f"{name[:80]!r} has a shape or a place that is none")
            spec = Spec(name, dtype, shape, "array")
            if first != at or last - first != spec.nbytes or 8 + length + last > size:
                raise ValueError(f"{name[:80]!r} lies at {first:,} to {last:,}")
            self.specs.append(spec)
            self._places.append((reader, 8 + length + first))
            at = last
        return said

    def _rebuild(self, text: str, names: dict[str, int], path: str) -> None:
        """The tree that `to_safetensors` has noted."""

        def found(each: dict[str, Any]) -> Any:
            kind, value = _node(each)
            if kind not in ("array", "shard", "scalar"):
                return each
            number = names[value]
            self.specs[number] = self.specs[number]._replace(kind="scalar" if kind == "scalar" else "array")
            return {"array": number}

        seen: list[int] = []
        try:
            self.description = read_json(text, found)
            unflatten(self.description, seen.append, len(names))
            if sorted(seen) != list(range(len(names))):
                raise ValueError("it does not hold every array once")
        except (*DAMAGED, CorruptedError) as e:
            raise CorruptedError(f"the tree in its metadata is damaged: {e}", path=path) from None

    def read(self, number: int, begin: int, out: np.ndarray) -> None:
        reader, at = self._places[number]
        reader.read(out, at + begin)


def bring(foreign: Foreign, folder: str, step: int) -> Name:
    """Make a checkpoint of it, which begins a new run. Raises OptionError, CheckpointError, FileError."""
    store.make_folder(folder)
    with closing(store.Claim(folder)) as claim:
        if (taken := claim.take()) is not None:
            raise taken
        last = max((each.order[0] for each in store.listed(folder)), default=0)
        name = Name(step, store.next_id(last + 1, secrets.token_hex(4)))
        attempt = os.path.join(folder, f"{store.ATTEMPT}{name}")
        try:
            part = _write(foreign, attempt, name)
            specs, tree = foreign.specs, foreign.description
            own = '{"ranks": [' in json.dumps(tree)
            made = manifest.Manifest(step, name.id, time.time(), 1, 1, own_version(), "", tree, specs, [part], [], own)
            text = manifest.manifest_text(made, manifest.arrays_text(specs))
            store.write_small(attempt, manifest.MANIFEST, text, False)
            store.commit(attempt, os.path.join(folder, str(name)))
        except BaseException as e:
            store.discard(attempt)
            if isinstance(e, OSError) and not isinstance(e, FileError):
                raise store.failed(e, "it was not imported", folder) from e
            raise
    return name


def _write(foreign: Foreign, folder: str, name: Name) -> str:
    """The node's file and its description, whose checksum it returns."""
    specs = foreign.specs
    arranged = layout.arrange(layout.share_out(specs, [{}], [[0]])[0], 1)
    file = layout.finish(arranged, specs, layout.skeleton(arranged, specs), 0, 1)
    store.make_folder(folder)
    memory = empty_bytes(max((store.whole_pages(nbytes) for _, nbytes in file.blocks), default=store.PAGE))
    pieces, k = sorted(file.pieces, key=lambda each: each[2]), 0
    stored: list[manifest.Stored] = []
    with Writer(os.path.join(folder, manifest.part_name(0) + ".h5"), file.size) as writer:
        for offset, nbytes in file.blocks:
            data = memory[:nbytes]
            data[:] = 0
            while k < len(pieces) and pieces[k][2] < offset + nbytes:
                number, _, begin = pieces[k]
                end = begin + specs[number].nbytes
                first, last = max(begin, offset), min(end, offset + nbytes)
                foreign.read(number, first - begin, data[first - offset : last - offset])
                if end > offset + nbytes:
                    break
                k += 1
            stored.append(manifest.Stored(0, offset, nbytes, 0, sum_of(data)))
            writer.write(data, offset)
        for offset, rest in file.rest:
            writer.write(np.frombuffer(rest, np.uint8), offset)
        writer.sync()
    compact, blocks = file.compact[0], list(file.compact[1])
    part = manifest.Part(name.step, name.id, 0, file.size, compact, blocks, [each.sum for each in stored], stored)
    add_rest(part, file.rest)
    text = manifest.part_text(part, file.pieces_text)
    store.write_small(folder, manifest.part_name(0) + ".json", text)
    return f"{sum_of(text):016x}"
