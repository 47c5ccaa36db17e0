"""Who writes what where, for any number of ranks and nodes, and resharding between them: without MPI, the real plans,
files and reads of each rank one after another."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pario.checkpoint import layout
from pario.checkpoint.finding import Opened
from pario.checkpoint.flat import Flat, flatten
from pario.checkpoint.layout import arrange, finish, share_out, skeleton
from pario.checkpoint.manifest import (
    Manifest,
    Part,
    Stored,
    arrays_text,
    check_parts,
    cover,
    manifest_text,
    part_name,
    part_text,
    pieces_text,
    read_manifest,
    read_part,
)
from pario.checkpoint.restoring import Wish, read_all
from pario.checkpoint.store import Writer, empty_bytes, sum_of
from pario.checkpoint.tree import Bits, Box, Leaves, Shard, dtype_of, meet, runs, slices
from pario.comm.solo import Solo

LEAVES = Leaves()


def parts_of(n: int, ranks: int, uneven: bool) -> list[tuple[int, int]]:
    """(begin, end) per rank; uneven: the first ones get nothing or little."""
    cuts = [n * (k * k if uneven else k) // (ranks * ranks if uneven else ranks) for k in range(ranks + 1)]
    return list(itertools.pairwise(cuts))


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    return {
        "one": rng.random(5000),
        "rows": rng.integers(0, 1 << 30, (61, 40), dtype=np.int32),
        "columns": (rng.random((30, 90)) + 1j).astype(np.complex64),
        "middle": rng.integers(0, 99, (7, 20, 11)).astype(np.uint8),
        "short": np.arange(4, dtype=np.float16),
        "bits": rng.integers(0, 1 << 16, (50, 64), dtype=np.uint16),
        "alike": rng.random((40, 70)),
        "text": np.array(["a", "bcd"] * 700),
        "little": np.arange(9, dtype=np.int16),
        "none": np.zeros((0, 3)),
    }


#: the axis along which an array is divided
AXES = {"one": 0, "rows": 0, "columns": 1, "middle": 1, "short": 0, "bits": 1}


def tree_of(rank: int, ranks: int) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, array in arrays().items():
        axis = AXES.get(name)
        if axis is None:
            made[name] = array
            continue
        begin, end = parts_of(array.shape[axis], ranks, uneven=name in ("rows", "columns"))[rank]
        part = array[(slice(None),) * axis + (slice(begin, end),)]
        value = Bits(part, "bfloat16") if name == "bits" else part
        made[name] = Shard(value, array.shape, tuple(begin if k == axis else 0 for k in range(array.ndim)))
    return made


def saved(folder: Path, nodes: list[list[int]]) -> Opened:
    """What ranks on these nodes save, each rank's part by its own plan."""
    ranks = sum(map(len, nodes))
    flats: list[Flat] = [flatten(tree_of(rank, ranks), LEAVES) for rank in range(ranks)]
    specs = flats[0].specs
    assert all(flat.specs == specs for flat in flats)
    shards = [{n: box for n, box in enumerate(flat.boxes) if specs[n].kind == "shard"} for flat in flats]
    parts = []
    for node, own in enumerate(nodes):
        arranged = arrange(share_out(specs, shards, nodes)[node], len(own))
        made = skeleton(arranged, specs)
        path = str(folder / (part_name(node) + ".h5"))
        writer = Writer(path, made.size)
        done: dict[int, int] = {}
        for seat, rank in enumerate(own):
            file = finish(arranged, specs, made, seat, len(own))
            memory = np.zeros(file.staging_bytes, np.uint8)
            for array, box, start, stop, at, nbytes in file.copies:
                target = memory[at : at + nbytes].view(dtype_of(specs[array].dtype))
                assert flats[rank].boxes[array] == box
                LEAVES.copy(flats[rank].values[array], target, slice(start, stop))
            for block, at in file.puts:
                offset, nbytes = file.blocks[block]
                writer.write(memory[at : at + nbytes], offset)
                assert block not in done, "two ranks write one block"
                done[block] = sum_of(memory[at : at + nbytes])
        for offset, data in made.rest:
            writer.write(np.frombuffer(data, np.uint8), offset)
        writer.close()
        assert sorted(done) == list(range(len(file.blocks)))
        whole = [(*block, done[n]) for n, block in enumerate(file.blocks)]
        whole = sorted([*whole, *((offset, len(data), sum_of(data)) for offset, data in made.rest)])
        part = Part(0, "0" * 16, node, made.size, file.pieces, [b[:2] for b in whole], [b[2] for b in whole])
        # As older versions wrote it: without `stored`, all blocks at their offsets in the file.
        rest = part_text(part, pieces_text(part.pieces)).partition(b"\n")[2].replace(b'"layout": 2', b'"layout": 1')
        parts.append(read_part(b'{"xxh3": "%016x",\n' % sum_of(rest) + rest, path))
        stored = [Stored(0, offset, nbytes, 0, total) for offset, nbytes, total in whole]
        assert parts[-1] == replace(part, stored=stored)
    sums = ["0" * 16] * len(nodes)
    manifest = Manifest(0, "0" * 16, 1.5, ranks, len(nodes), "", "", flats[0].description, specs, sums)
    assert read_manifest(manifest_text(manifest, arrays_text(manifest.specs)), "") == manifest
    check_parts(manifest, parts, "")
    return Opened(manifest, parts, [dict.fromkeys(range(len(nodes)), str(folder))])


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "LARGE", 8192)
    monkeypatch.setattr(layout, "LEAST_BLOCK", 4096)
    monkeypatch.setattr(layout, "MOST_BLOCK", 16384)


