"""Values of packed databases: header, checksum, the reserved entry. The oracle reads the documented bytes by hand."""

from __future__ import annotations

import contextlib
import json
import pickle
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from pario.codec import packing, zstd
from pario.codec.base import address_of
from pario.codec.packing import MAGIC, Packing, is_reserved_key, reserved_key
from pario.codec.registry import make, parse
from pario.errors import CorruptedError, DecodeError, OptionError, VersionMismatchError
from pario.kernels import coded
from pario.kernels.coded import BAD, HOW, KIND, LATER, LZ4, MOST, PYTHON, ZSTD, unpack_values
from pario.records import Records

TEXT = b'{"key": 17, "label": "horse", "words": "one two one two one two"}'


def by_hand(value: bytes, dictionary: bytes = b"") -> bytes:
    """What the format's drawing says, with the package zstandard."""
    slot, total, rest = value[0], int.from_bytes(value[1:5], "little"), value[5:]
    if slot:
        size, shift = 0, 0
        while True:
            byte, rest = rest[0], rest[1:]
            size |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
        digest = zstandard.ZstdCompressionDict(dictionary) if dictionary else None
        engine = zstandard.ZstdDecompressor(dict_data=digest, format=zstandard.FORMAT_ZSTD1_MAGICLESS)
        rest = engine.decompress(rest, max_output_size=max(size, 1))
        assert len(rest) == size
    assert xxhash.xxh3_64_intdigest(rest) & 0xFFFFFFFF == total
    return rest


def records_of(values: list[bytes]) -> Records:
    nbytes = np.array([len(value) for value in values], np.int64)
    data = np.frombuffer(b"".join(values), np.uint8)
    return Records(np.arange(len(values)), data, np.cumsum(nbytes) - nbytes, nbytes)


def unpacked(packing: Packing, packed: list[bytes], sizes: list[int]) -> tuple[list[bytes], list[tuple[int, str]]]:
    """All values at once, in reversed order in memory, with guards between them."""
    starts = np.zeros(len(sizes), np.int64)
    at = 7
    for i in reversed(range(len(sizes))):
        starts[i] = at
        at += sizes[i] + 7
    out = np.full(at, 0xA5, np.uint8)
    failures = packing.unpack(records_of(packed), out, starts, np.array(sizes))
    guard = np.ones(at, bool)
    for start, size in zip(starts, sizes, strict=True):
        guard[start : start + size] = False
    assert (out[guard] == 0xA5).all(), "written outside"
    return [out[start : start + size].tobytes() for start, size in zip(starts, sizes, strict=True)], failures


@given(st.lists(st.one_of(st.binary(max_size=300), st.integers(0, 3000).map(lambda n: (TEXT * 50)[:n])), max_size=12))
@settings(max_examples=30, deadline=None)
def test_values_come_back(values: list[bytes]) -> None:
    packed = [PLAIN.pack(value) for value in values]
    assert [by_hand(one) for one in packed] == values
    assert unpacked(PLAIN, packed, [len(value) for value in values]) == (values, [])
    assert [PLAIN.unpack_one(one) for one in packed] == values
    data, starts, nbytes = PLAIN.pack_many(records_of(values))
    together = [data[start : start + size].tobytes() for start, size in zip(starts, nbytes, strict=True)]
    assert together == packed
    assert PLAIN.raw_nbytes(records_of(packed)).tolist() == [len(value) for value in values]


PLAIN = Packing([make("zstd")])


def test_what_does_not_compress_is_stored() -> None:
    noise = np.random.default_rng(1).bytes(5000)
    assert PLAIN.pack(noise)[5:] == noise
    assert PLAIN.pack(b"") == b"\0" + (xxhash.xxh3_64_intdigest(b"") & 0xFFFFFFFF).to_bytes(4, "little")
    assert Packing([]).pack(TEXT * 9)[5:] == TEXT * 9
    assert Packing([make("raw")]).pack(TEXT * 9)[0] == 0
    assert PLAIN.pack(TEXT * 9)[0] == 1


