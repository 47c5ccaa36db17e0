"""Compare all recipes on this machine: tables, figures and bars.

    python -m benchmarks.study                                                      under 10 minutes on 2 cores
    python -m benchmarks.study --recipes plain,auto --stores disk --ranks 1,4       a part of it

A recipe is a way to read: `plain` is py-lmdb on every rank, `lmm`, `dm`, `dio`, `prov`, `coal` and `stag` are the steps
of LMDBIO, `auto` is pario's own. Data sets are made, jobs of several ranks are started by mpiexec, and the recipes read
in turns, cold and warm; their content is compared with what py-lmdb reads. The bare disk is always measured; a
throttled block device needs root, and a store with latency needs `pip install -e ".[latency-store]"` and fuse3. Ends
with tables and bars; figures need `pip install -e ".[figures]"`. Ctrl-C keeps what has been measured so far.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cache import Unavailable
from benchmarks.study import plots, tables
from benchmarks.study.cells import LOOPS, PRESETS, RECIPES, STORES, Preset
from benchmarks.study.jobs import Launcher
from benchmarks.study.run import Study, Watcher
from benchmarks.study.verdicts import MUST, verdicts
from pario.comm.launcher import launched_rank
from pario.commands.mpiexec import find_mpiexec, mpiexec_family
from pario.commands.screen import screen
from pario.errors import ParioError
from pario.machine import file_system

__all__ = ["chosen", "main", "study"]


def main(argv: list[str] | None = None) -> int:
    """Exit status: 1 if a recipe failed or delivered something wrong, 2 for wrong arguments, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.study", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--preset",
        default="small",
        choices=list(PRESETS),
        help="small (default): under 10 minutes on 2 cores; tiny: a trial",
    )
    parser.add_argument("--out", metavar="DIR", default="pario-study", help="JSON, tables and figures (pario-study)")
    parser.add_argument(
        "--data", metavar="DIR", help="make and keep the data sets here; default: in --out, for this run"
    )
    parser.add_argument("--recipes", metavar="NAME,...", help="only these")
    parser.add_argument("--stores", metavar="NAME,...", help=f"only these: {', '.join(STORES)}")
    parser.add_argument("--ranks", metavar="N,...", help="only cells with these numbers of ranks")
    parser.add_argument("--rounds", type=int, help="timed runs of each recipe in a cell; default: the preset's, 5")
    parser.add_argument("--seed", type=int, default=0, help="of the shuffled orders (0)")
    options = vars(parser.parse_args(argv))
    if options["seed"] < 0 or (options["rounds"] is not None and options["rounds"] < 1):
        parser.error("--rounds is at least 1, --seed at least 0")
    known = {
        "recipes": ("recipe", (*RECIPES, *LOOPS)),
        "stores": ("store", tuple(STORES)),
        "ranks": ("number of ranks", [str(number) for number in PRESETS[options["preset"]].ranks]),
    }
    try:
        for name, (what, among) in known.items():
            options[name] = chosen(options[name], among, what)
    except ValueError as e:
        parser.error(str(e))
    options["ranks"] = [int(number) for number in options["ranks"]]
    try:
        return study(**options)
    except ParioError as e:
        screen.say(f"error: {e}", err=True)
        return 1
    except KeyboardInterrupt:
        return 130


def chosen(text: str | None, among: Sequence[str], what: str) -> tuple[str, ...]:
    """The comma-separated names of an option; () if it is not given. Raises ValueError."""
    names = tuple(name.strip() for name in (text or "").split(",") if name.strip())
    for name in names:
        if name not in among:
            raise ValueError(f"{name!r} is no {what}; there are {', '.join(among)}")
    return names


def study(
    preset: str,
    out: str,
    data: str | None,
    *,
    recipes: Sequence[str],
    stores: Sequence[str],
    ranks: Sequence[int],
    rounds: int | None,
    seed: int,
) -> int:
    """Exit status: 1 if a recipe failed or delivered something wrong."""
    if (rank := launched_rank()) is not None:
        screen.rank = rank
        screen.say("error: the study starts mpiexec itself; run it without mpiexec or srun", err=True)
        return 2
    what = PRESETS[preset].only(recipes, stores, ranks, rounds)
    if not what.cells and not what.group_cells:
        has = _stores_and_ranks(PRESETS[preset])
        screen.say(f"error: no cell of preset {preset} has these recipes, stores and ranks; it has {has}", err=True)
        return 2
    folder = Path(out)
    beside = data or out
    there = file_system(beside)  # before anything is created there
    if there.kind == "memory":
        screen.say(f"error: {beside} is kept in memory ({there.type}): give --data a folder on a disk", err=True)
        return 2
    try:
        Path(beside).mkdir(parents=True, exist_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(prefix="data-", dir=out)
    except OSError as e:
        screen.say(f"error: no folder can be made there: {e}", err=True)
        return 2
    mpiexec, why = find_mpiexec()
    if not mpiexec:
        screen.say(f"note: {why}, so that only one rank is measured (pip install '.[mpich]')", err=True)
    watcher = _Watcher(folder / "study.json")
    with temporary as emptied:
        made = Study(
            what,
            name=preset,
            launcher=Launcher(tuple(mpiexec), bool(mpiexec) and mpiexec_family(mpiexec[0]) == "MPICH"),
            data=data or emptied,
            seed=seed,
            watcher=watcher,
        )
        watcher.bar = screen.bar(made.ticks, f"study, {preset}", "run")
        before = {number: signal.signal(number, _interrupted) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            made.run()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            screen.end_bar()
            if made.document["cells"]:
                _tell(made.document, folder)
    return int(any(row.met is False for name in MUST for row in verdicts(made.document)[name]))


class _Watcher(Watcher):
    """Reports progress on the screen and saves the document. Set `bar` before the study runs."""

    bar: Any

    def __init__(self, path: Path) -> None:
        self._path = path

    def say(self, line: str) -> None:
        self.bar.write(line)

    def tick(self, runs: int) -> None:
        self.bar.update(runs)

    def keep(self, document: dict[str, Any]) -> None:
        """Write the file atomically."""
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(document, indent=1) + "\n")
        os.replace(new, self._path)


def _stores_and_ranks(preset: Preset) -> str:
    found: dict[str, set[int]] = {}
    for cell in (*preset.cells, *preset.group_cells):
        found.setdefault(cell.store, set()).add(cell.ranks)
    return "; ".join(f"{store}: ranks {', '.join(map(str, sorted(ranks)))}" for store, ranks in found.items())


def _interrupted(*_: object) -> None:
    """Interrupt once: a second signal must not interrupt the code that ends the jobs and unmounts the stores."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _tell(document: dict[str, Any], folder: Path) -> None:
    screen.say(tables.on_screen(document))
    (folder / "study.md").write_text(tables.markdown(document))
    figures: list[Path] = []
    why = ""
    try:
        figures = plots.plot(document, folder / "figures")
    except Unavailable as reason:
        why = f"No figures: {reason}"
    screen.say()
    screen.say(f"Everything is in {folder}: study.json, study.md" + (", figures/" if figures else ""))
    if why:
        screen.say(why)


if __name__ == "__main__":
    sys.exit(main())
