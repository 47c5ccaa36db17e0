"""Pickled records: nothing runs unless it was asked for, and hostile ones cost little."""

from __future__ import annotations

import collections
import datetime
import decimal
import os
import pickle
import struct
import time
import tracemalloc

import numpy as np
import pytest
from made_records import arrays, made

from pario.decode import Draw, Pickle
from pario.decode.unpickle import unpickle
from pario.errors import DecodeError, OptionError


def run(decoder, *values):
    records = made(list(values))
    decoder.learn(records[0])
    out = arrays(decoder, records)
    failures = decoder.decode(records, out, Draw())
    return out if failures else decoder.finish(out), failures


class Runs:
    """A pickle of this makes a folder when it is loaded."""

    def __init__(self, folder) -> None:
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


class Kept:
    def __init__(self, x) -> None:
        self.x = x


def test_trust_is_asked_for() -> None:
    with pytest.raises(OptionError, match=r"runs code that the writer of the file chose.*allow=\[\]"):
        Pickle()
    with pytest.raises(OptionError, match="contradict"):
        Pickle(allow=[], allow_pickle=True)
    for wrong in ("os.system", [3], ["name"]):
        with pytest.raises(OptionError, match="allow must be a list"):
            Pickle(allow=wrong)
    with pytest.warns(UserWarning, match="runs code that the writer of the file chose"):
        decoder = Pickle(allow_pickle=True)
    assert repr(decoder) == "Pickle(allow_pickle=True)"
    assert repr(Pickle(["a"], allow=["m.C"])) == "Pickle(fields=('a',), allow=['m.C'])"


def test_nothing_runs_unless_allowed(tmp_path) -> None:
    value = pickle.dumps({"x": Runs(tmp_path / "made")})
    for allow in ([], ["os.mkdir.x", "posix.system"]):
        with pytest.raises(DecodeError, match=r"the pickle uses posix.mkdir, which is no plain data; allow=\['posix"):
            run(Pickle(allow=allow), value)
    assert list(tmp_path.iterdir()) == []
    with pytest.warns(UserWarning, match="Pickle"):
        everything = Pickle(allow_pickle=True)
    run(everything, pickle.dumps(1))
    assert list(tmp_path.iterdir()) == []
    everything.learn(np.frombuffer(value, np.uint8))
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


PLAIN = [
    None,
    True,
    -(2**100),
    1.5,
    1 + 2j,
    "text ü",
    b"bytes \xff",
    bytearray(b"abc"),
    [1, [2, (3,)]],
    {"a": {"b": {1, 2}}, (1, "x"): frozenset([3])},
    collections.OrderedDict(a=1, b=2),
    datetime.datetime(2020, 1, 2, 3, 4, 5, 6),
    datetime.timedelta(3),
    decimal.Decimal("1.5"),
    np.float32(2.5),
    np.int64(-3),
    np.bool_(True),
]
ARRAYS = [
    np.arange(6.0).reshape(2, 3),
    np.asfortranarray(np.arange(24).reshape(2, 3, 4)),
    np.arange(4, dtype=">i2"),
    np.zeros((0, 3), "u1"),
    np.array(5.0),
    np.array(["a", "bcd"]),
    np.array([b"a", b"bcd"]),
    np.array([True, False]),
    np.arange(10)[::2],
]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_data_without_running_code(protocol) -> None:
    for value in PLAIN:
        if protocol < 2 and isinstance(value, (datetime.date, bytearray)):
            continue
        found = unpickle(pickle.dumps(value, protocol), ())
        assert type(found) is type(value)
        assert found == value
    for array in ARRAYS:
        twice = unpickle(pickle.dumps([array, {"again": array}], protocol), ())
        for found in (twice[0], twice[1]["again"]):
            assert found.dtype == array.dtype
            np.testing.assert_array_equal(found, array)
    ragged = np.empty(2, object)
    ragged[:] = [np.arange(2), "x"]
    found = unpickle(pickle.dumps(ragged, protocol), ())
    assert found[0].tolist() == [0, 1]
    assert found[1] == "x"


#: {'label': 7, 'name': 'caf\xe9', 'data': numpy.arange(3, dtype='u1')}, as Python 2 writes it with protocol 2
OF_PYTHON_2 = (
    b"\x80\x02}q\x01(U\x04nameq\x02U\x04caf\xe9q\x03U\x05labelq\x04K\x07U\x04dataq\x05cnumpy.core.multiarray\n"
    b"_reconstruct\nq\x06cnumpy\nndarray\nq\x07K\x00\x85q\x08U\x01b\x87Rq\t(K\x01K\x03\x85q\ncnumpy\ndtype\nq\x0bU"
    b"\x02u1K\x00K\x01\x87Rq\x0c(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89U\x03\x00\x01\x02tbu."
)