def test_several_slots() -> None:
    """Values of any slot stand side by side; an unknown slot is one row's failure."""
    fine, best = Packing([make("zstd", 1)]), Packing([make("zstd", 1), make("zstd", 19)])
    second = bytearray(Packing([make("zstd", 19)]).pack(TEXT * 20))
    second[0] = 2
    third = bytes([3]) + bytes(second[1:])
    packed = [fine.pack(TEXT * 10), bytes(second), third, fine.pack(b"raw")]
    values, failures = unpacked(best, packed, [len(TEXT) * 10, len(TEXT) * 20, len(TEXT) * 20, 3])
    assert [values[0], values[1], values[3]] == [TEXT * 10, TEXT * 20, b"raw"]
    assert [row for row, _ in failures] == [2]
    assert "table of codecs" in failures[0][1]


def test_a_damaged_byte_is_found() -> None:
    packed, missed = PLAIN.pack(TEXT * 3), 0
    for at in range(len(packed)):
        for bit in (1, 128):
            damaged = packed[:at] + bytes([packed[at] ^ bit]) + packed[at + 1 :]
            values, failures = unpacked(PLAIN, [packed, damaged], [len(TEXT) * 3] * 2)
            assert values[0] == TEXT * 3
            # A frame's window may be larger or smaller, and the value the same.
            assert [row for row, _ in failures] == [1] or values[1] == TEXT * 3, at
            missed += not failures
    assert missed <= 2
    for cut in range(len(packed)):
        _, failures = unpacked(PLAIN, [packed[:cut]], [len(TEXT) * 3])
        assert failures, cut
    with pytest.raises(DecodeError, match="checksum"):
        PLAIN.unpack_one(packed[:1] + b"\0\0\0\0" + packed[5:])


CODECS = ["zstd:3", "lz4", "deflate", "lzma", "raw"]


def blocks_of(spec: str, items: list[tuple[bytes, bytes]], counts: list[int]) -> tuple[Packing, list[bytes]]:
    """(how they are packed, the packed entries)"""
    made = Packing([parse(spec)])
    made.counts, made.sizes = np.array(counts), np.array([len(value) for _, value in items])
    values = records_of([value for _, value in items])
    keys, data, nbytes = made.pack_entries(values, [key for key, _ in items], made.counts)
    ends = np.cumsum(counts).tolist()
    assert keys == [items[end - 1][0] for end in ends], "an entry has its last key"
    stops = np.cumsum(nbytes).tolist()
    return Packing.from_entry(made.entry()), [data[b - n : b].tobytes() for b, n in zip(stops, nbytes, strict=True)]


def picked(
    packing: Packing, packed: list[bytes], ids: np.ndarray, sizes: np.ndarray | None = None
) -> tuple[list[bytes], list[tuple[int, str]]]:
    """(values of these records, failures), unpacked between bytes that nobody may change."""
    lying = records_of(packed)
    entries = np.repeat(np.arange(packing.entries), packing.counts)[ids]
    records = Records(ids, lying.data, lying.starts[entries], lying.nbytes[entries])
    sizes = packing.sizes[ids] if sizes is None else sizes
    ends = np.cumsum(sizes + 8)
    out = np.full(int(ends[-1]) + 8, 77, np.uint8)
    failures = packing.unpack(records, out, ends - sizes, sizes, packing.ordinals(ids))
    kept = np.ones(len(out), bool)
    values = []
    for end, size in zip(ends.tolist(), sizes.tolist(), strict=True):
        values.append(out[end - size : end].tobytes())
        kept[end - size : end] = False
    assert (out[kept] == 77).all()
    return values, failures


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    st.sampled_from(CODECS),
    st.dictionaries(st.binary(min_size=1, max_size=40), st.sampled_from([b"", b"x", TEXT, TEXT * 30]), min_size=1),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
)
def test_records_of_blocks_come_back(spec: str, given: dict[bytes, bytes], counts: list[int], rng: object) -> None:
    items = sorted(given.items())
    ends = np.cumsum(np.resize(counts, len(items)))
    packing, packed = blocks_of(spec, items, np.diff([0, *ends[ends < len(items)], len(items)]).tolist())
    ids = np.array(list(range(len(items))) * 2)
    rng.shuffle(ids[len(items) :])  # type: ignore[attr-defined]
    values, failures = picked(packing, packed, ids)
    assert not failures
    assert values == [items[i][1] for i in ids]
    assert packing.counts is not None
    for first, count, value in zip(packing.firsts.tolist(), packing.counts.tolist(), packed, strict=True):
        if count > 1:
            keys, found = packing.block(value)
            assert list(zip(keys, found, strict=True)) == items[first : first + count]
            raw = by_hand(bytes([value[0] - 128]) + value[1:]) if spec == "zstd:3" else b""
            assert int.from_bytes(raw[:2], "little") in (0, count)
        else:
            assert value[0] < 128


