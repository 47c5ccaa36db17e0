"""Python functions as decoders, and what the loader takes for a decoder."""

from __future__ import annotations

import collections
import json
import threading

import numpy as np
import pytest
from made_records import arrays, made, rows

from pario.decode import Datum, Decoder, Draw, Function, Raw, as_decoder
from pario.errors import DecodeError, OptionError

Pair = collections.namedtuple("Pair", ["image", "caption"])


def run(decoder: Function, values: list[bytes]):
    records = made(values)
    decoder.learn(records[0])
    out = arrays(decoder, records)
    return out, decoder.decode(records, out, Draw())


@pytest.mark.parametrize(
    ("returned", "names"),
    [
        (lambda b: len(b), {"data": ((), "int64")}),
        (lambda b: 0.5, {"data": ((), "float64")}),
        (lambda b: np.float32(b[0]), {"data": ((), "float32")}),
        (lambda b: [[1, 2, b[0]]], {"data": ((1, 3), "int64")}),
        (lambda b: (np.zeros((2, 3), np.int8), b[0]), {"data": ((2, 3), "int8"), "label": ((), "int64")}),
        (lambda b: {"x": np.ones(2, bool), "y": 1j}, {"x": ((2,), "bool"), "y": ((), "complex128")}),
        (lambda b: Pair(np.zeros(4), b[0]), {"image": ((4,), "float64"), "caption": ((), "int64")}),
    ],
)
def test_what_it_returns_names_the_arrays(returned, names) -> None:
    values = [b"abc", b"xyz"]
    out, failures = run(Function(returned), values)
    assert failures == []
    assert {name: (a.shape[1:], str(a.dtype)) for name, a in out.items()} == names
    for i, value in enumerate(values):
        right = returned(value)
        right = right._asdict() if isinstance(right, Pair) else right
        right = dict(zip(("data", "label"), right, strict=True)) if isinstance(right, tuple) else right
        for name, array in (right if isinstance(right, dict) else {"data": right}).items():
            np.testing.assert_array_equal(out[name][i], array)


def test_exceptions_become_failures_with_type_and_text() -> None:
    out, failures = run(Function(lambda b: json.loads(b)["x"]), [b'{"x": 1}', b'{"y": 2}', b"?", b'{"x": 3}'])
    assert [row for row, _ in failures] == [1, 2]
    assert failures[0][1] == "KeyError: 'x'"
    assert failures[1][1].startswith("JSONDecodeError: Expecting value")
    assert out["data"][[0, 3]].tolist() == [1, 3]


def test_unequal_shapes_dtypes_and_names() -> None:
    _, failures = run(Function(lambda b: np.zeros(len(b))), [b"ab", b"abc"])
    assert failures[0][1].startswith("'data' is float64[3], that of record 0 is float64[2]")
    _, failures = run(Function(lambda b: b[0] if b[0] < 99 else 0.5), [b"a", b"z", b"b"])
    assert [row for row, _ in failures] == [1]
    assert "float64[], that of record 0 is int64[]" in failures[0][1]
    _, failures = run(Function(lambda b: {chr(b[0]): 1}), [b"a", b"z"])
    assert failures[0][1] == "returned ['z'], for record 0 ['a']"


@pytest.mark.parametrize("returned", [None, (1, 2, 3), (), {}, [[1], [2, 3]]])
def test_no_arrays(returned) -> None:
    with pytest.raises(DecodeError, match=r"cannot decode this record: .*it begins with 61 62"):
        Function(lambda b: returned).learn(np.frombuffer(b"ab", np.uint8))


@pytest.mark.parametrize("returned", ["text", b"bytes", ["a", "bc"], {1, 2}, Ellipsis])
def test_other_objects_are_a_column_of_objects(returned) -> None:
    out, failures = run(Function(lambda b: {"x": returned, "n": 1}), [b"a", b"b"])
    assert failures == []
    assert out["x"].dtype == object
    assert out["x"].tolist() == [returned, returned]


def test_dicts_in_dicts_are_flattened() -> None:
    def tree(b: bytes):
        return {"a": {"b": {"c": b[0]}, "d": "x"}, "e": {}}

    out, failures = run(Function(tree), [b"a", b"b"])
    assert failures == []
    assert out["a.b.c"].tolist() == [97, 98]
    assert out["a.d"].tolist() == ["x", "x"]
    assert sorted(out) == ["a.b.c", "a.d"]
    out, _ = run(Function(tree, ragged={"a": "object"}), [b"a"])
    assert out["a"].tolist() == [tree(b"a")["a"]]


class Asked:
    def only_id(self, value, id):
        return {"given": len(value), "id": id}

    def all_of_them(self, value, key, id, rng):
        return {"given": len(value), "id": id, "key": key, "draw": rng.integers(1 << 40)}

    def other_order(self, rng, record_key=None, *, id, value, key):
        return self.all_of_them(value, key, id, rng)

    def first_has_another_name(self, record, /, rng, key, **rest):
        return {"given": len(record), "key": key, "draw": rng.integers(1 << 40)}