NODES = {
    1: [[0]],
    2: [[0], [1]],
    3: [[0, 2], [1]],
    4: [[0, 1, 2, 3]],
    5: [[0, 1], [2, 3], [4]],
    6: [[0, 1, 2], [3, 4, 5]],
}


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("ranks", NODES)
def test_saved_on_some_ranks_restored_on_others(tmp_path: Path, ranks: int) -> None:
    opened = saved(tmp_path, NODES[ranks])
    everything = arrays()
    numbers = {spec.path: n for n, spec in enumerate(opened.manifest.specs)}
    assert max(nbytes for part in opened.parts for _, nbytes in part.blocks) <= 16384 or ranks == 1
    for others in range(1, 7):
        for rank in range(others):
            wanted = flatten(tree_of(rank, others), LEAVES)
            assert [spec.path for spec in wanted.specs] == list(numbers)
            wishes = [
                Wish(n, box, empty_bytes(math.prod(box[1]) * everything[spec.path].itemsize))
                for n, (spec, box) in enumerate(zip(wanted.specs, wanted.boxes, strict=True))
            ]
            read_all(Solo(), opened, wishes)
            for spec, wish in zip(wanted.specs, wishes, strict=True):
                array = everything[spec.path]
                part = array[slices(wish.box, (0,) * array.ndim)]
                assert wish.memory.tobytes() == part.tobytes(), (ranks, others, rank, spec.path)


def test_alike_arrays_are_divided_fairly_and_written_once() -> None:
    flat = flatten({f"a{k}": np.zeros((1 + k) << 17) for k in range(12)} | {"s": [np.ones(100)] * 300}, LEAVES)
    nodes = [[0, 1], [2, 3], [4, 5]]
    shared = share_out(flat.specs, [{}] * 6, nodes)
    assert sorted(piece.array for own in shared for piece in own) == list(range(312))
    loads = [sum(piece.nbytes for piece in own) for own in shared]
    assert max(loads) < 1.1 * min(loads)
    arranged = arrange(shared[0], 2)
    made = skeleton(arranged, flat.specs)
    staged = [finish(arranged, flat.specs, made, seat, 2).staging_bytes for seat in (0, 1)]
    assert abs(staged[0] - staged[1]) <= 2 * layout.LEAST_BLOCK


shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@given(shapes, st.data())
@settings(deadline=None, max_examples=200)
def test_runs_are_the_elements_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    array = np.arange(math.prod(shape)).reshape(shape)
    start = data.draw(st.integers(0, array.size))
    stop = data.draw(st.integers(start, array.size))
    found = list(runs(shape, start, stop))
    flat = [array[slices(box, (0,) * len(shape))].reshape(-1) for box in found]
    assert np.concatenate([np.empty(0, int), *flat]).tolist() == list(range(start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)


boxes = st.integers(1, 3).flatmap(
    lambda n: st.lists(
        st.tuples(*[st.lists(st.integers(0, 4), min_size=n, max_size=n).map(tuple)] * 2), min_size=1, max_size=4
    )
)


@given(boxes)
@settings(deadline=None, max_examples=200)
def test_cover_counts_every_element(parts: list[Box]) -> None:
    shape = (4,) * len(parts[0][0])
    count = np.zeros((9,) * len(shape), int)
    for box in parts:
        count[slices(box, (0,) * len(shape))] += 1
    inside = count[tuple(slice(0, n) for n in shape)]
    reaches = any(o + n > 4 for offset, part in parts for o, n in zip(offset, part, strict=True))
    assert (cover(shape, parts) == "") == (bool((inside == 1).all()) and not reaches)
    both = meet(parts[0], parts[-1])
    a, b = np.zeros_like(count), np.zeros_like(count)
    a[slices(parts[0], (0,) * len(shape))] = 1
    b[slices(parts[-1], (0,) * len(shape))] = 1
    assert math.prod(both[1]) == (a & b).sum() if both else not (a & b).any()
