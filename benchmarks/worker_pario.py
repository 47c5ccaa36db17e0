"""One run of pario's Loader over a Datum LMDB; one JSON line. Started by bars.py, alone or under mpiexec.

The clock runs around `for batch in loader` only, which is also when pario starts to read; hashing (--check) and writing
the order (--ids) are for untimed runs. --warmup reads an epoch of another, small data set first, so that loading the
compiled kernels is not taken for slow storage (the section first_batch shows that cost by itself).
"""

from __future__ import annotations

import argparse
import ast
import os
import time

import numpy as np

from benchmarks.worker import Team, bytes_asked, digests, memory, run


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("path")
    parser.add_argument("--shuffle", default="none", choices=["none", "global", "block"])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--steps", type=int, default=0, help="stop each epoch after that many batches; 0 = never")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ids", help="folder for the order: ids-RANK.npy")
    parser.add_argument("--check", help="folder for check-RANK.npz: ids and hashes of what was delivered")
    parser.add_argument("--warmup", help="a small data set of the same kind, read before the clock starts")
    parser.add_argument("--index-only", action="store_true", help="open (and so build) the index, read no record")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a field of pario.Options")
    what = "as in PARIO_TIERS, for what is read on the clock; default: the Loader's own choice"
    parser.add_argument("--tiers", default="", help=what)
    parser.add_argument("--service", help="as in PARIO_SERVICE, instead of tiers")
    parser.add_argument("--jobs", action="store_true", help="each rank is a job by itself; they begin together")
    parser.add_argument("--differ", help="per rank EPOCHS:COMPUTE_S:START_S, with commas between ranks")
    parser.add_argument("--compute", type=float, default=0.0, help="seconds of computing per epoch, in equal steps")
    options = parser.parse_args()

    team = Team()
    begin = time.perf_counter()
    import pario
    from pario.options import read_tiers

    loader_class, decoder = pario.Loader, pario.decode.Datum()
    knobs = {}
    for item in options.set:
        name, value = item.split("=", 1)
        try:
            knobs[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            knobs[name] = value
    if options.service:
        os.environ["PARIO_SERVICE"] = options.service
    tiers = None if options.service or options.tiers == "default" else read_tiers(options.tiers)
    choice = pario.Options(**knobs, tiers=tiers)
    import_seconds = time.perf_counter() - begin

    if options.index_only:
        team.barrier()
        begin = time.perf_counter()
        reader = pario.Reader(options.path, comm=team.comm, options=choice)
        seconds = time.perf_counter() - begin
        reader.close()
        team.report({"construct": seconds}, {"side": "pario", "version": pario.__version__})
        return

    arguments = {
        "batch_size": options.batch,
        "shuffle": False if options.shuffle == "none" else options.shuffle,
        "seed": options.seed,
        "comm": "self" if options.jobs else team.comm,
        "options": choice,
    }
    if options.differ:
        epochs, compute, begins = options.differ.split(",")[team.rank].split(":")
        options.epochs, options.compute, start_s = int(epochs), float(compute), float(begins)
    if options.warmup:
        with loader_class(options.warmup, decoder=pario.decode.Datum(), **arguments) as small:
            for batch in small:
                del batch
    team.barrier()
    if options.differ:
        time.sleep(start_s)
    begin = started = time.perf_counter()
    loader = loader_class(options.path, decoder=decoder, **arguments)
    construct_seconds = time.perf_counter() - begin

    epochs, ids, hashes = [], [], []
    steps_of_all = len(loader)
    for _ in range(options.epochs):
        if not options.jobs:
            team.barrier()
        asked = bytes_asked()
        records = 0
        first = None
        start = time.perf_counter()
        for steps, batch in enumerate(loader, 1):
            if first is None:
                first = time.perf_counter() - start
            records += len(batch.ids)
            if options.compute:
                time.sleep(options.compute / steps_of_all)
            if options.ids or options.check:
                ids.append(np.array(batch.ids))
            if options.check:
                hashes.append(digests(batch["data"], batch["label"]))
            if options.steps and steps == options.steps:
                break
        seconds = time.perf_counter() - start
        batch = None
        epochs.append(
            {
                "seconds": seconds,
                "first_batch": first,
                "records": records,
                "asked": bytes_asked() - asked,
                "memory": memory(),
            }
        )
    total = time.perf_counter() - started
    stats = loader.stats()
    loader.close()
    everything = np.concatenate(ids) if ids else np.empty(0, np.int64)
    if options.ids:
        np.save(f"{options.ids}/ids-{team.rank}.npy", everything)
    if options.check:
        found = np.concatenate(hashes) if hashes else np.empty(0, np.uint64)
        np.savez(f"{options.check}/check-{team.rank}.npz", ids=everything, hashes=found)
    numbers = {name: value for name, value in stats.items() if isinstance(value, int | float)}
    numbers |= {name: stats[name] for name in ("tiers", "peers") if name in stats}
    team.report(
        {
            "import": import_seconds,
            "construct": construct_seconds,
            "epochs": epochs,
            "total": total,
            "stats": numbers,
        },
        {"side": "pario", "version": pario.__version__},
    )


if __name__ == "__main__":
    run(main)