@pytest.mark.filterwarnings("ignore:Pickle\\(allow_pickle=True\\)", "ignore:numpy.core.multiarray is deprecated")
@pytest.mark.parametrize("trust", [{"allow": []}, {"allow_pickle": True}], ids=str)
def test_pickles_of_python_2(trust) -> None:
    out, failures = run(Pickle(["name", "label", "data"], **trust), OF_PYTHON_2)
    assert not failures
    assert out["name"][0] == "caf\xe9"
    assert out["label"].tolist() == [7]
    assert out["data"].tolist() == [[0, 1, 2]]
    assert "encoding" not in repr(Pickle(**trust))
    with pytest.raises(OptionError, match="encoding must be"):
        Pickle(**trust, encoding="utf-99")


@pytest.mark.filterwarnings("ignore:Pickle\\(allow_pickle=True\\)")
@pytest.mark.parametrize("trust", [{"allow": []}, {"allow_pickle": True}], ids=str)
def test_strings_of_python_2_in_another_encoding(trust) -> None:
    pickled = b"\x80\x02U\x05caf\xc3\xa9q\x01."
    for encoding, right in (("utf-8", "caf\xe9"), ("bytes", b"caf\xc3\xa9")):
        decoder = Pickle(**trust, encoding=encoding)
        out, failures = run(decoder, pickled)
        assert not failures
        assert out["data"][0] == right
        assert f"encoding={encoding!r}" in repr(decoder)


def test_a_class_that_is_allowed() -> None:
    value = pickle.dumps(Kept(np.arange(3)))
    name = f"{Kept.__module__}.Kept"
    with pytest.raises(DecodeError, match=f"the pickle uses {name}"):
        run(Pickle(allow=[]), value)
    out, failures = run(Pickle(["x"], allow=[name]), value, value)
    assert failures == []
    assert out["x"].tolist() == [[0, 1, 2]] * 2


Point = collections.namedtuple("Point", "x y z")


@pytest.mark.parametrize("fields", ["all", ["z", "x", "y"]])
def test_fields_of_a_namedtuple(fields) -> None:
    """By name; those of a list by number."""
    pickles = [pickle.dumps(Point(i, np.full(3, i), "n")) for i in range(2)]
    out, failures = run(Pickle(fields, allow=[f"{__name__}.Point"]), *pickles)
    assert failures == []
    assert list(out) == (["x", "y", "z"] if fields == "all" else fields)
    assert (out["x"].tolist(), out["y"].tolist(), out["z"].tolist()) == ([0, 1], [[0] * 3, [1] * 3], ["n", "n"])
    out, _ = run(Pickle(["1", "0"], allow=[f"{__name__}.Point"]), *pickles)
    assert out["0"].tolist() == [0, 1]
    pair = collections.namedtuple("pair", "image label", module=__name__)
    assert list(Pickle("all", allow=[]).named(pair(b"", 1))) == ["image", "label"]
    with pytest.raises(DecodeError, match="no field 'w'; there is 3 elements"):
        run(Pickle(["w"], allow=[f"{__name__}.Point"]), *pickles)


def test_fields_of_a_torch_geometric_data() -> None:
    new, old = Kept(None), Kept(None)
    new.__dict__ = {"_store": {"pos": np.ones((2, 3)), "y": 1.5}}
    old.__dict__ = {"pos": np.ones((2, 3)), "y": 1.5}
    with pytest.warns(UserWarning, match="Pickle"):
        decoder = Pickle(["pos", "y"], allow_pickle=True)
    out, failures = run(decoder, pickle.dumps(new), pickle.dumps(old))
    assert failures == []
    assert out["pos"].shape == (2, 2, 3)
    assert out["y"].tolist() == [1.5, 1.5]


def built(what: bytes, *state) -> bytes:
    """A pickle that calls `what` (module, newline, name) with (), and gives it a state."""
    rest = pickle.dumps(state, 2)[2:-1]
    return b"\x80\x02c" + what + b"\n(tR" + rest + b"b."


DEEP = [[]]
for _ in range(3000):
    DEEP = [DEEP]
laughs: list = ["ha"]
for _ in range(40):
    laughs = [laughs, laughs]
key: tuple = ()
for _ in range(60):
    key = (key, key)
LOOP: list = []
LOOP.append(LOOP)


