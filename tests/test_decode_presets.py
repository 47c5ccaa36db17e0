"""Presets: records as the projects' own writers make them, imitated by hand after their sources."""

from __future__ import annotations

import gzip
import json
import pickle
import pkgutil
import zlib

import cv2
import numpy as np
import pytest
from made_records import arrays, made

import pario
from pario.decode import Draw, preset
from pario.decode.presets import PRESETS
from pario.errors import OptionError


def run(decoder, *values):
    records = made(list(values))
    decoder.learn(records[0])
    out = arrays(decoder, records)
    assert decoder.decode(records, out, Draw()) == []
    return decoder.finish(out)


def test_lsun() -> None:
    pictures = [np.full((8 + i, 6, 3), i, np.uint8) for i in range(3)]
    files = [cv2.imencode(".webp", p)[1].tobytes() for p in pictures]
    assert run(preset("lsun", size=4), *files)["data"].shape == (3, 4, 4, 3)


def ase(n: int) -> bytes:
    row = {
        "numbers": {"__ndarray__": [[n], "int64", [6] * n]},
        "positions": {"__ndarray__": [[n, 3], "float64", [0.5] * 3 * n]},
        "cell": {"__ndarray__": [[3, 3], "float64", [1.0] * 9]},
        "energy": -1.5 * n,
        "data": {},
    }
    return zlib.compress(json.dumps(row).encode())


def test_ase() -> None:
    out = run(preset("ase"), ase(2), ase(5))
    assert [a.shape for a in out["positions"]] == [(2, 3), (5, 3)]
    assert [a.tolist() for a in out["numbers"]] == [[6] * 2, [6] * 5]
    fields = {"positions": "float32", "energy": "float32"}
    out = run(preset("ase", fields=fields, ragged={"positions": "flat"}), ase(2), ase(5))
    assert (out["positions"].shape, out["positions"].dtype) == ((7, 3), np.float32)
    assert out["positions_offsets"].tolist() == [0, 2, 7]
    assert out["energy"].tolist() == [-3, -7.5]


def test_atom3d() -> None:
    out = run(preset("atom3d", fields=["label.value"]), gzip.compress(json.dumps({"label": {"value": 3.5}}).encode()))
    assert out["label.value"].tolist() == [3.5]


def test_pickles_need_trust() -> None:
    for name in ("oc20", "tape", "unimol", "unimol+"):
        with pytest.raises(OptionError, match="has to be told how far to trust the file"):
            preset(name)


def test_tape() -> None:
    rows = [{"primary": "MKV"[:n], "protein_length": n, "id": b"x", "y": np.zeros(n)} for n in (3, 2)]
    out = run(preset("tape", allow=[]), *map(pickle.dumps, rows))
    assert out["primary"].tolist() == ["MKV", "MK"]
    assert out["protein_length"].tolist() == [3, 2]
    assert [len(y) for y in out["y"]] == [3, 2]


def test_unimol() -> None:
    row = {"atoms": ["C", "O"], "coordinates": [np.zeros((2, 3), "f4")], "smi": "CO"}
    out = run(preset("unimol", allow=[]), pickle.dumps(row, 5))
    assert out["atoms"].tolist() == [["C", "O"]]
    assert out["coordinates"][0][0].shape == (2, 3)
    out = run(preset("unimol+", allow=[], fields=["smi"]), gzip.compress(pickle.dumps(row, 5)))
    assert out["smi"].tolist() == ["CO"]


def test_oc20() -> None:
    row = {"pos": np.zeros((4, 3), "f4"), "atomic_numbers": np.arange(4), "y": 1.5}
    out = run(preset("oc20", allow=[], fields=["pos", "y"]), pickle.dumps(row), pickle.dumps(row))
    assert out["y"].tolist() == [1.5, 1.5]
    assert out["pos"][1].shape == (4, 3)


def test_tensorpack() -> None:
    out = run(preset("tensorpack", allow=[]), pickle.dumps([b"jpeg", 3]), pickle.dumps([b"other", 4]))
    assert out["data"].tolist() == [b"jpeg", b"other"]
    assert out["label"].tolist() == [3, 4]
    msgpack = pytest.importorskip("msgpack")
    out = run(preset("tensorpack"), msgpack.packb([b"jpeg", 3]))
    assert (out["data"].tolist(), out["label"].tolist()) == ([b"jpeg"], [3])


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(OptionError, match="no preset is called 'imagenet'") as caught:
        preset("imagenet")
    assert all(name in str(caught.value) for name in PRESETS)


def test_the_function_is_not_hidden_by_a_module_of_its_name() -> None:
    """Whatever was imported first."""
    for module in pkgutil.iter_modules(pario.decode.__path__):
        assert module.name not in pario.decode.__all__, module.name
