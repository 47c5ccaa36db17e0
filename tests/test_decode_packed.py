"""The decoder of packed values and `Unpacking`, against a decoder that sees the values themselves."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from datum_message import datum
from packed_sets import values_like_text

from pario.codec.packing import Packing
from pario.codec.registry import make
from pario.decode import Datum, Npy, Raw, Text
from pario.decode.base import Draw
from pario.decode.packed import Packed
from pario.decode.unpacking import BAD, Unpacking, laid_out
from pario.records import Records

VALUES = values_like_text(60)


def records_of(values: list[bytes]) -> Records:
    nbytes = np.array([len(value) for value in values])
    data = np.frombuffer(b"??" + b"".join(values), np.uint8)
    return Records(np.arange(len(values)), data, np.cumsum(nbytes) - nbytes + 2, nbytes)


def packed(values: list[bytes]) -> tuple[Packing, list[bytes]]:
    packing = Packing([make("zstd", 3)])
    packing.sizes = np.array([len(value) for value in values])
    return packing, [packing.pack(value) for value in values]


def decoded(decoder: Any, records: Records, cuts: list[int] | None = None) -> tuple[dict[str, np.ndarray], list[Any]]:
    decoder.learn_from(records.part(0, 1), Draw())
    out = {name: np.zeros(shape, dtype) for name, (shape, dtype) in decoder.shapes(records).items()}
    if cuts is None:
        return out, decoder.decode(records, out, Draw())
    failures = []
    for first, (part, arrays) in zip(cuts, decoder.parts(records, out, cuts), strict=False):
        failures += [(first + row, why) for row, why in decoder.decode(part, arrays, Draw())]
    return out, failures


@pytest.mark.parametrize("cuts", [None, [0, 60], [0, 13, 14, 60]])
@pytest.mark.parametrize("inner", [Raw, Text])
def test_the_inner_decoder_sees_the_values(inner: Any, cuts: list[int] | None) -> None:
    values = [value for value in VALUES if inner is Raw or value != VALUES[20]]  # bytes that are no text
    cuts = cuts if cuts is None else [min(cut, len(values)) for cut in cuts]
    packing, stored = packed(values)
    counted: list[tuple[float, int, int]] = []
    decoder = Packed(inner(), Unpacking([packing], [0]), lambda *told: counted.append(told))
    wanted, _ = decoded(inner(), records_of(values))
    found, failures = decoded(decoder, records_of(stored), cuts)
    assert not failures
    assert all(np.array_equal(found[name], array) for name, array in wanted.items())
    assert sum(told[2] for told in counted) == sum(map(len, values))
    assert sum(told[1] for told in counted) == sum(map(len, stored))


@pytest.mark.parametrize("inner", [Raw, Text, lambda: Raw(dtype="uint8", shape=40)])
def test_damage_is_told_row_by_row(inner: Any) -> None:
    values = [bytes([65 + i]) * 40 for i in range(20)]
    packing, stored = packed(values)
    stored[3] = b"\x01"
    stored[7] = stored[7][:-1] + bytes([stored[7][-1] ^ 8])
    stored[9] = stored[9][:5] + b"\xff\xff\xff\xff\x7f" + stored[9][6:]
    stored[12] = b"\x09" + stored[12][1:]
    found, failures = decoded(Packed(inner(), Unpacking([packing], [0]), lambda *_: None), records_of(stored))
    assert [row for row, _ in failures] == [3, 7, 9, 12]
    assert all(why for _, why in failures)
    good = [i for i in range(20) if i not in (3, 7, 9, 12)]
    if "offsets" in found:
        ends = found["offsets"]
        assert [found["data"][ends[i] : ends[i + 1]].tobytes() for i in good] == [values[i] for i in good]
    else:
        assert [bytes(x, "ascii") if isinstance(x, str) else x.tobytes() for x in found["data"][good]] == [
            values[i] for i in good
        ]


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.mark.parametrize("codec", ["zstd", "lz4", "brotli", "lzma"])  # lzma has no C function here: row by row
@pytest.mark.parametrize("cuts", [None, [0, 1, 2, 17, 60]])
@pytest.mark.parametrize("kind", ["datum", "npy"])
@pytest.mark.parametrize("files", [1, 2])
def test_rows_inside_of_values_are_unpacked_in_their_places(
    files: int, kind: str, cuts: list[int] | None, codec: str
) -> None:
    """Each value is longer than its row, and is decoded over its neighbours'; some cannot be, or are of another form,
    or are damaged: no row but theirs may change."""
    rng = np.random.default_rng(3)
    arrays = [rng.integers(0, 9, (3, 5, 7), np.uint8) for _ in range(60)]
    labels = [(0, 1, 127, 128, 70_000, -1)[i % 6] for i in range(60)]
    if kind == "npy":
        values, inner = [npy(array) for array in arrays], Npy()
        values[11] = npy(np.asfortranarray(arrays[11]))  # the same size, another header
    else:
        values, inner = [datum(a, y) for a, y in zip(arrays, labels, strict=True)], Datum()
        values[11] = b"\x28\x07" + values[11]  # the label stands before the pixels, too
    values[30] += bytes(200) if kind == "npy" else b"\xa2\x06\xc7\x01" + bytes(199)  # a long unknown field behind them
    stored: list[bytes] = []
    packings = []
    for part in (values[:25], values[25:]) if files == 2 else (values,):
        packings.append(Packing([make(codec)]))
        packings[-1].sizes = np.array([len(value) for value in part])
        stored += [packings[-1].pack(value) for value in part]
    wrong = [0, 16, 17, 40, 59]
    for i in wrong[:-1]:
        stored[i] = stored[i][:-1] + bytes([stored[i][-1] ^ 8])
    stored[59] = stored[59][:1] + bytes([stored[59][1] ^ 1]) + stored[59][2:]  # decodes, and has another checksum
    if kind == "npy":
        wrong = sorted([*wrong, 30])
    inner.learn(np.frombuffer(values[1], np.uint8))
    decoder = Packed(inner, Unpacking(packings, [0, 25][:files]), lambda *_: None)
    records = records_of(stored)
    for _ in range(2):
        out = {name: np.zeros(shape, dtype) for name, (shape, dtype) in decoder.shapes(records).items()}
        edges = cuts or [0, 60]
        failures = []
        for first, (part, rows) in zip(edges, decoder.parts(records, out, edges), strict=False):
            failures += [(first + row, why) for row, why in decoder.decode(part, rows, Draw())]
        assert [row for row, _ in failures] == wrong
        for i in set(range(60)) - set(wrong):
            assert np.array_equal(out["data"][i], arrays[i]), i
            assert kind == "npy" or out["label"][i] == labels[i]


def test_files_that_are_packed_and_files_that_are_not() -> None:
    (one, of_one), (two, of_two) = packed(VALUES[:20]), packed(VALUES[30:])
    stored = [*of_one, *VALUES[20:30], *of_two]
    unpacking = Unpacking([one, None, two], [0, 20, 30])
    order = np.random.default_rng(1).permutation(60)
    every = records_of(stored)
    records = Records(order, every.data, every.starts[order], every.nbytes[order])
    values, failures = unpacking.unpacked(records)
    assert not failures
    assert [value.tobytes() for value in values] == [VALUES[i] for i in order]
    assert unpacking.raw_nbytes(records).tolist() == [len(VALUES[i]) for i in order]
    assert unpacking.sizes(order, every.nbytes[order]).tolist() == [len(VALUES[i]) for i in order]


@pytest.mark.parametrize("files", [1, 2])
def test_a_row_with_a_damaged_header_is_not_written_over_others(files: int) -> None:
    """Its header says a size that the table of sizes does not: no room is made, and the value would fit elsewhere."""
    values = [*(np.random.default_rng(i).bytes(50_000) for i in range(3)), b"small", b"row"]
    (one, of_one), (two, of_two), (both, _) = packed(values[:3]), packed(values[3:]), packed(values)
    of_two[0] = one.pack(bytes(100_000))
    every = records_of([*of_one, *of_two])
    unpacking = Unpacking([both], [0]) if files == 1 else Unpacking([one, two], [0, 3])
    order = np.array([3, 0, 4, 1, 2])
    raw = unpacking.raw_nbytes(every)[order]
    assert raw.tolist() == [-1, 50_000, 3, 50_000, 50_000]
    starts, total = laid_out(np.maximum(raw, 0))
    rows = np.arange(5)[::-1]  # in one file, the damaged one is unpacked last; in two, the first file's values are
    ids = order[rows]
    records = Records(ids, every.data, every.starts[ids], every.nbytes[ids])
    out = np.empty(total, np.uint8)
    assert unpacking.unpack(records, raw[rows], out, starts[rows]) == [(4, BAD)]
    for row in range(1, 5):
        assert out[starts[row] : starts[row] + raw[row]].tobytes() == values[order[row]]


def test_values_begin_at_aligned_places() -> None:
    starts, total = laid_out(np.array([0, 1, 16, 17]))
    assert starts.tolist() == [0, 0, 16, 32]
    assert total == 64