def dumped(value, protocol=4) -> bytes:
    import io
    import sys

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        file = io.BytesIO()
        pickle._Pickler(file, protocol).dump(value)
        return file.getvalue()
    finally:
        sys.setrecursionlimit(limit)


def hashed_key() -> bytes:
    """{key: 1} where the key's hash visits 2^60 tuples; Python cannot write it, as it would have to hash it."""
    inside = pickle.dumps(key, 4)[2:-1]
    inside = inside[9:] if inside[:1] == pickle.FRAME else inside
    return b"\x80\x04}" + inside + b"K\x01s."


HOSTILE = {
    "truncated": pickle.dumps({"a": np.arange(100)})[:-20],
    "long bytes": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"abc.",
    "long bytearray": b"\x80\x05\x96" + struct.pack("<Q", 1 << 36) + b"abc.",
    "long frame": b"\x80\x04\x95" + struct.pack("<Q", 1 << 40) + b"N.",
    "memo index": b"\x80\x04Nr\xff\xff\xff\x7f.",
    "loop": pickle.dumps(LOOP),
    "billion laughs": pickle.dumps(laughs),
    "hash of a key": hashed_key(),
    "deep": dumped(DEEP),
    "bytearray of a number": b"\x80\x02c__builtin__\nbytearray\nJ\xff\xff\xff\x7f\x85R.",
    "array of a shape": b"\x80\x02cnumpy\nndarray\nJ\xff\xff\xff\x7f\x85\x85R.",
    "set of a key": b"\x80\x02c__builtin__\nset\n]" + pickle.dumps(key, 2)[2:-1] + b"a\x85R.",
    "dtype of objects": pickle.dumps(np.arange(2)).replace(b"i8", b"O8"),
    "state for a list": b"\x80\x02](U\x01ab.",
    "extension": b"\x80\x02\x82\x01.",
    "persistent": b"\x80\x02Pabc\n.",
    "text": b"hello",
    "unfinished": b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n(NNNtR.",
}
#: what they say is None, at whatever length
HARMLESS = ("long frame", "memo index")


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles_cost_little(name) -> None:
    tracemalloc.start()
    begin = time.process_time()
    try:
        if name in HARMLESS:
            assert run(Pickle(allow=[]), HOSTILE[name])[0]["data"].tolist() == [None]
        else:
            with pytest.raises(DecodeError, match="cannot decode this record") as caught:
                run(Pickle(allow=[]), HOSTILE[name])
            assert len(str(caught.value)) < 2000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20
    assert time.process_time() - begin < 2


def test_a_complete_array_takes_no_other_state() -> None:
    """numpy.ndarray.__setstate__ and numpy.dtype.__setstate__ believe what they are told."""
    array = pickle.dumps(np.arange(2), 2)[:-1]
    state = pickle.dumps((1, (1 << 40,), None, False, b""), 2)[2:]
    assert array[-1:] == b"b"
    with pytest.raises(pickle.UnpicklingError, match="more parts for a ndarray, which is complete"):
        unpickle(array + state[:-1] + b"b.", ())
    for dtype in (np.dtype([("a", "i4")]), np.dtype("M8[ns]"), np.dtype((np.void, 0))):
        with pytest.raises(pickle.UnpicklingError):
            unpickle(pickle.dumps(np.zeros(2, dtype)), ())


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.filterwarnings("ignore:Pickle")
def test_what_follows_a_pickle_is_not_dropped(protocol: int) -> None:
    one = pickle.dumps({"a": [1.5] * 5}, protocol)
    for decoder in (Pickle(allow=[]), Pickle(allow_pickle=True)):
        for value in (one, one + bytes(9)):
            assert decoder.value(np.frombuffer(value, np.uint8), 0, Draw(), b"") == {"a": [1.5] * 5}
        for value in (one * 2, one + b"\0x"):
            with pytest.raises(pickle.UnpicklingError, match="bytes follow the end"):
                decoder.value(np.frombuffer(value, np.uint8), 0, Draw(), b"")


def test_keys_of_one_hash_are_few() -> None:
    keys = [k * ((1 << 61) - 1) for k in range(1, 65)]
    assert len({*map(hash, keys)}) == 1
    assert unpickle(pickle.dumps(dict.fromkeys(keys)), ()) == dict.fromkeys(keys)
    usual = [{-1: 0, -2: 1, (3, 4): k} for k in range(500)]
    assert unpickle(pickle.dumps(usual), ()) == usual
    with pytest.raises(pickle.UnpicklingError, match="too many keys of one hash"):
        unpickle(pickle.dumps(dict.fromkeys([*keys, 65 * keys[0]])), ())
