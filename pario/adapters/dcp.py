"""Checkpoints of torch.distributed.checkpoint (DCP), out of and into those of pario, in one process and piece by piece.

DCP writes and reads what a planner hands to it. These two hand it one chunk at a time: no tree is ever in memory.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType

from pario.adapters.torch_checkpoint import TORCH, tensor_over, type_name
from pario.checkpoint.exchange import WINDOW, under
from pario.checkpoint.finding import Opened
from pario.checkpoint.flat import flatten, unflatten
from pario.checkpoint.restoring import Ahead, Wish
from pario.checkpoint.store import empty_bytes, whole_pages
from pario.checkpoint.tree import Leaves, Spec, dtype_of
from pario.errors import CorruptedError, OptionError


class _Saved(dcp.DefaultSavePlanner):
    """Of a tree whose tensors are on the device "meta", and hold the numbers of arrays in `numbers`."""

    def __init__(self, ahead: Ahead, specs: list[Spec], numbers: dict[int, int], dst: str) -> None:
        super().__init__()
        self._ahead, self._specs, self._numbers, self._dst = ahead, specs, numbers, dst
        self._groups: list[list[WriteItem]] = []  # of chunks that are read at once
        self._group: dict[MetadataIndex, int] = {}
        self._read: dict[MetadataIndex, torch.Tensor] = {}
        self._buffers = empty_bytes(WINDOW), empty_bytes(WINDOW)
        self._next: tuple[int, Callable[[], None], dict[MetadataIndex, torch.Tensor]] = -1, lambda: None, {}

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = [one for each in plan.items for one in (self._chunks(each) if each.tensor_data else [each])]
        left = 0
        for item in (each for each in items if each.tensor_data):
            left -= (nbytes := whole_pages(self._wish_of(item)[1]))
            if left < 0:
                self._groups.append([])
                left = WINDOW - nbytes
            self._groups[-1].append(item)
            self._group[item.index] = len(self._groups) - 1
        self.plan = SavePlan(items, plan.storage_data, plan.planner_data)
        return self.plan

    def _wish_of(self, item: WriteItem) -> tuple[int, int]:
        """(number of the array, bytes of the chunk)"""
        assert item.tensor_data is not None
        number = self._numbers[id(self.state_dict[item.index.fqn])]
        return number, prod(item.tensor_data.chunk.sizes) * self._specs[number].item

    def _chunks(self, item: WriteItem) -> list[WriteItem]:
        """Of at most WINDOW bytes, where the first axis can be cut."""
        assert item.tensor_data is not None
        whole = item.tensor_data.size
        properties = item.tensor_data.properties
        row = max(1, prod(whole[1:]) * properties.dtype.itemsize)
        rows, count = max(1, WINDOW // row), whole[0] if whole else 1
        found = []
        for k, first in enumerate(range(0, max(1, count), rows)):
            size = torch.Size([min(rows, count - first), *whole[1:]]) if whole else whole
            offset = torch.Size([first, *[0] * (len(whole) - 1)]) if whole else whole
            data = TensorWriteData(ChunkStorageMetadata(offset, size), properties, whole)
            index = MetadataIndex(item.index.fqn, offset, k)
            found.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return found

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.type == WriteItemType.BYTE_IO:
            return super().resolve_data(write_item)
        if write_item.index not in self._read:
            group = self._group[write_item.index]
            _, wait, self._read = self._next if self._next[0] == group else self._begin(group)
            wait()
            self._next = self._begin(group + 1)  # while this one is written
            self._ahead.aside(self._flush)
        return self._read.pop(write_item.index)

    def _flush(self) -> None:
        """The device begins to write now, and not at the last fsync."""
        for path in Path(self._dst).glob("*.distcp"):
            with suppress(OSError), path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _begin(self, group: int) -> tuple[int, Callable[[], None], dict[MetadataIndex, torch.Tensor]]:
        wishes, made, at = [], {}, 0
        for item in self._groups[group] if group < len(self._groups) else ():
            assert item.tensor_data is not None
            number, nbytes = self._wish_of(item)
            dtype, chunk = self._specs[number].dtype, item.tensor_data.chunk
            shape = tuple(chunk.sizes)
            fits = at + nbytes <= WINDOW
            memory = self._buffers[group % 2][at : at + nbytes] if fits else empty_bytes(nbytes)
            at += whole_pages(nbytes)
            wishes.append(Wish(number, (tuple(chunk.offsets), shape), memory))
            made[item.index] = tensor_over(memory.view(dtype_of(dtype)).reshape(shape), TORCH[dtype])
        return group, self._ahead.start(wishes), made


def to_dcp(opened: Opened, dst: str, keys: Sequence[str] = ()) -> int:
    """Write what lies below `keys` into a new folder, which `torch.distributed.checkpoint.load` reads on any number of
    ranks; returns how many arrays. Raises OptionError for what torch cannot hold, FileError."""
    specs, held, numbers = opened.manifest.specs, [], {}

    def tensor(number: int) -> torch.Tensor:
        spec = specs[number]
        if spec.dtype not in TORCH:
            raise OptionError(f"torch has no type for the {spec.dtype} of {spec.path!r}", hint="--under KEY/KEY")
        made = torch.empty(spec.shape, dtype=TORCH[spec.dtype], device="meta")
        held.append(made)
        numbers[id(made)] = number
        return made

    tree = unflatten(under(opened.manifest.description, keys), tensor, len(specs))
    if os.path.exists(os.path.join(dst, ".metadata")):
        raise OptionError(f"there is a checkpoint in {dst}", hint="Name a new folder")
    state = tree if isinstance(tree, dict) else {"root": tree}
    with warnings.catch_warnings(), Ahead(opened) as ahead:
        warnings.simplefilter("ignore")  # it tells that this process is alone
        # With nothing copied ahead a tensor is written before the next one is asked for: memory is used again.
        writer = dcp.FileSystemWriter(dst, per_thread_copy_ahead=0)
        dcp.save(state, storage_writer=writer, planner=_Saved(ahead, specs, numbers, dst), no_dist=True)
    return len(held)


class _Loaded(dcp.DefaultLoadPlanner):
    """Of a flat state; it runs no code of what is no tensor."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


