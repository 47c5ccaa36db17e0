"""From the launcher's start to the first batch, on 1 to 32 ranks of one machine, with MPI and without.

    python -m benchmarks.startup [--ranks 1,2,4,8,16,32] [--rounds 3] [--slow] [--json FILE]
    python -m benchmarks.startup --from FILE --into measurements/startup.md

The clock starts after `import mpi4py.MPI` and a barrier, and stops on each rank with its first batch; a run's time is
that of its last rank. Beside it, started in turn, a control: the same number of ranks that import numpy and numba and
call one function that Numba has cached, which is what any program with these libraries does before its first result.
Both with warm caches: the kernels compiled, the index saved. --slow: through a store of 20 ms per read and 2 ms per
metadata operation (see benchmarks/stores/latency.py).

In turn with both, the same ranks without MPI: processes with torchrun's variables, whose World is made of sockets
(pario/comm/star.py). Between these two the clock starts before the launcher does, since MPI's own start is what the
one has and the other has not.

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

SIDES = ("control", "pario", "no MPI")
#: The worker's variable for when its launcher was started, on the clock of all processes
_BEGAN = "STARTUP_BEGAN"


def processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _add(a, b):  # type: ignore[no-untyped-def]
    return a + b


def control(path: str) -> None:
    import numba
    import numpy  # noqa: F401

    numba.njit(cache=True)(_add)(1, 2)


def first_batch(path: str, comm: Any) -> dict[str, float]:
    begin = time.perf_counter()
    import pario

    loader_class = pario.Loader
    imported = time.perf_counter()
    with loader_class(path, 16, shuffle=False, comm=comm) as loader:
        made = time.perf_counter()
        next(iter(loader))
        end = time.perf_counter()
        loader.world.barrier()
    return {"import": imported - begin, "Loader": made - imported, "batch": end - made, "seconds": end - begin}


def work(side: str, path: str) -> None:
    team = Team()
    team.barrier()
    used, begin = processor_s(), time.perf_counter()
    if side == "control":
        control(path)
        mine = {"seconds": time.perf_counter() - begin}
    else:
        mine = first_batch(path, team.comm)
    mine["launched"] = begin + mine["seconds"] - float(os.environ[_BEGAN])
    mine["whole processor"] = processor_s()
    mine["processor"] = mine["whole processor"] - used
    team.report(mine, {"side": side})


def last(runs: list[dict[str, Any]], part: str) -> list[float]:
    """Of each run, what the last rank took."""
    return [max(rank[part] for rank in one["ranks"]) for one in runs]


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the rounds: seconds until the last rank is there, processor seconds of a rank."""
    found: dict[str, Any] = {part: measure.spread(last(runs, part)) for part in ("seconds", "launched")}
    for part in ("processor", "whole processor"):
        used = [statistics.mean(rank[part] for rank in one["ranks"]) for one in runs]
        found[f"{part} per rank"] = measure.spread(used)
    for part in ("import", "Loader", "batch"):
        if part in runs[0]["ranks"][0]:
            found[part] = statistics.median(last(runs, part))
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
            names = SIDES if ranks > 1 else SIDES[:2]  # one process is the same in both
            sides = {side: (lambda side=side, n=ranks: _run(side, path, n)) for side in names}
            runs = measure.interleave(sides, options.rounds)
            table.append({"ranks": ranks, **{side: summary(of) for side, of in runs.items()}})
            if ranks > 1:
                with_it, without = (last(runs[side], "launched") for side in SIDES[1:])
                table[-1]["no MPI ÷ MPI"] = measure.ratios(without, with_it)
            print(_line(_columns(table[-1]), len(table) == 1), flush=True)
            if options.json:
                facts = {"machine": measure.machine(), "slow": options.slow, "rounds": options.rounds, "table": table}
                Path(options.json).write_text(json.dumps(facts, indent=1) + "\n")


def markdown(document: dict[str, Any]) -> str:
    """The tables, and where they were made."""
    facts = document["machine"]
    lines = [_line(_columns(row), number == 0) for number, row in enumerate(document["table"])]
    both = [row for row in document["table"] if "no MPI" in row]
    lines += ["", *(_line(_both(row), number == 0) for number, row in enumerate(both))]
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
    words = ["--worker", side, path]
    os.environ[_BEGAN] = repr(time.perf_counter())
    if side != "no MPI":
        return measure.launch("benchmarks.startup", words, ranks=ranks, timeout_s=180)
    job = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    job["PARIO_JOB"] = f"startup {os.getpid()} {os.environ[_BEGAN]}"
    with ExitStack() as stack:
        started = [
            stack.enter_context(measure.Standing("-m", "benchmarks.startup", *words, more={**job, "RANK": str(rank)}))
            for rank in range(ranks)
        ]
        return {"ranks": [json.loads(one.line())["ranks"][0] for one in started]}


def _columns(row: dict[str, Any]) -> dict[str, str]:
    return {
        "ranks": f"{row['ranks']}",
        "control, s": _span(row["control"]["seconds"]),
        "pario, s": _span(row["pario"]["seconds"]),
        "import + Loader + batch": _parts(row["pario"]),
        "control, processor s per rank": _span(row["control"]["processor per rank"]),
        "pario, processor s per rank": _span(row["pario"]["processor per rank"]),
    }


def _both(row: dict[str, Any]) -> dict[str, str]:
    with_it, without = row["pario"], row["no MPI"]
    return {
        "ranks": f"{row['ranks']}",
        "with MPI, s": _span(with_it["launched"]),
        "without, s": _span(without["launched"]),
        "without ÷ with": _span(row["no MPI ÷ MPI"]),
        "without: import + Loader + batch": _parts(without),
        "with, processor s per rank": _span(with_it["whole processor per rank"]),
        "without, processor s per rank": _span(without["whole processor per rank"]),
    }


def _line(columns: dict[str, str], head: bool) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"] if head else []
    return "\n".join([*lines, "| " + " | ".join(columns.values()) + " |"])


def _parts(of: dict[str, Any]) -> str:
    return " + ".join(f"{of[part]:.2f}" for part in ("import", "Loader", "batch"))


def _span(of: dict[str, float]) -> str:
    return f"{of['median']:.2f} ({of['min']:.2f}–{of['max']:.2f})"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        run(lambda: work(*sys.argv[2:4]))
    else:
        main()
