"""What a checkpoint says of itself: manifest.json of the whole, and node-NNNNN.json of each node's file.

    {"xxh3": "16 hex digits of the rest of the file",
     "body": ...}

manifest.json   the step, the tree without its arrays, the arrays (path, dtype, shape, kind), the number of ranks, the
                versions, and which files there are with the checksums of their descriptions. It is written last.
node-NNNNN.json the file's size, which part of which array lies where in it, and the checksum (XXH3 of 64 bits) of every
                block. The blocks cover the whole file, what HDF5 itself wrote included: no byte is unchecked.
                Offsets in `pieces` and `blocks` are those of the blocks one after another, and `stored` says where each
                of them lies, in this file or in that of an older checkpoint, and whether a codec has packed it. Older
                versions wrote no `stored` where all lay in this file, as they were.

Nothing in them is trusted: `read_manifest` and `read_part` check every number before anybody uses it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import numpy as np

from pario.checkpoint.flat import unflatten
from pario.checkpoint.store import ID, MOST_SMALL, Name, read_small, sum_of
from pario.checkpoint.tree import Box, Spec, reaches_out
from pario.codec.registry import CODECS
from pario.errors import CheckpointError, ChecksumError, CorruptedError, ParioError
from pario.text import DAMAGED, read_json

MANIFEST = "manifest.json"
#: Of the layout: older versions of pario read the first ones only.
PLAIN, STORED, PER_RANK = 1, 2, 3
_HEAD = re.compile(rb'\{"xxh3": "([0-9a-f]{16})",\n')
_HEAD_BYTES = 29
_PARENTS = re.compile(_HEAD.pattern + rb' "body": \{"format": "pario checkpoint", "parents": \[([^\]]*)\]')
#: bytes of a file, blocks, ranks: larger numbers are damage
_MOST = 1 << 60
_MOST_BLOCK = 64 << 20
#: Values of a description: more make Python objects of many GB.
_MOST_VALUES = 10_000_000


class Stored(NamedTuple):
    """Where a block lies. file : 0, the node's own, or the number of one of `Part.others` from 1 on; offset, nbytes :
    in it; coded : so many of these bytes are the codec's, 0: it is not coded; sum : of the `nbytes`"""

    file: int
    offset: int
    nbytes: int
    coded: int
    sum: int


@dataclass(frozen=True)
class Part:
    """One node's file, and what it takes from older ones.

    size : of the file; sums : u64 per block, of its bytes before a codec packed them
    stored : per block where it lies
    others : (checkpoint that wrote it, size) of the older files; codec : name, "" without one
    """

    step: int
    id: str
    node: int
    size: int
    pieces: list[tuple[int, Box, int]] = field(repr=False)
    blocks: list[tuple[int, int]] = field(repr=False)
    sums: list[int] = field(repr=False)
    stored: list[Stored] = field(default_factory=list, repr=False)
    others: list[tuple[str, int]] = field(default_factory=list)
    codec: str = ""

    @property
    def file(self) -> str:
        return part_name(self.node) + ".h5"

    @property
    def files(self) -> list[tuple[str, int]]:
        """(name, size) of the node's own file and of the older ones, all in the checkpoint's folder."""
        return [(self.file, self.size), *((taken_name(self.node, id_), size) for id_, size in self.others)]


@dataclass(frozen=True)
class Manifest:
    """The whole. parts : checksum of every node's description, "" where it was not known when this was written;
    parents : ids of the checkpoints that it goes on from, the last one first, a limited number, none in the first
    of a run, None in those of older versions; per_rank : the tree has PerRank values"""

    step: int
    id: str
    created: float
    ranks: int
    nodes: int
    pario: str
    version: str
    description: Any = field(repr=False)
    specs: list[Spec] = field(repr=False)
    parts: list[str] = field(repr=False)
    parents: list[str] | None = None
    per_rank: bool = False

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs)


def part_name(node: int) -> str:
    """Without ".h5" or ".json"."""
    return f"node-{node:05d}"


def taken_name(node: int, id_: str) -> str:
    """A node's file of the older checkpoint `id_`, in the folder of one that uses it."""
    return f"{part_name(node)}.from-{id_}.h5"


def pieces_text(pieces: list[tuple[int, Box, int]]) -> str:
    """The long part of a node's description, the same for all checkpoints of one structure."""
    return json.dumps([[number, *box, offset] for number, box, offset in pieces])


