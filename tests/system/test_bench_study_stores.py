"""The study on its emulated stores: they are there, they count, and they are gone afterwards."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from launch import tree
from required import skip_or_fail

from benchmarks.study.cells import Cell, Preset
from benchmarks.study.jobs import Launcher
from benchmarks.study.run import Study
from benchmarks.study.stores import CAP
from pario.commands.mpiexec import find_mpiexec


def test_recipes_on_a_throttled_device_and_on_a_store_with_latency(tmp_path: Path) -> None:
    if os.environ.get("PARIO_REQUIRE_SYSTEM") != "1":
        pytest.skip("mounts a loop device and a FUSE store: set PARIO_REQUIRE_SYSTEM=1 and be root")
    folder = os.environ.get("PARIO_SYSTEM_DIR") or str(tmp_path)
    mpiexec, why = find_mpiexec()
    assert mpiexec, why
    recipes = ("plain", "auto")
    states = (("throttled", "cold"), ("latency", "first"))
    cells = tuple(Cell(store, "197k", 2, 1, state, "none", recipes) for store, state in states)
    cells += (Cell("latency", "197k", 2, 1, "cold", "none", ("auto", "shard", "shard-8M")),)
    # Ranks read their first batches while the fill reads them, too: of 20 MB that was a fifth to a third.
    preset = Preset(cells=cells, rounds=1, records={"197k": 150}, limit_s=1.0)
    before = set(tree(os.getpid()))  # a cluster of other tests may live on
    study = Study(preset, name="test", launcher=Launcher(tuple(mpiexec)), data=folder)
    study.run()
    document = json.loads(json.dumps(study.document))
    if document["notes"]:
        skip_or_fail(f"no such stores here: {document['notes']}")
    page_bytes = document["sets"]["197k"]["page_bytes"]
    assert len(document["cells"]) == len(cells)
    for cell in document["cells"]:
        assert not cell["failed"]
        assert cell["cap"] == CAP
        (auto,) = cell["runs"]["auto"]
        assert auto["records"] == 150
        assert page_bytes <= auto["store"]["bytes"] <= 1.3 * page_bytes
        assert auto["store"]["operations"] > 0
        if cell["store"] == "latency":
            assert 1 <= auto["store"]["most"] <= 16
            assert auto["page_rate"] <= 1.05 * CAP
    (loops,) = (cell["runs"] for cell in document["cells"] if "shard" in cell["runs"])
    (near,), (far,) = loops["shard"], loops["shard-8M"]
    assert far["rate"] > 1.5 * near["rate"]  # its mount reads further ahead
    assert set(tree(os.getpid())) <= before  # the store's daemon ends with its mount
    assert f" {folder}" not in Path("/proc/self/mounts").read_text()
