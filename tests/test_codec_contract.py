"""The contract of all codecs: every one passes this suite. The oracle of what comes back is what went in."""

from __future__ import annotations

import pickle
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pario.codec import blosc2, brotli, deflate, lz4, zstd
from pario.codec.base import Codec
from pario.codec.packing import Packing
from pario.codec.registry import CODECS, make, parse
from pario.errors import DecodeError, OptionError
from pario.kernels.coded import KIND, MOST, MOST_INT, PYTHON, RAW, ZSTD
from pario.records import Records

SPECS = (
    "raw", "lz4", "lz4hc:3", "lz4hc:12", "zstd:-3", "zstd", "zstd:19", "blosc2:5,typesize=2", "deflate",
    "blosc2:1,typesize=8,filter=bitshuffle,codec=lz4", "blosc2:5,typesize=4,filter=bytedelta", "brotli:4", "lzma:1",
)  # fmt: skip
WITH_DICTIONARIES = ("lz4", "lz4hc:3", "zstd", "zstd:19")
LIBRARIES = {"lz4": lz4, "lz4hc": lz4, "zstd": zstd, "blosc2": blosc2, "deflate": deflate, "brotli": brotli}
FILL = 0xA5

RNG = np.random.default_rng(5)
NOISE = RNG.bytes(3000)
WALK = np.cumsum(RNG.integers(-9, 9, 1500)).astype(np.int16).tobytes()
WORDS = b"".join(b'{"id": %d, "name": "horse %d", "tags": ["one", "two"]}' % (i, i * i % 17) for i in range(60))
VALUES = [b"", b"x", b"\0", b"ab" * 7, WORDS, WORDS[:100], WALK, WALK[:33], NOISE, NOISE[:20], bytes(70_000)]


@pytest.fixture(params=SPECS, scope="module")
def codec(request: pytest.FixtureRequest) -> Codec:
    return parse(request.param)


def many(codec: Codec, packed: list[bytes], sizes: list[int]) -> tuple[list[bytes], list[tuple[int, str]]]:
    """Decoded by one call, backwards in memory, with guards between the values."""
    nbytes = np.array(sizes, np.int64)
    starts = (np.cumsum(nbytes[::-1] + 9) - nbytes[::-1] - 4)[::-1]
    out = np.full(int(nbytes.sum()) + 9 * len(sizes), FILL, np.uint8)
    lengths = np.array([len(one) for one in packed], np.int64)
    data = np.frombuffer(b"".join(packed), np.uint8)
    records = Records(np.arange(len(packed)), data, np.cumsum(lengths) - lengths, lengths)
    failures = codec.decode_many(records, out, starts, nbytes)
    guards = np.ones(len(out), bool)
    for start, size in zip(starts, sizes, strict=True):
        guards[start : start + size] = False
    assert (out[guards] == FILL).all(), "written outside of the rows"
    return [out[start : start + size].tobytes() for start, size in zip(starts, sizes, strict=True)], failures


def test_the_library_is_there() -> None:
    """Of all but Python's own."""
    for spec in SPECS:
        with parse(spec).decoding() as how:
            assert (how[KIND] != PYTHON) == (spec != "lzma:1"), spec


def test_functions_that_count_in_an_int_pack_no_more_than_they_unpack() -> None:
    for spec in SPECS:
        codec = parse(spec)
        with codec.decoding() as how:
            assert codec.most == (MOST if how[KIND] in (PYTHON, RAW, ZSTD) else MOST_INT), spec


def test_values_come_back(codec: Codec) -> None:
    packed = [codec.encode(value) for value in VALUES]
    values, failures = many(codec, packed, [len(value) for value in VALUES])
    assert failures == []
    assert values == VALUES
    for value, one in zip(VALUES, packed, strict=True):
        out = np.full(len(value) + 2, FILL, np.uint8)
        codec.decode_into(memoryview(one), out[1:-1])
        assert (out[1:-1].tobytes(), out[0], out[-1]) == (value, FILL, FILL)
        assert codec.encode(np.frombuffer(value, np.uint8)) == codec.encode(bytearray(value))


