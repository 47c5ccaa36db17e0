"""Compressed records: the standard library's compressors write them."""

from __future__ import annotations

import copy
import gzip
import io
import struct
import tracemalloc
import zlib

import lmdb
import numpy as np
import pytest
import zstandard
from made_records import arrays, made

import pario
from pario.decode import Draw, Function, Gzip, Json, Npy, Raw, Zlib, Zstd
from pario.decode import compressed as module
from pario.errors import DecodeError, OptionError


def run(decoder, values):
    records = made(values)
    decoder.learn(records[0])
    out = arrays(decoder, records)
    failures = decoder.decode(records, out, Draw())
    return out if failures else decoder.finish(out), failures


@pytest.mark.parametrize(("wrapper", "pack"), [(Zlib, zlib.compress), (Gzip, gzip.compress)])
def test_what_is_inside_is_decoded(wrapper, pack) -> None:
    rows = np.arange(60, dtype="f4").reshape(5, 12)
    out, failures = run(wrapper(Raw("f4")), [pack(row.tobytes()) for row in rows])
    assert failures == []
    np.testing.assert_array_equal(out["data"], rows)
    out, failures = run(wrapper(lambda b: len(b)), [pack(bytes(n)) for n in (3, 0, 7)])
    assert out["data"].tolist() == [3, 0, 7]


def test_bytes_of_any_size_have_offsets() -> None:
    out, failures = run(Zlib(), [zlib.compress(bytes([n] * n)) for n in (3, 0, 2)])
    assert failures == []
    assert out["data"].tolist() == [3, 3, 3, 2, 2]
    assert out["offsets"].tolist() == [0, 3, 3, 5]
    assert (out["data"].dtype, out["offsets"].dtype) == (np.uint8, np.int64)