@dataclass(frozen=True)
class _Name:
    """Of a tensor that is not read yet."""

    name: str


class _Names(Leaves):
    def __init__(self, tensors: dict[str, TensorStorageMetadata]) -> None:
        self._tensors = tensors

    def describe(self, leaf: Any) -> tuple[str, tuple[int, ...]] | None:
        if not isinstance(leaf, _Name):
            return None
        each = self._tensors[leaf.name]
        return type_name(each.properties.dtype), tuple(each.size)


class Dcp:
    """A checkpoint in a folder, as a `Foreign`: a tensor is read when its first byte is asked for, with small ones that
    follow, and kept until another one is. Values that are no tensors come with it. Raises FileError, OptionError."""

    def __init__(self, path: str) -> None:
        self._path = path
        owner = os.stat(os.path.join(path, ".metadata")).st_uid
        if owner not in (os.geteuid(), 0):
            raise CorruptedError(f"its description is a pickle of user {owner}, which could run code here", path=path)
        self._reader = dcp.FileSystemReader(path)
        try:
            self._metadata = self._reader.read_metadata()
        except Exception as e:
            raise CorruptedError(f"torch.distributed.checkpoint cannot read it: {e}", path=path) from e
        found = self._metadata.state_dict_metadata
        tensors = {name: each for name, each in found.items() if isinstance(each, TensorStorageMetadata)}
        plain: dict[str, Any] = {name: None for name in found if name not in tensors}
        self._load(plain)
        tree: dict[Any, Any] = {}
        places = self._metadata.planner_data or {}
        for name in found:
            *above, last = places.get(name, (name,))
            inner = tree
            for key in above:
                inner = inner.setdefault(key, {})
            inner[last] = _Leaf(_Name(name) if name in tensors else plain[name])
        flat = flatten(_listed(tree), _Names(tensors))
        self.description, self.specs = flat.description, flat.specs
        self._names = [leaf.name for leaf in flat.values]
        self._last: dict[int, np.ndarray] = {}
        self._memory = empty_bytes(WINDOW)  # of what was read last: fresh memory for each took as long as reading

    def _load(self, state: dict[str, Any]) -> None:
        planner = _Loaded()
        try:
            self._reader.set_up_storage_reader(self._metadata, True)
            planner.set_up_planner(state, self._metadata, True)
            plan = self._reader.prepare_local_plan(planner.create_local_plan())
            self._reader.read_data(planner.finish_plan(plan), planner).wait()
        except Exception as e:
            raise CorruptedError(f"torch.distributed.checkpoint cannot read it: {e}", path=self._path) from e

    def read(self, number: int, begin: int, out: np.ndarray) -> None:
        if number not in self._last:
            wanted: dict[str, torch.Tensor] = {}
            self._last, at = {}, 0
            if self.specs[number].nbytes > self._memory.size:
                self._memory = empty_bytes(self.specs[number].nbytes)
            for k in range(number, len(self.specs)):  # it and those that follow
                spec = self.specs[k]
                if at + spec.nbytes > self._memory.size:
                    break
                memory = self._last[k] = self._memory[at : at + spec.nbytes]
                at += whole_pages(spec.nbytes)
                array = memory.view(dtype_of(spec.dtype)).reshape(spec.shape)
                wanted[self._names[k]] = tensor_over(array, TORCH[spec.dtype])
            self._load(wanted)
        np.copyto(out, self._last[number][begin : begin + out.size])


class _Leaf(NamedTuple):
    value: Any


def _listed(node: Any) -> Any:
    """With lists where all keys are numbers: DCP has those of dicts as text."""
    if isinstance(node, _Leaf):
        return node.value
    made = {key: _listed(child) for key, child in node.items()}
    return [made[key] for key in sorted(made)] if made and all(type(key) is int for key in made) else made
