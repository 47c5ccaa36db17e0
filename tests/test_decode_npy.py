"""NumPy's files: numpy.save and numpy.load are the oracles."""

from __future__ import annotations

import io
import zipfile

import lmdb
import numpy as np
import pytest
from made_records import arrays, made

import pario
from pario.decode import Draw, Npy, Npz
from pario.decode.npy import array_of
from pario.decode.rows import BadValue
from pario.errors import DecodeError

RNG = np.random.default_rng(3)


def npy(array, **options) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def npz(save=np.savez, **named) -> bytes:
    file = io.BytesIO()
    save(file, **named)
    return file.getvalue()


def u8(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


@pytest.mark.parametrize(
    "array",
    [
        RNG.random((3, 4)),
        np.asfortranarray(RNG.random((3, 4, 2))),
        np.float32(3),
        np.zeros((0, 5), ">i2"),
        np.arange(7, dtype=">u8"),
        np.array([True, False]),
        np.array([(1, 2.0)], [("a", "<i4"), ("b", "<f8")]),
        np.array(["2020-01-01"], "M8[D]"),
        RNG.random(3) + 1j,
    ],
    ids=lambda a: f"{a.dtype.str}{a.shape}".replace(" ", ""),
)
@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_what_numpy_wrote(array, version) -> None:
    file = io.BytesIO()
    np.lib.format.write_array(file, np.asarray(array), version)
    found, begin = array_of(u8(file.getvalue()))
    right = np.load(io.BytesIO(file.getvalue()))
    assert (found.dtype, found.shape) == (right.dtype, right.shape)
    np.testing.assert_array_equal(found, right)
    assert begin == len(file.getvalue()) - right.nbytes


def test_python_objects_are_refused() -> None:
    with pytest.raises(BadValue, match="a pickle, which pario does not load here"):
        array_of(u8(npy(np.array([{}]), allow_pickle=True)))
    with pytest.raises(DecodeError, match="a pickle, which pario does not load here"):
        Npy().learn(u8(npy(np.array([{}]), allow_pickle=True)))
    with pytest.raises(DecodeError, match=r"'x.npy': the array holds Python objects"):
        Npz().learn(u8(npz(x=np.array([None]))))


def header(text: str) -> bytes:
    return b"\x93NUMPY\1\0" + len(text).to_bytes(2, "little") + text.encode()


@pytest.mark.parametrize(
    "text",
    [
        "{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,)}",
        "{'descr': 'V0', 'fortran_order': False, 'shape': (1000000000000,)}",
        "{'descr': '|V999999999999', 'fortran_order': False, 'shape': (1,)}",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (-1,)}",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (True,)}",
        "{'descr': '<f8', 'fortran_order': 1, 'shape': ()}",
        "{'descr': [('a', 'O')], 'fortran_order': False, 'shape': ()}",
        "{'descr': '<f8', 'fortran_order': False, 'shape': " + "(" * 300 + ")" * 300 + "}",
        "-" * 9000 + "1",
        "__import__('os').abort()",
        "{'descr': '<f8', 'fortran_order': False, 'shape': ()} ",
        "'\\o'",
        "\xff" * 20,
        "",
    ],
    ids=range(14),
)
def test_hostile_headers(text) -> None:
    with pytest.raises(BadValue):
        array_of(u8(header(text)))


def run(decoder, values):
    records = made(values)
    out = arrays(decoder, records)
    return out, decoder.decode(records, out, Draw())


def test_rows_whose_header_is_another_one() -> None:
    """Same array, said otherwise: copied. Another dtype of as many bytes, or another shape: refused."""
    rows = RNG.random((3, 4))
    other = io.BytesIO()
    np.lib.format.write_array(other, rows[1], (2, 0))
    decoder = Npy()
    decoder.learn(u8(npy(rows[0])))
    values = [npy(rows[0]), other.getvalue(), npy(rows[2].view("M8[s]")), npy(rows[2].reshape(2, 2)), npy(rows[2])[:-8]]
    out, failures = run(decoder, [*values, npy(rows[0]) + b"\0"])
    np.testing.assert_array_equal(out["data"][:2], rows[:2])
    assert [i for i, _ in failures] == [2, 3, 4, 5]
    assert "datetime64[s][4], that of record 0 is float64[4]" in failures[0][1]
    assert "float64[2, 2]" in failures[1][1]
    assert "are 32 bytes, the record has 24" in failures[2][1]
    assert "are 32 bytes, the record has 33" in failures[3][1]


