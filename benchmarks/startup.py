"""From MPI's start to the first batch, on 1 to 32 ranks of one machine: how much is pario's, how much the imports'.

    python -m benchmarks.startup [--ranks 1,2,4,8,16,32] [--rounds 3] [--slow] [--json FILE]
    python -m benchmarks.startup --from FILE --into measurements/startup.md

The clock starts after `import mpi4py.MPI` and a barrier, and stops on each rank with its first batch; a run's time is
that of its last rank. Beside it, started in turn, a control: the same number of ranks that import numpy, numba and
h5py and call one function that Numba has cached, which is what any program with these libraries does before its first
result. Both with warm caches: the kernels compiled, the index saved. --slow: through a store of 20 ms per read and
2 ms per metadata operation (see benchmarks/stores/latency.py).

With more ranks than cores the ranks' imports queue for the cores. So beside the seconds stands the processor time of a
rank, which other ranks do not lengthen by much.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import measure
from benchmarks.marked import fill_marked
from benchmarks.worker import Team, run

SIDES = ("control", "pario")


def processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _add(a, b):  # type: ignore[no-untyped-def]
    return a + b


def control(path: str) -> None:
    import h5py  # noqa: F401
    import numba
    import numpy  # noqa: F401

    numba.njit(cache=True)(_add)(1, 2)


def first_batch(path: str, comm: Any) -> dict[str, float]:
    begin = time.perf_counter()
    import pario

    loader_class = pario.Loader
    imported = time.perf_counter()
    with loader_class(path, 16, comm=comm) as loader:
        made = time.perf_counter()
        next(iter(loader))
        end = time.perf_counter()
        loader.world.barrier()
    return {"import": imported - begin, "Loader": made - imported, "batch": end - made, "seconds": end - begin}


def work(side: str, path: str) -> None:
    team = Team()
    team.barrier()
    used, begin = processor_s(), time.perf_counter()
    if side == "pario":
        mine = first_batch(path, team.comm)
    else:
        control(path)
        mine = {"seconds": time.perf_counter() - begin}
    mine["processor"] = processor_s() - used
    team.report(mine, {"side": side})


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the rounds: seconds until the last rank is there, processor seconds of a rank."""
    last = [max(rank["seconds"] for rank in one["ranks"]) for one in runs]
    used = [statistics.mean(rank["processor"] for rank in one["ranks"]) for one in runs]
    found: dict[str, Any] = {"seconds": measure.spread(last), "processor_per_rank": measure.spread(used)}
    for part in ("import", "Loader", "batch"):
        if part in runs[0]["ranks"][0]:
            found[part] = statistics.median(max(rank[part] for rank in one["ranks"]) for one in runs)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--ranks", default="1,2,4,8,16,32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slow", action="store_true", help="through the store with latency")
    parser.add_argument("--json", help="write everything there")
    parser.add_argument("--from", dest="earlier", metavar="FILE", help="measure nothing: the JSON of an earlier run")
    parser.add_argument("--into", metavar="PAGE", help="with --from: fill the page's place for the table")
    options = parser.parse_args()
    if options.earlier:
        document = json.loads(Path(options.earlier).read_text())
        if options.into:
            page = Path(options.into)
            page.write_text(fill(page.read_text(), document))
        else:
            print(markdown(document))
        return
    measured(options)


def measured(options: argparse.Namespace) -> None:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pario-startup-")))
        from benchmarks.stores.latency import latency_store

        _make(folder / "set" / "data.mdb")
        os.environ["NUMBA_CACHE_DIR"] = str(folder / "numba")
        os.environ.pop("PARIO_NUMBA_CACHE", None)
        # Modules compiled anew by each process are nobody's start-up.
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = str(folder / "bytecode")
        for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            os.environ[variable] = "1"
        path = str(folder / "set")
        _run("pario", path, 1)  # saves the index
        if options.slow:
            path = stack.enter_context(latency_store(folder / "set")).folder
        for side in SIDES:
            _run(side, path, 2)  # kernels, bytecode, page cache
        table = []
        for ranks in (int(word) for word in options.ranks.split(",")):
            sides = {side: (lambda side=side, n=ranks: _run(side, path, n)) for side in SIDES}
            found = {side: summary(runs) for side, runs in measure.interleave(sides, options.rounds).items()}
            table.append({"ranks": ranks, **found})
            print(_line(table[-1], len(table) == 1), flush=True)
        if options.json:
            facts = {"machine": measure.machine(), "slow": options.slow, "rounds": options.rounds, "table": table}
            Path(options.json).write_text(json.dumps(facts, indent=1) + "\n")


def markdown(document: dict[str, Any]) -> str:
    """The table, and where it was made."""
    facts = document["machine"]
    lines = [_line(row, number == 0) for number, row in enumerate(document["table"])]
    commit = f", commit {facts['commit'][:9]}" if facts.get("commit") else ""
    where = (
        f"{facts['cpus']} cores ({facts['cpu'] or 'unknown processor'}), {facts['date']}{commit}; medians of "
        f"{document['rounds']} interleaved runs, lowest and highest."
    )
    return "\n".join([*lines, "", where])


def fill(page: str, document: dict[str, Any]) -> str:
    """`page` with what lies between `<!-- startup -->` and `<!-- end -->` made anew."""
    return fill_marked(page, "startup", {"": markdown(document)})


def _make(path: Path) -> None:
    import lmdb

    path.parent.mkdir()
    with lmdb.open(str(path), subdir=False, lock=False, map_size=1 << 26) as env, env.begin(write=True) as txn:
        for i in range(2000):
            txn.put(b"%06d" % i, bytes([i % 251]) * 6000)


def _run(side: str, path: str, ranks: int) -> dict[str, Any]:
    return measure.launch("benchmarks.startup", ["--worker", side, path], ranks=ranks, timeout_s=180)


def _line(row: dict[str, Any], head: bool) -> str:
    columns = {
        "ranks": f"{row['ranks']}",
        "control, s": _span(row["control"]["seconds"]),
        "pario, s": _span(row["pario"]["seconds"]),
        "import + Loader + batch": " + ".join(f"{row['pario'][part]:.2f}" for part in ("import", "Loader", "batch")),
        "control, processor s per rank": _span(row["control"]["processor_per_rank"]),
        "pario, processor s per rank": _span(row["pario"]["processor_per_rank"]),
    }
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"] if head else []
    return "\n".join([*lines, "| " + " | ".join(columns.values()) + " |"])


def _span(of: dict[str, float]) -> str:
    return f"{of['median']:.2f} ({of['min']:.2f}–{of['max']:.2f})"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        run(lambda: work(*sys.argv[2:4]))
    else:
        main()