def part_text(part: Part, pieces: str) -> bytes:
    """pieces : its `pieces_text`"""
    body = {name: value for name, value in part.__dict__.items() if name != "pieces"}
    body["sums"] = [f"{each:016x}" for each in part.sums]
    body["stored"] = [[*each[:-1], f"{each.sum:016x}"] for each in part.stored]
    return _text_of({"format": "pario checkpoint part", "layout": STORED, "file": part.file, **body}, "pieces", pieces)


def arrays_text(specs: Sequence[Spec]) -> str:
    """The long part of a manifest, the same for all checkpoints of one structure."""
    return json.dumps(specs)


def manifest_text(manifest: Manifest, arrays: str) -> bytes:
    """arrays : its `arrays_text`"""
    body = {name: value for name, value in manifest.__dict__.items() if name != "specs"}
    first = {"format": "pario checkpoint", "parents": manifest.parents}  # where `parents_of` looks
    return _text_of({**first, "layout": PER_RANK if manifest.per_rank else PLAIN, **body}, "arrays", arrays)


def _text_of(body: dict[str, Any], name: str, long: str) -> bytes:
    """Raises CheckpointError for what could not be read again."""
    rest = f' "body": {json.dumps(body)[:-1]}, "{name}": {long}}}}}\n'.encode()
    if len(rest) > MOST_SMALL - _HEAD_BYTES or rest.count(b",") > _MOST_VALUES:
        raise CheckpointError(
            f"what describes it takes {len(rest):,} bytes and {rest.count(b','):,} values; {MOST_SMALL:,} and "
            f"{_MOST_VALUES:,} are the most",
            hint="Keep many numbers, and long texts, in arrays: np.asarray(numbers), np.frombuffer(text, np.uint8)",
        )
    return b'{"xxh3": "%016x",\n' % sum_of(rest) + rest


def _body(data: bytes, path: str, what: str) -> dict[str, Any]:
    head = _HEAD.match(data)
    if head is None:
        raise CorruptedError("this is not a description of a checkpoint, or it is damaged at its beginning", path=path)
    if int(head[1], 16) != sum_of(data[_HEAD_BYTES:]):
        raise ChecksumError(
            f"the checksum of this file is {sum_of(data[_HEAD_BYTES:]):016x}, it says {head[1].decode()}", path=path
        )
    try:
        if (values := data.count(b",")) > _MOST_VALUES:
            raise ValueError(f"it has {values:,} values")
        body = read_json(data)["body"]
        if not isinstance(body, dict) or body.get("format") != what:
            raise ValueError(f"the format is not {what!r}")
    except DAMAGED as e:
        raise CorruptedError(f"this is not a description of a checkpoint: {e}", path=path) from None
    if body.get("layout") not in (PLAIN, STORED, PER_RANK):
        raise CorruptedError(
            f"this checkpoint has layout {str(body.get('layout'))[:20]}, and this version of pario knows {PER_RANK}",
            path=path,
            hint="Read it with the version of pario that wrote it",
        )
    return body


def _number(value: Any, most: int = _MOST) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{str(value)[:40]} instead of a number from 0 to {most}")
    return value


def _text(value: Any, pattern: str = "") -> str:
    if not isinstance(value, str) or (pattern and not re.fullmatch(pattern, value)):
        raise ValueError(f"{str(value)[:40]!r} is no such text")
    return value