def test_optional_rows_are_all_there() -> None:
    rows = RNG.random((3, 4))
    decoder = Npy(optional=["data"])
    decoder.learn(u8(npy(rows[0])))
    out, failures = run(decoder, [npy(row) for row in rows])
    np.testing.assert_array_equal(out["data"], rows)
    assert out["there"].all()
    assert not failures


def test_rows_are_copied_as_they_lie() -> None:
    decoder = Npy()
    decoder.learn(u8(npy(np.zeros((2, 3), "f4"))))
    assert decoder.copies
    verbatim = decoder.verbatim()
    assert (verbatim.name, verbatim.head) == ("data", len(npy(np.zeros((2, 3), "f4"))) - 24)
    for other in (Npy(ragged="list"), Npy()):
        other.learn(u8(npy(np.asfortranarray(np.zeros((2, 3))))))
        assert other.verbatim() is None


@pytest.fixture(params=["tier", "scratch", "ring"])
def how(request: pytest.FixtureRequest) -> dict[str, str]:
    """Out of memory that the node has, or that the rank has read, or the ring."""
    if request.param == "scratch":
        request.getfixturevalue("nothing_copied")
    return {"recipe": "ring" if request.param == "ring" else "auto"}


def test_straight_into_the_batch(tmp_path, how) -> None:
    """Large rows, out of memory that the node has, or that the rank has read; one record differs in its header."""
    rows = RNG.random((30, 40, 64))
    with lmdb.open(str(tmp_path), map_size=1 << 24) as env, env.begin(write=True) as txn:
        for i, row in enumerate(rows):
            txn.put(b"%04d" % i, npy(row if i != 7 else np.asfortranarray(row)))
    with pario.Loader(tmp_path, 8, Npy(), shuffle="global", **how) as loader:
        for _ in range(2):
            for batch in loader:
                np.testing.assert_array_equal(batch["data"], rows[batch.ids])


def test_a_zip_bomb_is_refused_before_it_is_read() -> None:
    bomb = npz(np.savez_compressed, x=np.zeros(1 << 20))
    with pytest.raises(DecodeError, match=r"would take 8,388,\d+ bytes; most_bytes is 1,000"):
        Npz(most_bytes=1000).learn(u8(bomb))
    Npz(["x"], most_bytes=9 << 20).learn(u8(bomb))


def test_only_the_arrays_that_are_asked_for() -> None:
    value = npz(x=np.arange(3), y=np.array([None]), z=np.ones(2))
    decoder = Npz({"x": "float32", "z": None})
    decoder.learn(u8(value))
    out, failures = run(decoder, [value, npz(x=np.arange(3))])
    assert out["x"].dtype == np.float32
    assert failures == [(1, "no array 'z' in the .npz file")]


def test_zips_that_numpy_does_not_write() -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("x.npy", npy(np.arange(3)))
    with pytest.raises(DecodeError, match="compressed in a way that NumPy does not use"):
        Npz().learn(u8(file.getvalue()))
    with pytest.raises(DecodeError, match=r"it is no \.npz file.*perhaps JSON. Use pario.decode.Json\(\)"):
        Npz().learn(u8(b'{"a": 1}'))


def test_bytes_behind_an_array_are_noticed_on_every_way(tmp_path, how) -> None:
    with lmdb.open(str(tmp_path), map_size=1 << 24) as env, env.begin(write=True) as txn:
        for i in range(30):
            txn.put(b"%04d" % i, npy(np.zeros((40, 64))) + bytes(i == 20))
    with pario.Loader(tmp_path, 8, Npy(), on_error="skip", **how) as loader:
        assert [i for batch in loader for i in batch.ids.tolist()] == [i for i in range(30) if i != 20]
        assert list(loader.stats()["bad"]) == ["floatn[n, n] are n bytes, the record has n"]