QUICK = [parse(spec) for spec in ("lz4", "lz4hc:3", "zstd", "deflate", "brotli:4", "blosc2:5,typesize=2")]


@given(st.binary(max_size=200), st.integers(0, 400))
@settings(max_examples=15, deadline=None)
def test_any_bytes_come_back(value: bytes, times: int) -> None:
    for codec in QUICK:
        whole = value * times
        assert many(codec, [codec.encode(whole), codec.encode(value)], [len(whole), len(value)]) == ([whole, value], [])


@pytest.mark.full
def test_large_values(codec: Codec) -> None:
    value = (np.arange(1_250_000) // 3).astype(np.uint32).tobytes()
    packed = codec.encode(value)
    values, failures = many(codec, [packed], [5_000_000])
    assert failures == []
    assert values[0] == value


def test_bytedelta_keeps_what_is_no_whole_number() -> None:
    """Of any size, beside what `shuffle` makes of it; other threads find the filter, too."""
    field = np.cos(np.arange(20_000) / 50).astype(np.float32).tobytes()
    sizes = [79_996 + k for k in range(5)]
    delta, shuffled = (parse(f"blosc2:5,typesize=4,filter={name}") for name in ("bytedelta", "shuffle"))
    packed = [delta.encode(field[:size]) for size in sizes]
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(many, delta, packed, sizes).result() == ([field[:size] for size in sizes], [])
    assert len(packed[0]) < 0.9 * len(shuffled.encode(field[: sizes[0]]))


def test_a_library_that_is_too_old_for_bytedelta(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blosc2, "BYTEDELTA_SINCE", (99, 0, 7))
    parse("blosc2")
    with pytest.raises(OptionError, match=r"filter bytedelta .* needs C-Blosc2 99.0.7, found 3"):
        parse("blosc2:5,filter=bytedelta")


def test_deflate_without_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = make("deflate")
    monkeypatch.setattr(deflate, "_library", lambda: None)
    slow = make("deflate")
    with slow.decoding() as how:
        assert how[KIND] == PYTHON
    sizes = [len(value) for value in VALUES]
    for one, other in ((fast, slow), (slow, fast), (slow, slow)):
        assert many(one, [other.encode(value) for value in VALUES], sizes) == (VALUES, [])
    packed = slow.encode(WORDS)
    for size, bytes_ in ((len(WORDS) - 1, packed), (len(WORDS) + 1, packed), (len(WORDS), packed[:-3])):
        _, failures = many(slow, [bytes_], [size])
        assert [row for row, _ in failures] == [0]


def test_other_sizes_are_failures(codec: Codec) -> None:
    packed = [codec.encode(WORDS)] * 5
    for size in (len(WORDS) - 1, len(WORDS) + 1, 0, 2 * len(WORDS)):
        sizes = [len(WORDS), size, len(WORDS), size, len(WORDS)]
        values, failures = many(codec, packed, sizes)
        assert [row for row, _ in failures] == [1, 3]
        assert [values[row] for row in (0, 2, 4)] == [WORDS] * 3
    with pytest.raises(DecodeError, match="no value of 7 bytes"):
        codec.decode_into(packed[0], np.empty(7, np.uint8))


def test_truncated_values_are_failures(codec: Codec) -> None:
    for value in (WORDS, WALK):
        packed = codec.encode(value)
        cuts = sorted({*range(0, len(packed), max(1, len(packed) // 40)), len(packed) - 1})
        _, failures = many(codec, [packed[:cut] for cut in cuts], [len(value)] * len(cuts))
        # Of brotli, deflate and lzma the last byte may be an end mark whose lack changes nothing.
        assert {row for row, _ in failures} >= set(range(len(cuts) - 1))


def test_rows_outside_of_the_memory_are_failures(codec: Codec) -> None:
    packed = np.frombuffer(codec.encode(WORDS), np.uint8)
    n, size = len(packed), len(WORDS)
    out = np.full(size, FILL, np.uint8)
    where = [(0, n, 1, size), (0, n, -1, size), (0, n, 0, size + 1), (0, n, 0, -1), (0, n, 2**62, 2**62)]
    zero = np.zeros(len(where), np.int64)
    records = Records(zero, packed, zero, np.full(len(where), n, np.int64))
    starts, nbytes = (np.array([row[k] for row in where]) for k in (2, 3))
    assert [row for row, _ in codec.decode_many(records, out, starts, nbytes)] == list(range(len(where)))
    assert (out == FILL).all()


def test_records_outside_of_the_data_are_failures() -> None:
    codec = make("zstd")
    packed = np.frombuffer(codec.encode(WORDS), np.uint8)
    n = len(packed)
    starts, nbytes = np.array([1, -1, 0, 2**62, 0]), np.array([n, n, n + 1, 2**62, -1])
    out = np.empty(5 * len(WORDS), np.uint8)
    rows, sizes = np.arange(5) * len(WORDS), np.full(5, len(WORDS))
    failures = codec.decode_many(Records(rows, packed, starts, nbytes), out, rows, sizes)
    assert [row for row, _ in failures] == [0, 1, 2, 3, 4]


def mutated(rng: random.Random, packed: bytes) -> bytes:
    """Bytes changed, cut out, doubled, or all new."""
    data = bytearray(packed)
    kind = rng.randrange(5)
    at, size = rng.randrange(len(data) + 1), rng.randrange(1, 9)
    if kind == 0:
        for _ in range(size):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == 1:
        data[at : at + size] = rng.randbytes(rng.randrange(9))
    elif kind == 2:
        data[at:at] = data[at : at + 40]
    elif kind == 3:
        data[:at] = rng.randbytes(min(at, 48))
    else:
        data[at : at + size] = bytes([rng.choice([0, 255, 127, 128])]) * size
    return bytes(data)


def fuzz(codec: Codec, values: list[bytes], rounds: int, seed: int) -> None:
    """No crash, nothing outside of the rows, no exception. Drawing by numpy, one number a call, would take as long as
    all the rest."""
    rng = random.Random(seed)
    packed = [codec.encode(value) for value in values]
    for _ in range(rounds):
        which = rng.choices(range(len(values)), k=200)
        sizes = [max(0, len(values[k]) + rng.choice([0, 0, 0, -1, 1, 50, -50])) for k in which]
        values_out, failures = many(codec, [mutated(rng, packed[k]) for k in which], sizes)
        assert len(values_out) == 200
        assert all(0 <= row < 200 and why for row, why in failures)


FUZZED = [WORDS, WORDS[:300], WALK, WALK[:200], NOISE[:500], bytes(900)]


def test_damaged_values(codec: Codec) -> None:
    fuzz(codec, FUZZED, 2, 1)


@pytest.mark.full
@pytest.mark.parametrize("spec", [*SPECS, *(f"{spec} with dictionary" for spec in WITH_DICTIONARIES)])
def test_many_damaged_values(spec: str) -> None:
    name, _, dictionary = spec.partition(" ")
    fuzz(parse(name, WORDS[1000:3000] if dictionary else b""), FUZZED, 500, 2)


@pytest.mark.parametrize("spec", WITH_DICTIONARIES)
def test_dictionaries(spec: str) -> None:
    values = [b'{"id": %d, "name": "horse", "tags": ["one", "two"], "n": %d}' % (i, i * i) for i in range(2000)]
    trained = zstd.train(values[::2], 4096)
    assert 256 <= len(trained) <= 4096
    plain, better = parse(spec), parse(spec, trained)
    held = values[1::2]
    packed = [better.encode(value) for value in held]
    assert sum(map(len, packed)) < 0.7 * sum(len(plain.encode(value)) for value in held)
    sizes = [len(value) for value in held]
    assert many(better, packed, sizes) == (held, [])
    again = pickle.loads(pickle.dumps(better))
    assert again.dictionary == trained
    assert many(again, packed[:9], sizes[:9]) == (held[:9], [])
    without, failures = many(plain, packed[:50], sizes[:50])
    wrong = {row for row, _ in failures} | {row for row in range(50) if without[row] != held[row]}
    assert wrong == set(range(50)), "a lost dictionary is lost data"


def test_too_few_samples() -> None:
    assert zstd.train([], 4096) == b""
    assert zstd.train([b"abc"] * 5, 4096) == b""
    assert zstd.train([b""] * 500, 4096) == b""


@pytest.mark.parametrize("specs", [("lz4hc:3", "zstd"), pytest.param(SPECS, marks=pytest.mark.full)])
def test_threads_at_once(specs: tuple[str, ...]) -> None:
    """Contexts belong to one thread at a time, dictionaries to all."""
    trained = zstd.train([WORDS[i : i + 200] for i in range(0, 3000, 7)], 2048)
    for spec in specs:
        codec = parse(spec, trained if spec in WITH_DICTIONARIES else b"")
        packing, wrong = Packing([codec]), list[str]()
        barrier = threading.Barrier(4)

        def work(seed: int, codec: Codec, packing: Packing, barrier: threading.Barrier, wrong: list[str]) -> None:
            rng = np.random.default_rng(seed)
            barrier.wait()
            for _ in range(4):
                mine = [WORDS[int(k) :] for k in rng.integers(3000, size=12)]
                if many(codec, [codec.encode(value) for value in mine], [len(value) for value in mine]) != (mine, []):
                    wrong.append(str(codec))
                if [packing.unpack_one(packing.pack(value)) for value in mine] != mine:
                    wrong.append(f"packed by {codec}")

        threads = [threading.Thread(target=work, args=(k, codec, packing, barrier, wrong)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


def test_packing_with_every_codec(codec: Codec) -> None:
    packing = Packing([codec])
    packed = [packing.pack(value) for value in VALUES]
    assert [packing.unpack_one(one) for one in packed] == VALUES
    again = Packing.from_entry(packing.entry())
    assert [str(one) for one in again.codecs] == [str(codec)]
    assert [again.unpack_one(one) for one in packed] == VALUES
    assert packed[8][0] == 0, "noise is stored raw"
    assert all(len(one) <= len(value) + 5 for one, value in zip(packed, VALUES, strict=True))


def test_the_table_of_names() -> None:
    assert set(CODECS) == {parse(s).name for s in SPECS}
    for spec in SPECS:
        codec = parse(spec)
        assert str(parse(str(codec))) == str(codec)
        said = codec.describe()
        assert str(make(said["name"], said.get("level"), None, **said.get("options", {}))) == str(codec)
        assert str(codec) in repr(codec)


@pytest.mark.parametrize("module", [lz4, brotli, blosc2, zstd])
def test_missing_packages_are_named(module: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_library", lambda: None)
    names = [name for name, one in LIBRARIES.items() if one is module]
    for name in names:
        with pytest.raises(OptionError, match=rf"codec {name} needs the package .*pip install"):
            make(name)


def test_a_package_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its C library is there."""
    monkeypatch.setattr(blosc2, "_package", lambda: None)
    with pytest.raises(OptionError, match=r"codec blosc2 needs the package blosc2.*pip install"):
        make("blosc2")


@pytest.mark.parametrize(
    "spec",
    ["lz4:1", "lz4hc:13", "zstd:99", "brotli:12", "deflate:0", "lzma:10", "blosc2:0", "blosc2,typesize=0", "gzip",
     "blosc2,filter=delta", "blosc2,codec=zlib", "blosc2,typesize=x", "deflate,x=1", "zstd:", "lz4,level"],
)  # fmt: skip
def test_options_that_do_not_exist(spec: str) -> None:
    if spec == "zstd:":
        assert str(parse(spec)) == "zstd:3"
        return
    with pytest.raises(OptionError):
        parse(spec)
