"""benchmarks/dlio, as far as it needs no DLIO: samples, the search for a step time, tables. `python -m benchmarks.dlio
--smoke` runs the plug-ins; .ci/run does so in an environment with DLIO."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
import yaml

from benchmarks.dlio import samples, study

SIDE, COUNT = 16, 5


def test_both_formats_hold_the_same_samples(tmp_path: Path) -> None:
    samples.make(tmp_path, COUNT, SIDE)
    wanted = [samples.sample(i, SIDE) for i in range(COUNT)]
    assert [samples.number_of(image) for image in wanted] == list(range(COUNT))
    files = {name: samples.files_of(tmp_path, name) for name in ("lmdb", "indexed_binary")}
    held: dict[str, Any] = {}
    data, offsets, sizes = sorted(
        files["indexed_binary"], key=lambda path: len(path.suffixes) and path.name[-7:] != "_binary"
    )
    at = dict(zip(("off", "sz"), (offsets, sizes), strict=True))
    raw = data.read_bytes()
    spans = zip(*(np.fromfile(at[name], np.int64) for name in ("off", "sz")), strict=True)
    held["indexed_binary"] = [np.frombuffer(raw[begin : begin + n], np.uint8).reshape(SIDE, SIDE) for begin, n in spans]
    with lmdb.open(str(files["lmdb"][0]), subdir=False, readonly=True, lock=False) as env, env.begin() as txn:
        held["lmdb"] = [np.frombuffer(value, np.uint8).reshape(SIDE, SIDE) for _, value in txn.cursor()]
    for name, images in held.items():
        assert np.array_equal(images, wanted), name


def told(au: float, step_s: float = 0.01) -> dict[str, Any]:
    return {"au": au, "step_s": step_s, "samples_per_s": 100 * au, "first_s": 0.5}


def test_the_step_time_comes_from_the_reader_that_needs_the_least_computing() -> None:
    """Steps of 1 ms that take 20 and 50 ms in all."""
    read = study.balance(told(5, 0.001)), study.balance(told(2, 0.001))
    assert read == pytest.approx((0.020, 0.050))
    needed = {"npy 0": study.needs(0, read[0]), "npz 1": study.needs(1, read[1])}
    # Without workers reading is never hidden: 180 of 200 ms, although this reader is the faster one.
    assert needed == pytest.approx({"npy 0": 0.180, "npz 1": 0.045})
    assert study.best(needed) == "npz 1"


@pytest.mark.parametrize(("ours", "status"), [(98.0, 0), (96.0, 1)])
def test_tables_say_what_was_measured(tmp_path: Path, ours: float, status: int) -> None:
    runs = {"disk find npy 1": told(5, 0.001), "disk find npz 0": told(2, 0.001)}
    for number in range(3):
        runs |= {f"disk round {number} npy 1": told(90 + number), f"disk round {number} pario loader": told(ours)}
    runs |= {"disk sweep 2 npy 1": told(99, 0.02), "disk sweep 2 pario loader": told(99, 0.02)}
    runs |= {
        "checkpoint 0 torch.save": told(0) | {"checkpoint_s": 0.4},
        "checkpoint 0 pario": told(0) | {"checkpoint_s": 0.1},
    }
    facts = {
        "date": "2026-01-02 x",
        "cpus": 2,
        "cpu": "c",
        "memory_bytes": 1e9,
        "kernel": "6",
        "python": "3",
        "versions": {},
    }
    (tmp_path / "dlio.json").write_text(json.dumps({"machine": facts, "runs": runs}))
    page = tmp_path / "page.md"
    names = ("machine", "disk_rounds", "disk_sweep", "disk_find", "slow_rounds", "checkpoint")
    page.write_text("".join(f"<!-- dlio: {name} -->\nbefore {name}\n<!-- end -->\n" for name in names))
    assert study.publish(tmp_path / "dlio.json", [page]) == status
    text = page.read_text()
    assert "before slow_rounds" in text, "what was not measured stays"
    assert text.count("before") == 1
    assert "| DLIO `npy`, 1 worker | 91.0 (90.0–92.0) | 9100 (9000–9200) | 0.50 (0.50–0.50) |" in text
    assert "| DLIO `npy`, 1 worker | 91.0 | 99.0 |" in text
    assert "DLIO `npy`, 1 worker: 20.0; DLIO `npz`, no worker: 50.0" in text
    assert "| torch.save | 0.40 |\n| pario | 0.10 |" in text


def test_the_pages_configuration_is_what_the_plug_ins_run_with() -> None:
    """Each key is one that the runs of benchmarks/dlio set, and each class exists."""
    root = Path(study.__file__).resolve().parents[2]
    text = re.search(r"```yaml\n(.*?)```", (root / "measurements" / "dlio.md").read_text(), re.S)
    assert text is not None
    given = {
        section if key is None else f"{section}.{key}": value
        for section, keys in yaml.safe_load(text[1]).items()
        for key, value in (keys.items() if isinstance(keys, dict) else [(None, keys)])
    }
    code = "\n".join(path.read_text() for path in sorted((root / "benchmarks" / "dlio").glob("*.py")))
    assert given.pop("framework") == "pytorch"  # the default
    assert [key for key in given if f'"{key}"' not in code] == []
    classes = [value for key, value in given.items() if key.endswith("_classname")]
    assert len(classes) == 2
    for name in classes:
        module, _, kind = name.rpartition(".")
        assert f"class {kind}(" in (root / f"{module.replace('.', '/')}.py").read_text()