def test_one_in_the_other() -> None:
    out, failures = run(Gzip(Zlib(Json(["a"]))), [gzip.compress(zlib.compress(b'{"a": %d}' % i)) for i in range(3)])
    assert failures == []
    assert out["a"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("inner", [Raw("u1"), None])
def test_a_bomb_costs_no_more_than_the_limit(inner) -> None:
    bomb = zlib.compress(bytes(64 << 20))
    decoder = Zlib(inner, most_bytes=1000)
    tracemalloc.start()
    try:
        _, failures = run(decoder, [zlib.compress(bytes(1000)), bomb, zlib.compress(bytes(1000))])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert failures == [(1, "not zlib data: it decompresses to more than 1,000 bytes; most_bytes= is the limit")]
    assert peak < 4 << 20


def test_many_records_are_decompressed_in_pieces(monkeypatch) -> None:
    monkeypatch.setattr(module, "_UNIT", 100)
    values = [zlib.compress(bytes([i]) * 60) for i in range(9)]
    values[3] = values[3][:-2]
    out, failures = run(Zlib(Raw("u1")), values)
    assert failures == [(3, "not zlib data: the end is missing")]
    good = [0, 1, 2, 4, 5, 6, 7, 8]
    assert out["data"][good].tolist() == [[i] * 60 for i in good]


def test_what_is_wrong_inside_says_where() -> None:
    values = [zlib.compress(b"abcd"), zlib.compress(b"abc"), zlib.compress(b"abcd")]
    _, failures = run(Zlib(Raw("u4")), values)
    assert failures == [(1, "inside of the zlib data: expected 4 bytes (uint32[1]), got 3")]
    with pytest.raises(DecodeError, match=r"inside of the zlib data: Npy\(\) cannot decode this record.*61 62 63 64"):
        Zlib(Npy()).learn(np.frombuffer(values[0], np.uint8))
    with pytest.raises(DecodeError, match=r"not zlib data: error: .*gzip data. Use pario.decode.Gzip\("):
        Zlib().learn(np.frombuffer(gzip.compress(b"abc"), np.uint8))
    with pytest.raises(DecodeError, match="4 bytes follow the end"):
        Zlib().learn(np.frombuffer(zlib.compress(b"abc") + b"more", np.uint8))


def test_several_gzip_streams_are_one_value() -> None:
    out, _ = run(Gzip(), [gzip.compress(b"ab") + gzip.compress(b"cd")])
    assert out["data"].tobytes() == b"abcd"
    with pytest.raises(DecodeError, match="more than 3 bytes"):
        Gzip(most_bytes=3).learn(np.frombuffer(gzip.compress(b"ab") + gzip.compress(b"cd"), np.uint8))


def test_two_loaders_learn_for_themselves() -> None:
    decoder = Zlib(Raw("u1"))
    mine, theirs = copy.copy(decoder), copy.copy(decoder)
    mine.learn(np.frombuffer(zlib.compress(b"abc"), np.uint8))
    theirs.learn(np.frombuffer(zlib.compress(b"ab"), np.uint8))
    assert (decoder.spec, mine.spec, theirs.spec) == (None, (3,), (2,))


def test_options() -> None:
    for wrong in (0, True, 1.5):
        with pytest.raises(OptionError, match="most_bytes must be"):
            Zlib(most_bytes=wrong)
    with pytest.raises(OptionError, match=r"got the class Raw"):
        Zlib(Raw)
    assert repr(Gzip(Raw("u1"), most_bytes=9)) == "Gzip(Raw(dtype='uint8'), most_bytes=9)"


def test_a_missing_package_is_named(monkeypatch) -> None:
    monkeypatch.setattr(module, "_zstandard", lambda: None)
    with pytest.raises(OptionError, match=r'zstandard, which is not installed. pip install "\.\[zstd\]"'):
        Zstd()


def test_zstd() -> None:
    zstandard = pytest.importorskip("zstandard")
    sized = zstandard.ZstdCompressor()
    unsized = zstandard.ZstdCompressor(write_content_size=False)
    values = [sized.compress(b"ab"), unsized.compress(b"cd" * 5000), sized.compress(b"")]
    out, failures = run(Zstd(), values)
    assert failures == []
    assert out["data"].tobytes() == b"ab" + b"cd" * 5000
    assert out["offsets"].tolist() == [0, 2, 10002, 10002]
    bad = [values[0][:-1], values[1][:-1], values[0] + b"x", b"?"]
    _, failures = run(Zstd(most_bytes=1000), [values[0], *bad, *(c.compress(bytes(2000)) for c in (sized, unsized))])
    assert [i for i, _ in failures] == [1, 2, 3, 4, 5, 6]
    assert "more than 1,000 bytes" in failures[4][1]
    assert "most_bytes=1,000" in failures[5][1]


def test_through_the_loader(tmp_path) -> None:
    with lmdb.open(str(tmp_path), map_size=1 << 22) as env, env.begin(write=True) as txn:
        for i in range(40):
            txn.put(b"%04d" % i, zlib.compress(b"%04d" % i * (i % 3)))

    def f(value, id, key, rng):
        return {"same": value == key * (id % 3), "draw": rng.random()}

    for decoder in (Zlib(), Zlib(f)):
        with pario.Loader(tmp_path, 8, decoder, shuffle="global") as loader:
            for batch in loader:
                if "same" in batch:
                    assert batch["same"].all()
                    continue
                cuts = batch["offsets"]
                for k, i in enumerate(batch.ids.tolist()):
                    assert batch["data"][cuts[k] : cuts[k + 1]].tobytes() == b"%04d" % i * (i % 3)


def test_a_function_inside_gets_its_id_and_key() -> None:
    values = [zlib.compress(b"x")] * 4
    values[1] = b"broken"
    records = made(values, ids=[9, 8, 7, 6])
    decoder = Zlib(Function(lambda value, id, key: {"id": id, "key": key}))
    draw = Draw(0, 0, lambda ids: [b"%d" % i for i in ids])
    decoder.learn_at(records[0], 9, draw)
    out = arrays(decoder, records)
    assert [i for i, _ in decoder.decode(records, out, draw)] == [1]
    assert out["id"][[0, 2, 3]].tolist() == [9, 7, 6]
    assert out["key"][[0, 2, 3]].tolist() == [b"9", b"7", b"6"]


def skippable(content: bytes) -> bytes:
    return struct.pack("<II", 0x184D2A50 + len(content) % 16, len(content)) + content


def test_all_frames_of_a_zstd_value_are_joined() -> None:
    """As RFC 8878 says, and the package's own stream reads them."""
    rng = np.random.default_rng(3)
    packs = [
        zstandard.ZstdCompressor(write_content_size=size, write_checksum=checked, level=level).compress
        for size in (False, True)
        for checked in (False, True)
        for level in (1, 19)
    ]
    contents = [b"", b"a", rng.bytes(5000), bytes(300_000), b"text " * 40_000, rng.bytes(200_000)]
    decoder = Zstd()
    for _ in range(60):
        frames = [
            skippable(rng.bytes(int(rng.integers(40))))
            if rng.random() < 0.3
            else packs[rng.integers(len(packs))](contents[rng.integers(len(contents))])
            for _ in range(rng.integers(1, 5))
        ]
        value = b"".join(frames)
        stream = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(value), read_across_frames=True)
        assert decoder.unpack(value) == stream.read()
        edges = {sum(map(len, frames[:k])) for k in range(len(frames) + 1)}
        for cut in set(rng.integers(1, len(value), 3).tolist()) - edges:
            with pytest.raises(Exception, match=r"end is missing|no frame begins|header size"):
                decoder.unpack(value[:cut])
        with pytest.raises(Exception, match="no frame begins"):
            decoder.unpack(value + b"\0")


def test_gzip_reads_what_python_reads() -> None:
    rng = np.random.default_rng(4)
    for _ in range(25):
        parts = [gzip.compress(rng.bytes(int(rng.choice([0, 1, 700, 90_000]))) * 2) for _ in range(rng.integers(1, 6))]
        value = b"".join(part + bytes(int(rng.choice([0, 0, 1, 511, 5000]))) for part in parts)
        assert Gzip().unpack(value) == gzip.decompress(value)
    with pytest.raises(Exception, match=r"header|missing"):
        Gzip().unpack(value + b"\0x")
