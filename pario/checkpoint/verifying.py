"""Reads a committed checkpoint to its last byte: `python -m pario checkpoint verify`, and tests."""

from __future__ import annotations

import os
from collections.abc import Callable

from pario.checkpoint.manifest import MANIFEST, Manifest, Part, check_parts, part_name, read_manifest, read_part, sum_of
from pario.checkpoint.parts import PartReader
from pario.checkpoint.store import read_small
from pario.comm.memory import private_bytes
from pario.errors import ChecksumError, CorruptedError, FileError

__all__ = ["described", "problems"]


def described(folder: str) -> tuple[Manifest, list[Part]]:
    """What a committed checkpoint on the slow tier says of itself. Raises CorruptedError, MissingError, ReadError."""
    path = os.path.join(folder, MANIFEST)
    manifest = read_manifest(read_small(path), path)
    parts = []
    for node, total in enumerate(manifest.parts):
        path = os.path.join(folder, part_name(node) + ".json")
        data = read_small(path)
        found = f"{sum_of(data):016x}"
        if found != total:
            raise ChecksumError(f"the checksum of this file is {found}, the manifest says {total}", path=path)
        parts.append(read_part(data, path))
    check_parts(manifest, parts, folder)
    return manifest, parts


def problems(folder: str, progress: Callable[[int], None] = lambda nbytes: None) -> list[str]:
    """What is wrong with a committed checkpoint, one sentence each; none if every byte is as it was written."""
    try:
        _, parts = described(folder)
    except FileError as e:
        return [str(e)]
    found = []
    memory = private_bytes(max((nbytes for part in parts for _, nbytes in part.blocks), default=0))
    for part in parts:
        try:
            with PartReader(folder, part) as reader:
                for file in range(len(part.files)):
                    reader.open(file)
                for number, (_, nbytes) in enumerate(part.blocks):
                    try:
                        reader.read(number, memory[:nbytes])
                    except (ChecksumError, CorruptedError) as e:
                        found.append(str(e))
                    progress(nbytes)
        except FileError as e:
            found.append(str(e))
    return found
