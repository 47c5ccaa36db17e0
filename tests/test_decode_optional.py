"""Items that only some records have: a mask beside the rows. The oracle is a list of Python's values, None where a
record lacks the item."""

from __future__ import annotations

import io
import itertools
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from made_records import arrays, made

import pario
from pario.decode import Decoder, Draw, Function, Json, MsgPack, Npz, Pickle, TensorProtos, Zlib
from pario.errors import DecodeError, OptionError

#: sets of each form; the bar of a long run is 3,000 in all
MANY = int(os.environ.get("PARIO_OPTIONAL_SETS", "60"))

Values = list[Any]


def npz(record: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    np.savez(file, **{name: np.asarray(item) for name, item in record.items() if item is not None})
    return file.getvalue()


def packb(record: Any) -> bytes:
    return __import__("msgpack").packb(record)


#: form -> (encoder, fields=..., options -> decoder)
FORMS: dict[str, tuple[Callable[[Any], bytes], Callable[..., Decoder]]] = {
    "json": (lambda record: json.dumps(record).encode(), Json),
    "msgpack": (packb, MsgPack),
    "pickle": (pickle.dumps, lambda *fields, **options: Pickle(*fields, allow=[], **options)),
    "npz": (npz, Npz),
    "function": (pickle.dumps, lambda fields="all", **options: Function(pickle.loads, **options)),
}


def random_values(rng: np.random.Generator) -> tuple[Values, str | None, str]:
    """(an item of each record, ragged=, kind): of one kind, so that every record is good."""
    mode = (None, "flat", "pad", "list", "object")[int(rng.integers(5))]
    kind = ("int", "float")[int(rng.integers(2))]
    length, listed = int(rng.integers(1, 4)), mode is not None or bool(rng.integers(2))
    there = (0.0, 0.2, 0.5, 0.95)[int(rng.integers(4))]

    def number() -> Any:
        return int(rng.integers(-9, 9)) if kind == "int" else float(rng.integers(-9, 9)) + 0.5

    def item() -> Any:
        if rng.random() >= there:
            return None
        return [number() for _ in range(int(rng.integers(0, 4)) if mode else length)] if listed else number()

    return [item() for _ in range(int(rng.integers(1, 12)))], mode, kind


def rows_of(arrays: dict[str, Any], n: int) -> Values:
    """The items of each row, as Python's, whether it is there or not."""
    x = arrays["x"]
    if "x_offsets" in arrays:
        return [x[a:b].tolist() for a, b in itertools.pairwise(arrays["x_offsets"].tolist())]
    if "x_lengths" in arrays:
        return [row[:k].tolist() for row, k in zip(x, arrays["x_lengths"].tolist(), strict=True)]
    assert len(x) == n
    return [row.tolist() if isinstance(row, (np.ndarray, np.generic)) else row for row in x]


def nothing(values: Values, mode: str | None) -> Any:
    """What a row holds that is not there."""
    if mode in ("flat", "pad"):
        return []
    if mode:
        return None
    first = next((value for value in values if value is not None), 0)
    return [0] * len(first) if isinstance(first, list) else 0


def check(values: Values, mode: str | None, arrays: dict[str, Any]) -> None:
    there = [value is not None for value in values]
    assert arrays["x_there"].dtype == bool
    assert arrays["x_there"].tolist() == there
    wanted = [nothing(values, mode) if value is None else value for value in values]
    assert rows_of(arrays, len(values)) == wanted
    assert arrays["n"].tolist() == list(range(len(values)))


def records_of(values: Values, rng: np.random.Generator) -> list[dict[str, Any]]:
    """Some say that they lack it, others do not have the name."""
    made: list[dict[str, Any]] = []
    for n, value in enumerate(values):
        made.append({"n": n, "x": value} if value is not None or rng.random() < 0.5 else {"n": n})
    return made


def by_hand(decoder: Decoder, values: list[bytes]) -> dict[str, Any]:
    records = made(values)
    for k in range(len(values)):
        if not k or decoder.is_open:
            decoder.learn(records[k])
    if decoder.is_open:
        decoder.settle(len(values))
    out = arrays(decoder, records)
    assert decoder.decode(records, out, Draw()) == []
    return decoder.finish(out)


@pytest.mark.parametrize("form", FORMS)
def test_random_sets(form: str) -> None:
    encode, decoder_of = FORMS[form]
    for seed in range(MANY):
        rng = np.random.default_rng([seed, len(form)])
        values, mode, kind = random_values(rng)
        dtype = {"int": "i4", "float": "f4"}[kind] if form != "function" and rng.random() < 0.5 else None
        fields = ("all",) if rng.random() < 0.5 and not dtype else ({"n": None, "x": dtype},)
        decoder = decoder_of(*fields, ragged=mode and {"x": mode}, optional=["x"])
        encoded = [encode(record) for record in records_of(values, rng)]
        lacking = all(value is None for value in values)
        if lacking and not dtype and mode != "object":
            with pytest.raises(OptionError, match=f"none of the {len(values)} records"):
                by_hand(decoder, encoded)
            continue
        found = by_hand(decoder, encoded)
        check(values, mode, found)
        if dtype and mode != "object" and mode != "list":
            assert found["x"].dtype == np.dtype(dtype)
        if mode is None and not lacking and dtype is None:
            assert found["x"].dtype.kind == {"int": "i", "float": "f"}[kind]


def write(path: Path, records: list[bytes]) -> str:
    with lmdb.open(str(path), map_size=1 << 24) as env, env.begin(write=True) as txn:
        for k, value in enumerate(records):
            txn.put(b"%05d" % k, value)
    return str(path)


@pytest.mark.parametrize("mode", [None, "flat", "pad", "list"])
def test_a_loader_learns_from_the_first_record_that_has_it(tmp_path: Path, mode: str | None) -> None:
    """Among others that are broken, which are left out."""
    n, first = 300, 207
    values = [([k, k + 1] if k >= first and k % 3 == 0 else None) for k in range(n)]
    text = [json.dumps({"n": k, **({} if value is None else {"x": value})}).encode() for k, value in enumerate(values)]
    broken = {5: b"{", 230: b'{"n": 230, "x": "text"}', 231: b'{"x": [1, 2]}', 250: b'{"n": 250, "x": [1.5, 2]}'}
    path = write(tmp_path / "set", [broken.get(k, value) for k, value in enumerate(text)])
    decoder = Json(["n", "x"], ragged=mode and {"x": mode}, optional="x")
    with pario.Loader(path, 32, decoder, shuffle="global", on_error="skip", comm="self") as loader:
        seen = {}
        for batch in loader:
            ids = batch.ids.tolist()
            rows = rows_of(dict(batch), len(ids))
            for i, row, there in zip(ids, rows, batch["x_there"].tolist(), strict=True):
                seen[i] = row if there else None
                assert there or row == nothing(values, mode)
        assert loader.skipped == len(broken)
    assert seen == {k: value for k, value in enumerate(values) if k not in broken}


def test_what_none_of_the_records_has(tmp_path: Path) -> None:
    path = write(tmp_path / "set", [b'{"n": 1}'] * 20)
    with pytest.raises(OptionError, match=r"none of the \d+ records .*'x'.*Say the dtype.*ragged"):
        pario.Loader(path, 4, Json(["n", "x"], optional=["x"]), comm="self")
    with pario.Loader(path, 4, Json({"n": None, "x": "f4"}, optional=["x"]), comm="self") as loader:
        batch = loader.peek()
        assert (batch["x"].dtype, batch["x"].tolist(), batch["x_there"].any()) == (np.dtype("f4"), [0.0] * 4, False)
    with pario.Loader(path, 4, Json(["n", "x"], optional=["x"], ragged={"x": "object"}), comm="self") as loader:
        assert loader.peek()["x"].tolist() == [None] * 4


def test_texts_and_documents_have_none() -> None:
    values = [b'{"a": {"b": "x"}}', b'{"a": null}', b'{"c": 1}', b'{"a": {"b": "y"}}']
    found = by_hand(Json(["a.b"], optional=["a.b"]), values)
    assert found["a.b"].tolist() == ["x", None, None, "y"]
    assert found["a.b_there"].tolist() == [True, False, False, True]
    zipped = by_hand(Zlib(Json(["a.b"], optional=["a.b"])), [__import__("zlib").compress(value) for value in values])
    assert zipped["a.b"].tolist() == ["x", None, None, "y"]


def test_a_tensor_that_some_records_lack() -> None:
    from caffe2_message import tensor_protos

    both = tensor_protos(("FLOAT", (2,), [1.0, 2.0]), ("INT32", (1,), [7]))
    one = tensor_protos(("FLOAT", (2,), [3.0, 4.0]))
    found = by_hand(TensorProtos(optional=["label"]), [one, both, one])
    assert found["label"].tolist() == [0, 7, 0]
    assert found["label_there"].tolist() == [False, True, False]


def test_options_that_do_not_fit() -> None:
    for make in (
        lambda: Json(optional=["x"]),
        lambda: Json(["y"], optional=["x"]),
        lambda: Json("all", optional=[1]),
        lambda: by_hand(Json("all", optional=["x"]), [b'{"x": 1, "x_there": 2}']),
        lambda: by_hand(Json("all", optional=["x"], ragged={"x": "pad"}, pad_value=0.5), [b"{}", b'{"x": [1]}']),
    ):
        with pytest.raises(OptionError):
            make()
    assert repr(Json(["x"], optional=["x"])) == "Json(fields=('x',), optional=('x',))"
    with pytest.raises(DecodeError, match="no field 'y'"):
        by_hand(Json(["x", "y"], optional=["x"]), [b'{"x": 1}'])