@pytest.mark.parametrize("spec", CODECS)
def test_damage_in_a_block_is_that_of_its_records(spec: str) -> None:
    """Any byte, and any end: each record of the block fails, or is what it was; none of another entry does."""
    items = [(b"key%03d" % i, TEXT[: 3 * i]) for i in range(12)]
    packing, packed = blocks_of(spec, items, [5, 1, 6])
    ids, truth = np.arange(12), [value for _, value in items]
    for at in range(len(packed[0])):
        for damaged in (packed[0][:at] + bytes([packed[0][at] ^ 129]) + packed[0][at + 1 :], packed[0][:at]):
            values, failures = picked(packing, [damaged, *packed[1:]], ids)
            bad = {row for row, _ in failures}
            assert bad in (set(range(5)), set())
            assert [values[i] for i in range(12) if i not in bad] == [truth[i] for i in range(12) if i not in bad]


def test_a_forged_block_leads_nowhere() -> None:
    """Checksums are right, numbers are not: nothing is read outside of the block, or written beside its place."""
    items = [(b"key%03d" % i, TEXT[: 3 * i]) for i in range(5)]
    packing, (packed,) = blocks_of("raw", items, [5])
    assert packed[0] == 128
    block, ids = packed[5:], np.arange(5)
    for at in range(2 + 6 * 5):
        for byte in (0, 1, 4, 6, 127, 255):
            forged = block[:at] + bytes([byte]) + block[at + 1 :]
            for cut in (forged, forged[: at + 1], forged + b"more"):
                sealed = b"\x80" + (xxhash.xxh3_64_intdigest(cut) & MOST).to_bytes(4, "little") + cut
                values, failures = picked(packing, [sealed], ids)
                for row in set(range(5)) - {row for row, _ in failures}:
                    assert len(values[row]) == len(items[row][1])
                with contextlib.suppress(DecodeError):
                    keys, found = packing.block(sealed)
                    assert sum(map(len, found)) <= len(cut)
                    assert len(keys) == len(found)
    wrong = packing.sizes + 1
    assert [why for _, why in picked(packing, [packed], ids, wrong)[1]] == [coded.WRONG[coded.SIZE]] * 5
    for alone in (PLAIN.pack(TEXT), b"", b"\x80", b"\x80sum", b"\xffsum_" + bytes(9)):
        values, failures = picked(packing, [alone], ids)
        assert len(failures) == 5


def sealed_block(rows: list[tuple[int, bytes, bytes]]) -> bytes:
    """A packed block of these (bytes that the key shares, other bytes of the key, value)."""
    table = np.array([(shared, len(rest), len(value)) for shared, rest, value in rows], ">u2").view(np.uint8)
    high_low = table.reshape(len(rows), 3, 2).transpose(2, 1, 0).tobytes()
    block = len(rows).to_bytes(2, "little") + high_low + b"".join(r for _, r, _ in rows) + b"".join(v for *_, v in rows)
    return b"\x80" + (xxhash.xxh3_64_intdigest(block) & MOST).to_bytes(4, "little") + block


def test_a_block_has_an_end() -> None:
    """A few hundred bytes, packed, could say that thousands of keys share 65,000 bytes each, or that a block has more
    bytes than one may; and a block lies under its last key."""
    packing, _ = blocks_of("raw", [(b"a", b""), (b"b", b"")], [2])
    sound = sealed_block([(0, b"aa", b"1"), (1, b"b", b"2")])
    assert packing.block(sound, b"ab") == ([b"aa", b"ab"], [b"1", b"2"])
    with pytest.raises(DecodeError, match="ends with the key b'ab'"):
        packing.block(sound, b"ac")
    many = [(0, b"k" * 65_000, b"")] + [(64_998, i.to_bytes(2, "big"), b"") for i in range(300)]
    assert len(packing.block(sealed_block(many[:200]))[0]) == 200
    with pytest.raises(DecodeError, match="table of its block"):
        packing.block(sealed_block(many))
    with pytest.raises(DecodeError, match="16,777,216 are the most"):
        packing.block(sealed_block([(0, b"%03d" % i, bytes(65_535)) for i in range(257)]))