def _shape(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > 64:
        raise ValueError(f"{str(value)[:40]} is no shape")
    return tuple(map(_number, value))


def _spec(value: Any) -> Spec:
    path, dtype, shape, kind = value
    if kind not in ("array", "shard", "scalar"):
        raise ValueError(f"{str(kind)[:40]!r} is no kind of array")
    spec = Spec(_text(path), _text(dtype), _shape(shape), kind)
    _number(prod(spec.shape) * max(1, spec.item))
    return spec


def read_manifest(data: bytes, path: str) -> Manifest:
    """Raises CorruptedError, ChecksumError. path : of the file, for errors"""
    body = _body(data, path, "pario checkpoint")
    try:
        nodes = _number(body["nodes"], 1 << 24)
        made = Manifest(
            step=_number(body["step"]),
            id=_text(body["id"], ID),
            created=float(body["created"]),
            ranks=_number(body["ranks"], 1 << 24),
            nodes=nodes,
            pario=_text(body["pario"]),
            version=_text(body["version"]),
            description=body["description"],
            specs=[_spec(each) for each in body["arrays"]],
            parts=[_text(each, "([0-9a-f]{16})?") for each in body["parts"]],
            parents=None if body.get("parents") is None else [_text(each, ID) for each in body["parents"]],
            per_rank=body.get("per_rank") is True,
        )
        if len(made.parts) != nodes or not nodes:
            raise ValueError(f"{len(made.parts)} files of {nodes} nodes")
        seen: list[int] = []
        unflatten(made.description, seen.append, len(made.specs))
        if sorted(seen) != list(range(len(made.specs))):
            raise ValueError("the tree does not hold every array once")
    except ParioError as e:
        raise e.at(path=path) from None
    except DAMAGED as e:
        raise CorruptedError(f"the manifest of this checkpoint is damaged: {e}", path=path) from None
    return made


def manifest_in(folder: str) -> Manifest:
    """Of a checkpoint. Raises CorruptedError, ChecksumError, MissingError, ReadError."""
    path = os.path.join(folder, MANIFEST)
    return read_manifest(read_small(path), path)


def parents_of(folder: str, names: Sequence[Name], known: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """id -> `Manifest.parents` of committed checkpoints. names : the oldest first; known : what was read before.
    Checksums are not compared: by this only fewer are deleted than might be."""
    found: dict[str, list[str]] = {}
    before: list[str] = []
    for name in names:
        if name.order[0] == 0:  # of an older version, whose order was that of the steps
            found[name.id], before = before, [name.id]
        elif name.id in known:
            found[name.id] = known[name.id]
        else:
            with suppress(ParioError):
                head = _PARENTS.match(read_small(os.path.join(folder, str(name), MANIFEST)))
                found[name.id] = re.findall(ID, head[2].decode()) if head else []
    return found


def branch_of(tip: str, parents: Mapping[str, list[str]]) -> list[str]:
    """The ids from `tip` back to the beginning of its run, of those that `parents` has."""
    found: list[str] = []
    while tip in parents and tip not in found:
        found.append(tip)
        tip = next((each for each in parents[tip] if each in parents), "")
    return found


def read_part(data: bytes, path: str) -> Part:
    """Raises CorruptedError, ChecksumError. What it says of arrays, `check_parts` checks."""
    body = _body(data, path, "pario checkpoint part")
    try:
        made = Part(
            step=_number(body["step"]),
            id=_text(body["id"], ID),
            node=_number(body["node"], 1 << 24),
            size=_number(body["size"]),
            pieces=[
                (_number(number), (_shape(at), _shape(shape)), _number(offset))
                for number, at, shape, offset in body["pieces"]
            ],
            blocks=[(_number(offset), _number(nbytes, _MOST_BLOCK)) for offset, nbytes in body["blocks"]],
            sums=[_sum(each) for each in body["sums"]],
            **(_elsewhere(body) if body["layout"] == STORED else {}),
        )
        if body["layout"] != STORED:  # all blocks lie at their offsets in the node's file, as they are
            blocks = zip(made.blocks, made.sums, strict=True)
            made.stored.extend(Stored(0, offset, nbytes, 0, total) for (offset, nbytes), total in blocks)
        at = 0
        for offset, nbytes in made.blocks:
            if offset != at or not nbytes:
                raise ValueError(f"a block begins at {offset} where {at} is expected")
            at += nbytes
        if len(made.sums) != len(made.blocks):
            raise ValueError(f"{len(made.sums)} checksums of {len(made.blocks)} blocks")
        _check_stored(made)
    except DAMAGED as e:
        raise CorruptedError(f"the description of this node's file is damaged: {e}", path=path) from None
    return made


def part_in(folder: str, node: int, total: str | None = None) -> Part:
    """As `manifest_in`. total : the checksum that the description must have"""
    path = os.path.join(folder, part_name(node) + ".json")
    data = read_small(path)
    found = f"{sum_of(data):016x}"
    if total not in (None, found):
        raise ChecksumError(f"the checksum of this file is {found}, the manifest says {total}", path=path)
    return read_part(data, path)


def _sum(value: Any) -> int:
    return int(_text(value, "[0-9a-f]{16}"), 16)


def _elsewhere(body: dict[str, Any]) -> dict[str, Any]:
    stored = [
        Stored(_number(file), _number(offset), _number(nbytes), _number(coded), _sum(total))
        for file, offset, nbytes, coded, total in body["stored"]
    ]
    others = [(_text(id_, ID), _number(size)) for id_, size in body["others"]]
    codec = _text(body["codec"])
    if codec and codec not in CODECS:
        raise ValueError(f"{codec[:40]!r} is no codec of this version of pario")
    return {"stored": stored, "others": others, "codec": codec}


def _check_stored(part: Part) -> None:
    """Whether every block lies in a file, and the blocks cover the node's own. Raises ValueError."""
    sizes = [size for _, size in part.files]
    own = []
    for (_, nbytes), each in zip(part.blocks, part.stored, strict=True):
        if each.file >= len(sizes) or each.offset + each.nbytes > sizes[each.file]:
            raise ValueError(f"a block lies at {each.offset} of file {each.file}, outside of it")
        if each.nbytes > _MOST_BLOCK or (each.coded > each.nbytes if part.codec else each.coded):
            raise ValueError(f"{each.coded} coded bytes in {each.nbytes}")
        if not each.coded and each.nbytes < nbytes:
            raise ValueError(f"{each.nbytes} bytes hold a block of {nbytes}")
        if each.file == 0:
            own.append((each.offset, each.nbytes))
    at = 0
    for offset, nbytes in sorted(own):
        if offset != at:
            raise ValueError(f"a block begins at {offset} of the node's file where {at} is expected")
        at += nbytes
    if at != part.size:
        raise ValueError(f"the blocks in the node's file end at {at}, the file at {part.size}")


def check_parts(manifest: Manifest, parts: list[Part], path: str) -> None:
    """Whether these are the parts of this checkpoint, and make up its arrays. Raises CorruptedError."""
    try:
        boxes: list[list[Box]] = [[] for _ in manifest.specs]
        if [part.node for part in parts] != list(range(manifest.nodes)):
            raise ValueError(f"{len(parts)} parts of {manifest.nodes}")
        for part in parts:
            if (part.step, part.id) != (manifest.step, manifest.id):
                raise ValueError(f"node {part.node}'s file belongs to another checkpoint")
            last, end = 0, sum(part.blocks[-1]) if part.blocks else 0
            for number, box, offset in sorted(part.pieces, key=lambda each: each[2]):
                spec = manifest.specs[number]
                nbytes = prod(box[1]) * spec.item
                if offset < last or offset + nbytes > end:
                    raise ValueError(f"a piece of {spec.path!r} lies at {offset} in node {part.node}'s file")
                last = offset + nbytes
                boxes[number].append(box)
        for spec, own in zip(manifest.specs, boxes, strict=True):
            if own == [((0,) * len(spec.shape), spec.shape)] or (not own and not spec.nbytes):
                continue
            few = len(own) <= manifest.ranks  # looking for overlaps takes the square of their number
            wrong = cover(spec.shape, own) if few else f"{len(own)} parts, of {manifest.ranks} ranks"
            if wrong:
                raise ValueError(f"{spec.path!r}: {wrong}")
    except DAMAGED as e:
        raise CorruptedError(f"this checkpoint contradicts itself: {e}", path=path) from None


def cover(shape: tuple[int, ...], boxes: Sequence[Box]) -> str:
    """What keeps the boxes from making up an array of that shape, each element once; "" if nothing does. Boxes may be
    empty."""
    for offset, part in boxes:
        if len(offset) != len(shape) or len(part) != len(shape):
            return f"a part at {offset} of shape {part} has another number of axes than the array {shape}"
        if reaches_out((offset, part), shape):
            return f"the part at {offset} of shape {part} reaches out of the array {shape}"
    full = [(offset, part) for offset, part in boxes if prod(part)]
    held = sum(prod(part) for _, part in full)
    if len(full) > 1 and shape:
        first = np.array([offset for offset, _ in full])
        last = first + np.array([part for _, part in full])
        for k in range(len(full) - 1):
            both = (np.maximum(first[k], first[k + 1 :]) < np.minimum(last[k], last[k + 1 :])).all(axis=1)
            if both.any():
                other = full[k + 1 + int(both.argmax())]
                return f"the parts at {full[k][0]} of shape {full[k][1]} and at {other[0]} of shape {other[1]} overlap"
    if held != prod(shape):
        return f"the parts hold {held:,} elements, and an array {shape} has {prod(shape):,}"
    return ""
