"""What a checkpoint says of itself: manifest.json of the whole, and node-NNNNN.json of each node's file.

    {"xxh3": "16 hex digits of the rest of the file",
     "body": ...}

manifest.json   the step, the tree without its arrays, the arrays (path, dtype, shape, kind), the number of ranks, the
                versions, and which files there are with the checksums of their descriptions. It is written last.
node-NNNNN.json the file's size, which part of which array lies where in it, and the checksum (XXH3 of 64 bits) of every
                block. The blocks cover the whole file, what HDF5 itself wrote included: no byte is unchecked.

Nothing in them is trusted: `read_manifest` and `read_part` check every number before anybody uses it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

import xxhash

from pario.checkpoint.boxes import Box, cover, volume
from pario.checkpoint.tree import Spec, item_bytes, unflatten
from pario.errors import ChecksumError, CorruptedError, ParioError

__all__ = [
    "Manifest", "Part", "arrays_text", "check_parts", "manifest_text", "part_name", "part_text", "pieces_text",
    "read_manifest", "read_part", "sum_of", "text_of",
]  # fmt: skip

MANIFEST = "manifest.json"
VERSION = 1
_HEAD = re.compile(rb'\{"xxh3": "([0-9a-f]{16})",\n')
_HEAD_BYTES = 29
#: bytes of a file, blocks, ranks: larger numbers are damage
_MOST = 1 << 60
_MOST_BLOCK = 64 << 20


@dataclass(frozen=True)
class Part:
    """One node's file. sums : u64 per block"""

    step: int
    id: str
    node: int
    size: int
    pieces: list[tuple[int, Box, int]] = field(repr=False)
    blocks: list[tuple[int, int]] = field(repr=False)
    sums: list[int] = field(repr=False)

    @property
    def file(self) -> str:
        return part_name(self.node) + ".h5"


@dataclass(frozen=True)
class Manifest:
    """The whole. parts : checksum of every node's description, "" where it was not known when this was written"""

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

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs)


def part_name(node: int) -> str:
    """Without ".h5" or ".json"."""
    return f"node-{node:05d}"


def sum_of(data: Any) -> int:
    """XXH3 with 64 bits of anything with a buffer."""
    return int(xxhash.xxh3_64_intdigest(data))


def text_of(what: Manifest | Part) -> bytes:
    """As it is written to the file."""
    return manifest_text(what) if isinstance(what, Manifest) else part_text(what, pieces_text(what.pieces))


def pieces_text(pieces: list[tuple[int, Box, int]]) -> str:
    """The long part of a node's description, the same for all checkpoints of one structure."""
    return json.dumps([[number, *box, offset] for number, box, offset in pieces])


def part_text(part: Part, pieces: str) -> bytes:
    body = {name: value for name, value in part.__dict__.items() if name != "pieces"}
    body["sums"] = [f"{each:016x}" for each in part.sums]
    return _text_of({"format": "pario checkpoint part", "layout": VERSION, "file": part.file, **body}, "pieces", pieces)


def arrays_text(specs: list[Spec]) -> str:
    """The long part of a manifest, the same for all checkpoints of one structure."""
    return json.dumps(specs)


def manifest_text(manifest: Manifest, arrays: str | None = None) -> bytes:
    """arrays : its `arrays_text`, if that is known"""
    body = {name: value for name, value in manifest.__dict__.items() if name != "specs"}
    arrays = arrays_text(manifest.specs) if arrays is None else arrays
    return _text_of({"format": "pario checkpoint", "layout": VERSION, **body}, "arrays", arrays)