def test_a_block_that_is_too_large_is_not_unpacked() -> None:
    packing = Packing([make("zstd", 3)])
    packed = bytearray(packing.pack(bytes(100 << 20)))
    packed[0] += 128
    packing.counts = np.array([2])
    tracemalloc.start()
    try:
        with pytest.raises(DecodeError, match="104,857,600 bytes, and 16,777,216 are the most"):
            packing.block(packed)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_sizes_that_differ() -> None:
    """A header that says more, or less, than the table of sizes does not write into other rows."""
    packed = PLAIN.pack(TEXT * 3)
    _, failures = unpacked(PLAIN, [packed, packed], [len(TEXT) * 3 - 1, len(TEXT) * 3 + 1])
    assert [row for row, _ in failures] == [0, 1]
    assert all("size" in why for _, why in failures)
    assert PLAIN.raw_nbytes(records_of([b"", b"1234", b"\x01sumx" + b"\xff" * 9, packed])).tolist() == [-1, -1, -1, 195]


def test_a_package_unpacks_values_of_any_size() -> None:
    """No memory is touched for it here: what the kernel cannot decode is left for the package."""
    value = np.zeros(66 << 20, np.uint8)  # memory that is never touched: of fewer bytes nobody believes the size
    value[:10] = np.frombuffer(b"\x01sum." + b"\xff\xff\xff\xff\x0f", np.uint8)  # a header that says 4 GiB - 1
    zero, one, codes = np.zeros(1, np.int64), np.array([len(value)]), np.zeros(1, np.int64)
    expected = np.array([MOST])
    hows = np.zeros((2, HOW), np.int64)
    for kind, code in ((PYTHON, LATER), (LZ4, BAD)):
        hows[1, KIND] = kind
        data = address_of(value)
        assert unpack_values(hows, data, len(value), zero, one, data, MOST, zero, expected, zero[:0], codes) == 1
        assert codes[0] == code


def test_a_value_whose_size_no_header_says_is_not_packed() -> None:
    how = np.zeros(HOW, np.int64)
    how[KIND] = ZSTD
    encoded = coded._encoded.py_func
    assert encoded(how, 0, MOST + 1, 0, 1 << 40, np.zeros(1, np.int64)) == 0
    with pytest.raises(NotImplementedError):  # C is called, which only compiled code can do
        encoded(how, 0, MOST, 0, 1 << 40, np.zeros(1, np.int64))


def test_the_entry() -> None:
    dictionary = zstd.train([TEXT + str(i).encode() for i in range(500)], 4096)
    sizes = np.array([5, 5, 70000, 0, 5], np.int64)
    one = Packing([make("zstd", 7, dictionary), make("raw")], sizes, more={"prediction": {"rate": 3.5}})
    entry = one.entry()
    assert entry[:8] == MAGIC
    assert struct.unpack("<Q", entry[-8:])[0] == xxhash.xxh3_64_intdigest(entry[:-8])
    (length,) = struct.unpack_from("<I", entry, 8)
    said, parts = json.loads(entry[12 : 12 + length]), entry[12 + length : -8]
    assert (said["version"], said["records"], said["prediction"]) == (1, 5, {"rate": 3.5})
    first, size = said["codecs"][0]["dictionary"]
    assert (said["codecs"][0]["name"], said["codecs"][0]["level"]) == ("zstd", 7)
    assert parts[first : first + size] == dictionary
    first, size, how, dtype = said["sizes"]
    differences = np.frombuffer(zlib.decompress(parts[first : first + size]), dtype)
    assert (how, np.cumsum(differences, dtype=dtype).tolist()) == ("deflate", sizes.tolist())
    again = Packing.from_entry(memoryview(entry))
    assert (again.n, again.sizes.tolist(), again.more["prediction"]) == (5, sizes.tolist(), {"rate": 3.5})
    assert again.entry() == entry
    value = TEXT + b"499"
    packed = one.pack(value)
    assert len(packed) < len(make("zstd", 7).encode(value)), "the dictionary is used"
    for other in (again, pickle.loads(pickle.dumps(again))):
        assert other.unpack_one(packed) == value
        assert other.pack(value) == packed
    with pytest.raises(DecodeError):
        Packing([make("zstd", 7)]).unpack_one(packed)


