"""One DLIO run: the overrides of a side, the job under a time limit, what DLIO's summary says about it."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import ROOT, WorkerError, job_environment, kill_tree, mpiexec

__all__ = ["SIDES", "Side", "Workload", "run"]

_PLUGIN = "benchmarks.dlio"


@dataclass(frozen=True)
class Side:
    """data : the folder of its samples
    reader, loader : the plug-in
    threads : DLIO's read_threads, worker processes per rank
    environment : of the job; PARIO_TIERS="" keeps copies of the file out of memory, as for data that exceeds it
    """

    data: str
    reader: str = ""
    loader: str = ""
    threads: int = 1
    environment: tuple[tuple[str, str], ...] = ()

    def overrides(self) -> dict[str, Any]:
        """Of DLIO's configuration, below `workload`."""
        given: dict[str, Any] = {
            "dataset.format": "npz" if self.data == "lmdb" else self.data,
            "reader.read_threads": self.threads,
            "reader.read_type": "memory",  # DLIO's word for: keep the file open
        }
        if self.reader:
            given["reader.reader_classname"] = f"{_PLUGIN}.{self.reader}"
        if self.loader:
            given["reader.data_loader_classname"] = f"{_PLUGIN}.{self.loader}"
            given["reader.data_loader_sampler"] = "index"
        return given


#: Of DLIO's own readers the one that was the fastest in every place.
_STOCK = "stock.Indexed"
SIDES = {
    **{f"indexed_binary {threads}": Side("indexed_binary", _STOCK, threads=threads) for threads in (0, 1, 4)},
    "pario reader": Side("lmdb", "reader.ParioReader"),
    "pario loader": Side("lmdb", loader="loader.ParioLoader", threads=0, environment=(("PARIO_TIERS", ""),)),
    "pario loader tier": Side("lmdb", loader="loader.ParioLoader", threads=0),
    "nothing": Side("lmdb", loader="stock.NoLoading", threads=0),
}


@dataclass(frozen=True)
class Workload:
    """samples, side : of the data set; its images are side x side bytes
    batch : samples per rank and step
    steps : of an epoch, before DLIO stops it; 0: the whole epoch
    """

    samples: int
    side: int
    batch: int
    steps: int = 0
    epochs: int = 1
    ranks: int = 2

    @property
    def nbytes(self) -> int:
        return self.side * self.side


def run(
    side: Side,
    load: Workload,
    data: Path,
    out: Path,
    *,
    step_s: float = 0.0,
    more: dict[str, Any] | None = None,
    notes: Path | None = None,
    environment: dict[str, str] | None = None,
    timeout_s: float = 120,
) -> dict[str, Any]:
    """DLIO's own numbers of one run. Raises WorkerError.

    data : folder of all formats; out : of this run's logs, emptied before
    more : further overrides below `workload`
    notes : check every batch, and note its samples there (job.py)
    environment : PARIO_... variables of the job; it gets no others
    """
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    given = {
        "workflow.generate_data": False,
        "workflow.train": True,
        "workflow.evaluation": False,
        "dataset.data_folder": data / side.data,
        "dataset.num_files_train": 1,
        "dataset.num_samples_per_file": load.samples,
        "dataset.num_files_eval": 0,
        "dataset.num_subfolders_train": 0,
        "dataset.num_subfolders_eval": 0,
        "dataset.record_length": load.nbytes,
        "reader.data_loader": "pytorch",
        "reader.batch_size": load.batch,
        "reader.sample_shuffle": "seed",
        "train.epochs": load.epochs,
        "train.computation_time": step_s,
        "train.total_training_steps": load.steps or -1,
        "output.folder": out,
        **side.overrides(),
        **(more or {}),
    }
    words = ["workload=default", f"hydra.run.dir={out}", *(f"++workload.{key}={value}" for key, value in given.items())]
    start = ["-m", "benchmarks.dlio.job", str(notes), str(load.side)] if notes else ["-m", "dlio_benchmark.main"]
    environment = {**dict(side.environment), **(environment or {})}
    _finish([mpiexec(), "-n", str(load.ranks), sys.executable, *start, *words], out, load.ranks, environment, timeout_s)
    return _told(out, load)


def _finish(command: list[str], out: Path, ranks: int, given: dict[str, str], timeout_s: float) -> None:
    """DLIO imports tensorflow, whatever it is to do: an empty package of that name will do."""
    stub = out / "stub" / "tensorflow"
    stub.mkdir(parents=True)
    (stub / "__init__.py").touch()
    environment = job_environment(ranks, 1) | {"OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(stub.parent), str(ROOT)])
    environment = {name: value for name, value in environment.items() if not name.startswith("PARIO_")} | given
    log = out / "output.txt"
    with log.open("wb") as file:
        child = subprocess.Popen(
            command,
            cwd=out,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
        try:
            status: int | None = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if child.poll() is None:
                kill_tree(child.pid)
                child.wait()
    if status != 0 or not (out / "summary.json").exists():
        ended = f"no end after {timeout_s} s" if status is None else f"status {status}"
        raise WorkerError(f"{' '.join(command)}\n{ended}:\n{log.read_text(errors='replace')[-3000:]}")


def _told(out: Path, load: Workload) -> dict[str, Any]:
    metric = json.loads((out / "summary.json").read_text())["metric"]
    ranks = [json.loads((out / f"{rank}_output.json").read_text()) for rank in range(load.ranks)]
    first = max(one["1"]["proc"]["block1"][0] - one["1"]["compute"]["block1"][0] for one in ranks)
    told = {
        "au": metric["train_au_mean_percentage"],
        "samples_per_s": metric["train_throughput_mean_samples_per_second"],
        "first_s": first,
        "steps": len(ranks[0]["1"]["proc"]["block1"]),
    }
    stalls = [
        float(value["duration"])
        for epoch in json.loads((out / "per_epoch_stats.json").read_text()).values()
        for name, value in epoch.items()
        if name.startswith("ckpt")
    ]
    return told | ({"checkpoints": stalls, "checkpoint_s": statistics.median(stalls)} if stalls else {})