def _text_of(body: dict[str, Any], name: str, long: str) -> bytes:
    rest = f' "body": {json.dumps(body)[:-1]}, "{name}": {long}}}}}\n'.encode()
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
        body = json.loads(data)["body"]
        if not isinstance(body, dict) or body.get("format") != what:
            raise ValueError(f"the format is not {what!r}")
    except (ValueError, KeyError, RecursionError, TypeError) as e:
        raise CorruptedError(f"this is not a description of a checkpoint: {e}", path=path) from None
    if body.get("layout") != VERSION:
        raise CorruptedError(
            f"this checkpoint has the layout {str(body.get('layout'))[:20]}, and this version of pario knows {VERSION}",
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
    _number(volume(spec.shape) * max(1, item_bytes(spec.dtype)))
    return spec


def read_manifest(data: bytes, path: str) -> Manifest:
    """Raises CorruptedError, ChecksumError. path : of the file, for errors"""
    body = _body(data, path, "pario checkpoint")
    try:
        nodes = _number(body["nodes"], 1 << 24)
        made = Manifest(
            step=_number(body["step"]),
            id=_text(body["id"], "[0-9a-f]{16}"),
            created=float(body["created"]),
            ranks=_number(body["ranks"], 1 << 24),
            nodes=nodes,
            pario=_text(body["pario"]),
            version=_text(body["version"]),
            description=body["description"],
            specs=[_spec(each) for each in body["arrays"]],
            parts=[_text(each, "([0-9a-f]{16})?") for each in body["parts"]],
        )
        if len(made.parts) != nodes or not nodes:
            raise ValueError(f"{len(made.parts)} files of {nodes} nodes")
        seen: list[int] = []
        unflatten(made.description, seen.append, len(made.specs))
        if sorted(seen) != list(range(len(made.specs))):
            raise ValueError("the tree does not hold every array once")
    except ParioError as e:
        raise e.at(path=path) from None
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as e:
        raise CorruptedError(f"the manifest of this checkpoint is damaged: {e}", path=path) from None
    return made


def read_part(data: bytes, path: str) -> Part:
    """Raises CorruptedError, ChecksumError. What it says of arrays, `check_parts` checks."""
    body = _body(data, path, "pario checkpoint part")
    try:
        made = Part(
            step=_number(body["step"]),
            id=_text(body["id"], "[0-9a-f]{16}"),
            node=_number(body["node"], 1 << 24),
            size=_number(body["size"]),
            pieces=[
                (_number(number), (_shape(at), _shape(shape)), _number(offset))
                for number, at, shape, offset in body["pieces"]
            ],
            blocks=[(_number(offset), _number(nbytes, _MOST_BLOCK)) for offset, nbytes in body["blocks"]],
            sums=[int(_text(each, "[0-9a-f]{16}"), 16) for each in body["sums"]],
        )
        at = 0
        for offset, nbytes in made.blocks:
            if offset != at or not nbytes:
                raise ValueError(f"a block begins at {offset} where {at} is expected")
            at += nbytes
        if at != made.size or len(made.sums) != len(made.blocks):
            raise ValueError(f"{len(made.blocks)} blocks end at {at}, the file at {made.size}")
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise CorruptedError(f"the description of this node's file is damaged: {e}", path=path) from None
    return made


def check_parts(manifest: Manifest, parts: list[Part], path: str) -> None:
    """Whether these are the parts of this checkpoint, and make up its arrays. Raises CorruptedError."""
    try:
        boxes: list[list[Box]] = [[] for _ in manifest.specs]
        if [part.node for part in parts] != list(range(manifest.nodes)):
            raise ValueError(f"{len(parts)} parts of {manifest.nodes}")
        for part in parts:
            if (part.step, part.id) != (manifest.step, manifest.id):
                raise ValueError(f"node {part.node}'s file belongs to another checkpoint")
            last = 0
            for number, box, offset in sorted(part.pieces, key=lambda each: each[2]):
                spec = manifest.specs[number]
                nbytes = volume(box[1]) * item_bytes(spec.dtype)
                if offset < last or offset + nbytes > part.size:
                    raise ValueError(f"a piece of {spec.path!r} lies at {offset} in node {part.node}'s file")
                last = offset + nbytes
                boxes[number].append(box)
        for spec, own in zip(manifest.specs, boxes, strict=True):
            if own == [((0,) * len(spec.shape), spec.shape)] or (not own and not spec.nbytes):
                continue
            wrong = cover(spec.shape, own)
            if wrong:
                raise ValueError(f"{spec.path!r}: {wrong}")
    except (ValueError, IndexError) as e:
        raise CorruptedError(f"this checkpoint contradicts itself: {e}", path=path) from None