def test_further_parts() -> None:
    one = Packing([make("zstd", 3, b"abcdefgh" * 99)], np.arange(9))
    one.parts = {"tree": b"names and modes", "empty": b""}
    again = Packing.from_entry(one.entry())
    assert again.parts == one.parts
    assert again.codecs[0].dictionary == one.codecs[0].dictionary
    assert again.sizes.tolist() == list(range(9))
    assert Packing.from_entry(Packing([]).entry()).parts == {}


def test_memory_that_cannot_be_written() -> None:
    packed = np.frombuffer(PLAIN.pack(TEXT), np.uint8)
    records, zero = records_of([packed.tobytes()]), np.zeros(1, np.int64)
    fixed = np.zeros(len(TEXT), np.uint8)
    fixed.flags.writeable = False
    for out in (fixed, np.zeros(2 * len(TEXT), np.uint8)[::2]):
        with pytest.raises(OptionError, match="contiguous and writable"):
            PLAIN.unpack(records, out, zero)
        with pytest.raises(OptionError, match="contiguous and writable"):
            make("lzma").decode_into(b"", out)


def test_a_large_table_is_small() -> None:
    sizes = np.full(1_000_000, 3072, np.int64)
    entry = Packing([make("zstd")], sizes).entry()
    assert len(entry) < 10_000
    assert (Packing.from_entry(entry).sizes == sizes).all()
    wide = np.array([2**33, 1, 2**40], np.int64)
    assert Packing.from_entry(Packing([], wide).entry()).sizes.tolist() == wide.tolist()


def sealed(said: object, parts: bytes = b"", magic: bytes = MAGIC) -> bytes:
    text = json.dumps(said).encode()
    whole = magic + struct.pack("<I", len(text)) + text + parts
    return whole + struct.pack("<Q", xxhash.xxh3_64_intdigest(whole))


GOOD = {"version": 1, "codecs": [], "records": 0, "sizes": [0, 0, "deflate", "<u4"]}


def with_counts(counts: list[int], records: int, entries: int | None = None, how: str = "deflate") -> bytes:
    table = zlib.compress(np.diff(counts, prepend=0).astype("<u4").tobytes())
    said = {"records": records, "entries": len(counts) if entries is None else entries}
    return sealed(GOOD | said | {"counts": [0, len(table), how, "<u4"]}, table, MAGIC[:7] + b"\x02")


@pytest.mark.parametrize(
    ("entry", "error", "words"),
    [
        (b"", CorruptedError, "begin"),
        (b"something else, of thirty bytes", CorruptedError, "begin"),
        (sealed(GOOD)[:-1] + b"x", CorruptedError, "checksum"),
        (sealed(GOOD)[:-9], CorruptedError, "checksum"),
        (sealed(GOOD, magic=b"PARIOPK\x03"), VersionMismatchError, "newer"),
        (with_counts([], 0, how="lzma"), CorruptedError, "form lzma"),
        (with_counts([1], 0), CorruptedError, "1 records in 1 entries"),
        (with_counts([5, 0], 5), CorruptedError, "damaged"),
        (with_counts([1 << 16], 1 << 16), CorruptedError, "damaged"),
        (with_counts([2, 3], 5, entries=3), CorruptedError, "table of counts"),
        (sealed(GOOD | {"version": 2}), VersionMismatchError, "newer"),
        (sealed([]), CorruptedError, "damaged"),
        (sealed(GOOD | {"codecs": [{"name": "zstd"}]}), CorruptedError, "damaged"),
        (sealed(GOOD | {"codecs": [{"name": "zstd", "dictionary": [0, 9]}]}, b"8 bytes."), CorruptedError, "damaged"),
        (sealed(GOOD | {"codecs": [{"name": "lzsse8", "dictionary": None}]}), OptionError, "lzsse8.*there are.*zstd"),
        (sealed(GOOD | {"codecs": [{"name": "zstd", "level": 99, "dictionary": None}]}), OptionError, "level 99"),
        (sealed(GOOD | {"sizes": [0, 0, "lzma", "<u4"]}), CorruptedError, "damaged"),
        (sealed(GOOD | {"codecs": [{"name": "zstd", "level": "3", "dictionary": None}]}), CorruptedError, "damaged"),
        (sealed(GOOD | {"codecs": [{"name":"zstd", "options": {"level": 3}, "dictionary": 0}]}), CorruptedError, "d"),
        (sealed(GOOD | {"parts": {"tree": [0, 1]}}), CorruptedError, "damaged"),
        (sealed(GOOD | {"parts": [1]}), CorruptedError, "damaged"),
    ],
)
def test_entries_that_cannot_be_used(entry: bytes, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Packing.from_entry(entry)


def test_a_damaged_table_of_sizes() -> None:
    for parts in (b"not zlib", zlib.compress(bytes(4 * 99)), zlib.compress(b"xyz")):
        entry = sealed(GOOD | {"records": 3, "sizes": [0, len(parts), "deflate", "<u4"]}, parts)
        with pytest.raises(CorruptedError, match="table of sizes"):
            _ = Packing.from_entry(entry).sizes


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zstd, "_library", lambda: None)
    with pytest.raises(OptionError, match=r"zstandard.*pip install"):
        Packing.from_entry(sealed(GOOD | {"codecs": [{"name": "zstd", "dictionary": None}]}))