@pytest.mark.parametrize("name", ["only_id", "all_of_them", "other_order", "first_has_another_name"])
def test_a_function_asks_by_name(name) -> None:
    values, ids = [b"abc", b"d"], [70, 3]
    records = made(values, ids=ids)
    asked: list[list[int]] = []

    def keys(ids) -> list[bytes]:
        asked.append(list(ids))
        return [b"key %d" % i for i in ids]

    decoder, draw = Function(getattr(Asked(), name)), Draw(5, 2, keys)
    decoder.learn_at(records[0], 70, draw)
    out = arrays(decoder, records)
    assert decoder.decode(records, out, draw) == []
    assert out["given"].tolist() == [3, 1]
    if "id" in out:
        assert out["id"].tolist() == ids
    if "key" in out:
        assert out["key"].tolist() == [b"key 70", b"key 3"]
        assert asked == [[70], ids]  # once per call, for all its records
        alone = [np.random.default_rng([5, 2, i]).integers(1 << 40) for i in ids]
        assert out["draw"].tolist() == alone
    else:
        assert asked == []


@pytest.mark.parametrize(
    "f", [lambda id: len(id), lambda key: len(key), lambda rng=b"": len(rng), lambda *a: len(a[0])]
)
def test_a_single_parameter_is_the_record_whatever_its_name(f) -> None:
    out, failures = run(Function(f), [b"abc", b"xyz"])
    assert failures == []
    assert out["data"].tolist() == [3, 3]


def test_a_function_that_asks_for_something_else() -> None:
    with pytest.raises(OptionError, match=r"needs scale: pario passes a record's bytes, and by name value, key"):
        Function(lambda value, scale: 0)
    Function(lambda value, scale=1: 0)
    Function(lambda value, generator: 0, rng=True)


def test_nothing_is_drawn_or_looked_up_unless_asked(monkeypatch) -> None:
    monkeypatch.setattr(Draw, "rng", lambda *_: pytest.fail("drawn"))
    records = made([b"abc"])
    decoder, draw = Function(lambda value, id: id), Draw(0, 0, lambda ids: pytest.fail("looked up"))
    decoder.learn_at(records[0], 0, draw)
    assert decoder.decode(records, arrays(decoder, records), draw) == []


def test_learn_repeats_the_functions_own_error() -> None:
    with pytest.raises(DecodeError, match=r"ZeroDivisionError: .*by zero"):
        Function(lambda b: 1 // 0).learn(np.frombuffer(b"ab", np.uint8))


def test_bytes_or_a_read_only_view() -> None:
    seen = []
    run(Function(lambda b: seen.append(b) or 1), [b"abc"])
    run(Function(lambda b: seen.append(b) or 1, view=True), [b"abc"])
    assert [type(b) for b in seen] == [bytes, bytes, np.ndarray, np.ndarray]
    assert seen[0] == b"abc" == seen[2].tobytes()
    assert not seen[3].flags.writeable


def test_threads_on_disjoint_rows() -> None:
    values = [bytes([i]) * 50 for i in range(200)]
    records = made(values)
    decoder = Function(lambda b: np.frombuffer(b, np.uint8) * 1.0)
    decoder.learn(records[0])
    out = arrays(decoder, records)
    failures: list = []

    def work(start: int) -> None:
        part = {name: array[start : start + 50] for name, array in out.items()}
        failures.extend(decoder.decode(rows(records, start, start + 50), part, Draw()))

    threads = [threading.Thread(target=work, args=(start,)) for start in range(0, 200, 50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    np.testing.assert_array_equal(out["data"], np.repeat(np.arange(200.0)[:, None], 50, axis=1))


def test_as_decoder() -> None:
    assert isinstance(as_decoder(None), Raw)
    mine = Datum()
    assert as_decoder(mine) is mine
    assert isinstance(as_decoder(len), Function)
    assert repr(as_decoder(len)) == "Function(len)"
    assert repr(Function(len, rng=True, parallel=False)) == "Function(len, rng=True, parallel=False)"


def test_the_function_of_a_repr_may_know_the_decoder() -> None:
    """As a method does, in whose own repr stands that of its object."""

    class Mine(Function):
        def __init__(self) -> None:
            super().__init__(self.first, parallel=False)

        def first(self, value: bytes) -> int:
            return value[0]

    assert repr(Mine()).endswith("Mine.first)")
    assert "Mine.first, parallel=False)" in repr(Function(Mine().first, parallel=False))


def test_a_repr_of_a_users_decoder_ends() -> None:
    """What it has by the name of an argument may be its own method."""

    class Mine(Raw):
        def __init__(self, learn: bool) -> None:
            super().__init__()

        arguments = Decoder.arguments

    assert "Mine(learn=<bound method Raw.learn of ...>)" in repr(Mine(True))
    assert as_decoder(len).parallel
    assert not Function(len, parallel=False).parallel
    with pytest.raises(OptionError, match=r"Datum\(\), got the class Datum"):
        as_decoder(Datum)
    for wrong in (3, "datum"):
        with pytest.raises(OptionError, match="a function or None, got"):
            as_decoder(wrong)
    with pytest.raises(OptionError, match="callable"):
        Function(3)  # type: ignore[arg-type]
