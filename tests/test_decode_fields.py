"""Fields that only some samples have: a mask, and rows that are empty. The oracle is what was written."""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

import pario
from pario.decode import Json, Npy, Raw, Text, Zlib
from pario.errors import DecodeError, OptionError

N = 90
SMALL = pario.Options(slot_bytes=64 << 10, slots=3, block_bytes=16 << 10, mix_blocks=4)


def has(name: str, i: int) -> bool:
    """The first sample has none of them."""
    return name == "i" or ((i * 7 + sum(name.encode())) % 5 in (1, 3) and i > 0)


def npy(i: int) -> bytes:
    file = io.BytesIO()
    np.save(file, np.full((2, 3), i, np.int16))
    return file.getvalue()


#: field -> (its value of sample i, decoder, name of its array, row -> what is there, row of a sample without)
OPTIONAL: dict[str, tuple[Callable[[int], bytes], Any, str, Callable[[int], Any], Any]] = {
    "raw": (lambda i: np.full(3, i, "f4").tobytes(), Raw("f4"), "raw", lambda i: [float(i)] * 3, [0.0] * 3),
    "bytes": (lambda i: b"%d" % i, None, "bytes", lambda i: b"%d" % i, None),
    "text": (lambda i: b"%d" % i, Text(), "text", str, None),
    "npy": (npy, Npy(), "npy", lambda i: [[i] * 3] * 2, [[0] * 3] * 2),
    "listed": (npy, Npy(ragged="list"), "listed", lambda i: [[i] * 3] * 2, None),
    "json": (lambda i: json.dumps({"e": i / 2}).encode(), Json(["e"]), "json.e", lambda i: i / 2, 0.0),
    "packed": (lambda i: zlib.compress(b'{"k": [%d]}' % i), Zlib(Json(["k"])), "packed.k", lambda i: [i], [0]),
    "padded": (
        lambda i: json.dumps({"v": [i] * (i % 4)}).encode(), Json(["v"], ragged="pad"), "padded.v",
        lambda i: [i] * (i % 4), [],
    ),
}  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> str:
    with lmdb.open(str(tmp_path / "set"), map_size=1 << 24) as env, env.begin(write=True) as txn:
        for i in range(N):
            txn.put(b"i-%04d" % i, b"%d" % i)
            for name, (value, *_) in OPTIONAL.items():
                if has(name, i):
                    txn.put(b"%s-%04d" % (name.encode(), i), value(i))
    return str(tmp_path / "set")


def fields(*more: str) -> dict[str, Any]:
    return {"i": ("i-%04d", None)} | {name: (f"{name}-%04d", OPTIONAL[name][1], *more) for name in OPTIONAL}


@pytest.mark.parametrize("shuffle", [False, "global", "block"])
def test_rows_and_masks(path: str, shuffle: Any) -> None:
    with pario.Loader(path, 16, fields=fields("optional"), shuffle=shuffle, options=SMALL, comm="self") as loader:
        seen = []
        for batch in loader:
            seen += batch.ids.tolist()
            for row, i in enumerate(batch.ids.tolist()):
                assert batch["i"][row] == b"%d" % i
                for name, (_, _, column, there, lacks) in OPTIONAL.items():
                    found = batch[column][row]
                    if f"{column}_lengths" in batch:
                        found = found[: batch[f"{column}_lengths"][row]]
                    found = found.tolist() if isinstance(found, (np.ndarray, np.generic)) else found
                    assert bool(batch[f"{name}_there"][row]) == has(name, i)
                    assert found == (there(i) if has(name, i) else lacks), (name, i)
            assert all(batch[f"{name}_there"].dtype == bool for name in OPTIONAL)
        assert sorted(seen) == list(range(N))


def test_a_field_that_is_not_optional_is_missed_as_ever(path: str) -> None:
    with pytest.raises(DecodeError, match="sample 0 has no record"):
        pario.Loader(path, 16, fields=fields(), comm="self")
    both = {"i": ("i-%04d", None), "text": ("text-%04d", Text()), "bytes": ("bytes-%04d", None, "optional")}
    with pario.Loader(path, 16, fields=both, on_error="skip", comm="self") as loader:
        assert [i for batch in loader for i in batch.ids.tolist()] == [i for i in range(N) if has("text", i)]


def test_what_cannot_be_optional(path: str) -> None:
    only = {"i": ("i-%04d", None), "x": ("nothing-%04d", Npy(), "optional")}
    with pytest.raises(OptionError, match=r"none of the \d+ samples .* 'x'.*Raw\(dtype, shape\)"):
        pario.Loader(path, 16, fields=only, comm="self")
    only["x"] = ("nothing-%04d", Raw("f4", (2,)), "optional")
    with pario.Loader(path, 16, fields=only, comm="self") as loader:
        assert (loader.peek()["x"].shape, loader.peek()["x_there"].any()) == ((16, 2), False)
    for wrong in ({"i": ("i-%04d", None, "optional")}, {"i": ("i-%04d", None), "x": ("x-%04d", None, "often")}):
        with pytest.raises(OptionError):
            pario.Loader(path, 16, fields=wrong, comm="self")


def test_a_mask_takes_no_arrays_place(tmp_path: Path) -> None:
    """Not that of a column, nor that of the decoder's own optional items."""
    with lmdb.open(str(tmp_path), map_size=1 << 20) as env, env.begin(write=True) as txn:
        for i in range(9):
            txn.put(b"i-%03d" % i, b"%d" % i)
            txn.put(b"m-%03d" % i, json.dumps({"there": i, "data": i}).encode())
    for decoder in (Json(["there"]), Json(["data"], optional=["data"])):
        fields = {"i": ("i-%03d", Text()), "m": ("m-%03d", decoder, "optional")}
        with pario.Loader(tmp_path, 3, fields=fields) as loader, pytest.raises(OptionError, match="m_there"):
            next(iter(loader))
