"""Do the plug-ins work? Tiny data on 2 ranks: each sample once per epoch, with the bytes that were written; checkpoints
that restore. Every assertion looks at what DLIO's training loop got (job.py), or at what is on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pario
from benchmarks.dlio import samples
from benchmarks.dlio.reader import ONE_AT_A_TIME
from benchmarks.dlio.run import SIDES, Side, Workload, run

__all__ = ["smoke"]

#: divided evenly, so that DLIO drops no sample of an epoch
LOAD = Workload(samples=192, side=64, batch=8, epochs=2)
MODEL, LAYERS = 300_000, [1_000, 50_000]


def smoke(folder: Path) -> None:
    """Raises AssertionError or WorkerError."""
    samples.make(folder / "data", LOAD.samples, LOAD.side)
    reader = SIDES["pario reader"]
    _check(folder, "stock", SIDES["indexed_binary 1"])
    _check(folder, "reader", Side(reader.data, reader.reader, threads=2), checkpoints="all_ranks")
    orders = _check(folder, "loader", SIDES["pario loader"], checkpoints="rank_zero")
    # DLIO's list of files names something else.
    named = {"PARIO_LMDB": str(samples.files_of(folder / "data", "lmdb")[0])}
    _check(folder, "named", Side("indexed_binary", loader=SIDES["pario loader"].loader, threads=0), environment=named)
    # Over the whole dataset, and another order in each epoch: DLIO's own DataLoader keeps each rank to its own half.
    assert all(min(order) < LOAD.samples // 2 <= max(order) for order in orders.values()), orders
    assert orders[0, 1] != orders[0, 2]


def _check(
    folder: Path, name: str, side: Side, checkpoints: str = "", environment: dict[str, str] | None = None
) -> dict[tuple[int, int], list[int]]:
    """One run; returns (rank, epoch) -> the samples that came, in order."""
    notes, saved = folder / f"{name}-notes", folder / f"{name}-checkpoints"
    notes.mkdir()
    more = _checkpointing(saved, checkpoints) if checkpoints else {}
    if checkpoints == "rank_zero":
        environment = {"PARIO_FAST": str(folder / "fast")}
    told = run(
        side, LOAD, folder / "data", folder / name, step_s=0.002, more=more, notes=notes, environment=environment
    )
    assert ONE_AT_A_TIME not in (folder / name / "output.txt").read_text()
    got: dict[tuple[int, int], list[int]] = {}
    for rank in range(LOAD.ranks):
        for line in (notes / f"{rank}.jsonl").read_text().splitlines():
            epoch, numbers = json.loads(line)
            assert len(numbers) == LOAD.batch
            got.setdefault((rank, epoch), []).extend(numbers)
    for epoch in range(1, LOAD.epochs + 1):
        delivered = sorted(i for rank in range(LOAD.ranks) for i in got[rank, epoch])
        assert delivered == list(range(LOAD.samples)), f"{name}, epoch {epoch}: {delivered}"
    if checkpoints:
        _check_saved(saved, LOAD.ranks if checkpoints == "all_ranks" else 1)
        assert len(told["checkpoints"]) == LOAD.epochs
    print(f"{name}: {LOAD.samples} samples in each of {LOAD.epochs} epochs, each once, with their bytes", flush=True)
    return got


def _checkpointing(folder: Path, kind: str) -> dict[str, Any]:
    return {
        "workflow.checkpoint": True,
        "checkpoint.checkpoint_folder": folder,
        "checkpoint.type": kind,
        "checkpoint.model_size": MODEL,
        "checkpoint.layer_parameters": LAYERS,
        "checkpoint.checkpoint_mechanism_classname": "benchmarks.dlio.checkpoint.ParioCheckpointing",
    }


def _check_saved(folder: Path, parts: int) -> None:
    steps = LOAD.samples // LOAD.batch // LOAD.ranks
    with pario.Checkpointer("self", slow=folder) as found:
        assert found.latest() == LOAD.epochs * steps
        for epoch in range(1, LOAD.epochs + 1):
            tree = found.restore(epoch * steps)
            assert len(tree["model"]["a"]) == parts * MODEL
            assert [len(tree["layer-0"][name]) for name in ("0", "1")] == [parts * size for size in LAYERS]