def test_the_package_unpacks_what_a_dictionary_has_packed() -> None:
    samples = [TEXT + str(i).encode() * (i % 50) for i in range(300)]
    values = [*samples[:40], b"", np.random.default_rng(2).bytes(300)]
    dictionary = zstd.train(samples, 2048)
    packing = Packing([make("zstd", 3, dictionary)])
    data, starts, nbytes = packing.pack_many(records_of(values))
    packed = [data[start : start + size].tobytes() for start, size in zip(starts, nbytes, strict=True)]
    assert [by_hand(value, dictionary) for value in packed] == values
    damaged, wrong_sum = packed[5][:-3] + b"abc", packed[6][:1] + b"\0\0\0\0" + packed[6][5:]
    _, failures = unpacked(packing, [damaged, wrong_sum, *packed[7:]], [len(value) for value in values[5:]])
    assert [row for row, _ in failures] == [0, 1]
    assert "checksum" in failures[1][1]


@given(st.binary(min_size=1, max_size=40), st.booleans())
@settings(max_examples=30, deadline=None)
def test_the_reserved_key_is_last(last: bytes, reverse: bool) -> None:
    key = reserved_key(last, reverse=reverse)
    assert (key[::-1] > last[::-1]) if reverse else (key > last)
    assert is_reserved_key(key, reverse=reverse)


def test_reserved_keys() -> None:
    assert reserved_key(None) == b"\xff" * 4 + b"pario-packed"
    assert reserved_key(b"\xff" * 4 + b"parip") == b"\xff" * 5 + b"pario-packed"
    assert reserved_key(b"\xff" * 499)[:499] == b"\xff" * 499
    with pytest.raises(OptionError, match="511"):
        reserved_key(b"\xff" * 500)
    assert reserved_key(b"\1" * 8, integer=8) == b"\xff" * 8
    with pytest.raises(OptionError, match="taken"):
        reserved_key(b"\xff" * 4, integer=4)
    assert not is_reserved_key(b"\xff" * 3 + b"pario-packed")
    assert not is_reserved_key(b"pario-packed")
    assert not is_reserved_key(b"\xff" * 8)
    assert is_reserved_key(b"\xff" * 8, integer=True)


def test_names_of_codecs() -> None:
    assert str(parse("zstd")) == "zstd:3"
    assert parse("zstd:-5").level == -5
    assert str(parse("raw")) == "raw"
    for bad in ("zstd:x", "zstd:23", "raw:1", "zlib", "zstd,fast", "zstd,fast=1", "raw,x=1"):
        with pytest.raises(OptionError):
            parse(bad)
    with pytest.raises(OptionError, match="dictionary"):
        make("raw", None, b"abc")
    assert packing.MAGIC == b"PARIOPK\x01"
