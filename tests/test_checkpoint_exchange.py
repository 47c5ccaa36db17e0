"""Checkpoints to safetensors and back, and files of others that lie. What torch and its own loaders make of them:
test_frameworks_checkpoint.py."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import equal, rich_tree

import pario
from pario.checkpoint.exchange import SafeTensors, bring, opened_at, windows
from pario.checkpoint.tree import Bits
from pario.cli import main


def saved(folder: Path, tree: Any) -> Path:
    with pario.Checkpointer(folder) as ckpt:
        ckpt.save(1, tree).wait()
        assert repr(ckpt) == f"Checkpointer(slow={str(folder)!r}, newest step 1 on the slow tier)"
    return next(folder.glob("step-*"))


def restored(folder: Path) -> Any:
    with pario.Checkpointer(slow=folder) as ckpt:
        return ckpt.restore()


@pytest.fixture
def tree() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    tree: dict[str, Any] = {key: value for key, value in rich_tree().items() if key not in ("dtypes", "fields")}
    tree["scalars"] = tree["scalars"][:2]
    tree["large"] = rng.random((700, 301))
    tree["half"] = Bits(rng.integers(0, 1000, (30, 7), np.uint16), "bfloat16")
    tree["own"] = pario.PerRank({"x": np.arange(4, dtype=np.int8)})
    return tree


def test_safetensors_and_back(tmp_path: Path, tree: dict[str, Any]) -> None:
    saved(tmp_path / "run", tree)
    path = tmp_path / "all.safetensors"
    assert main(["checkpoint", "export", str(tmp_path / "run"), str(path)]) == 0
    assert main(["checkpoint", "import", str(path), str(tmp_path / "back"), "--step", "7"]) == 0
    assert main(["checkpoint", "verify", str(tmp_path / "back")]) == 0
    got, own = restored(tmp_path / "back"), tree.pop("own").value
    assert equal(got.pop("own"), own)
    for one in (got, tree):  # a Bits where ml_dtypes is not installed
        half = one.pop("half")
        one["half"] = getattr(half, "array", half).view(np.uint16)
    assert equal(got, tree)
    assert os.listdir(tmp_path / "back")[0].startswith("step-000000000007")


def test_a_part_alone_has_the_names_of_its_state(tmp_path: Path, tree: dict[str, Any]) -> None:
    saved(tmp_path / "run", tree)
    path = tmp_path / "model.safetensors"
    assert main(["checkpoint", "export", str(tmp_path / "run"), str(path), "--under", "model"]) == 0
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    assert (8 + length) % 4096 == 0
    assert header.pop("__metadata__")["format"] == "pt"
    assert set(header) == {"w", "b", "t"}
    for name, each in header.items():
        first, last = (8 + length + at for at in each["data_offsets"])
        array = np.frombuffer(raw[first:last], {"F64": "f8", "I16": "i2"}[each["dtype"]]).reshape(each["shape"])
        assert np.array_equal(array, tree["model"][name])
    with pytest.raises(pario.OptionError, match=r"no 'modle' in 'the root'.*'model'"):
        main(["checkpoint", "export", str(tmp_path / "run"), str(path), "--under", "modle"])


def test_windows_are_the_arrays_in_c_order(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = [np.asarray(rng.integers(0, 99, shape)) for shape in [(31, 7, 5), (), (0, 3), (900,)]]
    opened = opened_at(str(saved(tmp_path / "run", arrays)))
    for most in (8, 512, 1 << 20):
        parts = [part.tobytes() for part in windows(opened, [3, 0, 2, 1], most)]
        assert b"".join(parts) == b"".join(arrays[k].tobytes() for k in (3, 0, 2, 1))
        assert max(map(len, parts)) <= most


@pytest.mark.parametrize(
    ("tree", "why"),
    [
        ({"a": {"b": np.ones(2), "c": np.array(["x"])}}, r"<U1 of 'a\.c'"),
        ({"a": {"b": np.ones(2)}, "a.b": np.ones(2)}, "same keys"),
    ],
)
def test_what_safetensors_cannot_hold_is_refused(tmp_path: Path, tree: Any, why: str) -> None:
    saved(tmp_path / "run", tree)
    with pytest.raises(pario.OptionError, match=why):
        main(["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "x.safetensors")])
    assert not list(tmp_path.glob("x.*"))


def forged(path: Path, header: Any, data: bytes = bytes(8)) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "header",
    [
        *(b"", b"[1]", b"{" * 50_000, {"a": 1}, {"a": {}}, {"a": ONE | {"dtype": "F1"}}, {"a": ONE | {"shape": [3]}}),
        *({"a": ONE | {"shape": [-1, -2]}}, {"a": ONE | {"data_offsets": [0, 1 << 40]}}, {"a": ONE, "b": ONE}),
        *({"a": ONE | {"data_offsets": [4, 12]}}, {"a": ONE | {"shape": [1 << 70, 0], "data_offsets": [0, 8]}}),
        *({"a": ONE, "__metadata__": {"pario": text}} for text in ("x", '{"array": "b"}', '{"list": []}', "[]")),
        {"a": ONE, "__metadata__": {"pario": '{"dict": [["x", {"array": "a"}], ["y", {"array": "a"}]]}'}},
    ],
    ids=str,
)
def test_files_that_lie_are_damage(tmp_path: Path, header: Any) -> None:
    path = forged(tmp_path / "x.safetensors", header)
    with pytest.raises(pario.CorruptedError):
        bring(SafeTensors([str(path)]), str(tmp_path / "back"), 1)
    assert not list((tmp_path / "back").glob("*"))


def test_a_folder_of_files_and_one_that_ends_too_early(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    for k in (1, 2):
        path = tmp_path / "hf" / f"model-{k}.safetensors"
        forged(path, {f"layer.{k}": ONE}, np.full(2, k, np.float32).tobytes())
    assert main(["checkpoint", "import", str(tmp_path / "hf"), str(tmp_path / "back")]) == 0
    assert {name: each.tolist() for name, each in restored(tmp_path / "back").items()} == {
        "layer.1": [1, 1],
        "layer.2": [2, 2],
    }
    with pytest.raises(pario.MissingError, match="no safetensors file"):
        main(["checkpoint", "import", str(tmp_path), str(tmp_path / "back")])
    os.truncate(tmp_path / "hf" / "model-2.safetensors", 60)
    with pytest.raises(pario.CorruptedError):
        main(["checkpoint", "import", str(tmp_path / "hf"), str(tmp_path / "more")])


def test_a_checkpointer_needs_a_folder() -> None:
    with pytest.raises(pario.OptionError, match="needs the folder"):
        pario.Checkpointer("self")
