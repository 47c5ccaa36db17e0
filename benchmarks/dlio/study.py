"""How well each reader hides its reading in DLIO: AU over the step time, on a cold disk and on a slow store.

1. `find`: every one of DLIO's readers with a step of one millisecond; what is left is the time that it takes per step.
2. `seek`: the step time at which the best of them falls to 90 % AU, by the median of three more runs per attempt, until
   it is there: a cold disk gives one run a fifth more or less than the next, and a worker needs more time per step if
   the step takes longer.
3. `round`: all at that step time, in turn.
4. `sweep`: the same with shorter and longer steps.

One epoch per run. Pages of the side's files are dropped before each.
"""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import cache
from benchmarks.dlio import samples
from benchmarks.dlio.run import SIDES, Side, Workload, run
from benchmarks.marked import fill_marked
from benchmarks.measure import Pieces, Row, Section
from benchmarks.stores.latency import latency_store

__all__ = ["balance", "best", "measure", "needs", "publish", "tables"]

SAMPLES, IMAGE = 7_680, 384  # 1.1 GB of samples of 147,456 bytes, about ResNet50's in MLPerf Storage
ASKED, BAR = 90.0, 97.0  # per cent: AU that MLPerf Storage asks for, AU that pario is to have there
NEAR, ATTEMPTS = 0.5, 6  # of `seek`: per cent
TINY_S = 0.001
FACTORS = (0.5, 0.75, 1.5, 2.0)
CEILING = "nothing"
MODEL = 100_000_000  # bytes of a checkpoint


@dataclass(frozen=True)
class Place:
    """words : what the table says; load : DLIO's workload
    sides : DLIO's readers that compete; pario : what stands beside the best one
    data : folder of the samples
    """

    words: str
    load: Workload
    sides: tuple[str, ...]
    pario: tuple[str, ...] = ("pario loader", "pario reader")
    data: str = "disk"


PLACES = {
    "disk": Place(
        "local disk, page cache dropped",
        Workload(SAMPLES, IMAGE, batch=64),
        ("indexed_binary 0", "indexed_binary 1"),
    ),
    "large": Place(
        "local disk, page cache dropped, batches of 128",
        Workload(SAMPLES, IMAGE, batch=128),
        ("indexed_binary 0", "indexed_binary 1"),
    ),
    # Where a reader waits for the store, more workers than cores pay off: DLIO's readers get them here.
    "slow": Place(
        "emulated store: 20 ms per read, 200 MB/s, no page cache",
        Workload(SAMPLES // 3, IMAGE, batch=16),
        ("indexed_binary 4",),
        ("pario loader", "pario loader tier", "pario reader"),
        "slow",
    ),
}


def measure(out: Path, parts: list[str], rounds: int, seconds: float) -> None:
    """What is missing in OUT/dlio.json, until the time is over."""
    data = out / "data"
    print("making the samples", flush=True)
    for place in PLACES.values():
        samples.make(data / place.data, place.load.samples, IMAGE)
    runs = Pieces(out / "dlio.json", seconds, sections)
    try:
        for part in parts:
            if part == "checkpoint":
                _checkpoints(runs, data / "slow", out, rounds)
            else:
                _place(runs, part, data / PLACES[part].data, out, rounds, ())
        for part in parts:  # last: the bar needs none of it
            if part in PLACES:
                _place(runs, part, data / PLACES[part].data, out, rounds, FACTORS)
    except TimeoutError:
        print("the time is over; call again to go on", flush=True)


def _place(runs: Pieces, part: str, data: Path, out: Path, rounds: int, factors: Sequence[float]) -> None:
    place = PLACES[part]
    for name in place.pario:  # untimed: compiles the kernels, saves the index
        warm = Workload(place.load.samples, IMAGE, 16, steps=4)
        runs.get(f"{part} warm {name}", lambda name=name, warm=warm: run(SIDES[name], warm, data, out / "run"))
    with ExitStack() as stack:
        where = data
        if part == "slow":
            mounted = latency_store(str(data), read_s=0.020, bytes_per_s=200e6, page_cache=False, threads=128)
            where = Path(stack.enter_context(mounted).folder)

        def au(kind: str, name: str, step_s: float) -> dict[str, Any]:
            return runs.get(
                f"{part} {kind} {name}",
                lambda: _cold(SIDES[name], place.load, data, where, out, step_s) | {"step_s": step_s},
            )

        found = {name: balance(au("find", name, TINY_S)) for name in (*place.sides, *place.pario)}
        needed = {name: needs(SIDES[name].threads, found[name]) for name in place.sides}
        strongest = best(needed)
        step_s = needed[strongest]
        workers = SIDES[strongest].threads
        for number in range(ATTEMPTS):
            told = [au(f"seek {number}.{again}", strongest, step_s) for again in range(3)]
            if abs(statistics.median(one["au"] for one in told) - ASKED) <= NEAR:
                break
            read_s = statistics.median(balance(one) if workers else balance(one) - step_s for one in told)
            step_s = needs(workers, read_s)
        everyone = (strongest, *place.pario, CEILING)
        for number in range(rounds):
            for name in everyone:
                au(f"round {number}", name, step_s)
        for factor in factors:
            for name in everyone:
                au(f"sweep {factor:g}", name, factor * step_s)


def _cold(side: Side, load: Workload, data: Path, where: Path, out: Path, step_s: float) -> dict[str, Any]:
    for file in samples.files_of(data, side.data):
        cache.drop_file(str(file), allow=0.05 if file.stat().st_size > 1 << 20 else 1.0)
    return run(side, load, where, out / "run", step_s=step_s)


def balance(told: dict[str, Any]) -> float:
    """Seconds that a step takes in all; below the reader's own time it does not depend on the computing."""
    return float(told["step_s"] / (told["au"] / 100))


def needs(workers: int, read_s: float) -> float:
    """Seconds of computing per step for an AU of 90 %, if reading takes this long: without workers one waits for the
    other."""
    used = ASKED / 100
    return used * read_s if workers else used / (1 - used) * read_s


def best(found: dict[str, float]) -> str:
    """The reader that has the least."""
    return min(found, key=lambda name: found[name])


def _checkpoints(runs: Pieces, data: Path, out: Path, rounds: int) -> None:
    """A state of 100 MB after every 4th of 12 steps: torch.save by DLIO, and pario."""
    for number in range(rounds):
        for name, mechanism in (("torch.save", ""), ("pario", "benchmarks.dlio.checkpoint.ParioCheckpointing")):
            folder = out / "checkpoints"
            shutil.rmtree(folder, ignore_errors=True)
            more = {
                "workflow.checkpoint": True,
                "checkpoint.checkpoint_folder": folder,
                "checkpoint.steps_between_checkpoints": 4,
                "checkpoint.model_size": MODEL,
                "checkpoint.layer_parameters": [],
                **({"checkpoint.checkpoint_mechanism_classname": mechanism} if mechanism else {}),
            }
            load = Workload(PLACES["slow"].load.samples, IMAGE, batch=8, steps=12)
            runs.get(
                f"checkpoint {number} {name}",
                lambda more=more, load=load: run(SIDES[CEILING], load, data, out / "run", step_s=0.1, more=more),
            )
            shutil.rmtree(folder, ignore_errors=True)


# -- tables ------------------------------------------------------------------------------------------------------------


def _of(runs: dict[str, Any], part: str, kind: str) -> dict[str, list[dict[str, Any]]]:
    """side -> its runs of this kind ("round" for all rounds)"""
    found: dict[str, list[dict[str, Any]]] = {}
    for name, told in runs.items():
        if name.startswith(f"{part} {kind} "):
            rest = name.removeprefix(f"{part} {kind} ")
            found.setdefault(rest.partition(" ")[2] if kind == "round" else rest, []).append(told)
    return found


def sections(runs: dict[str, Any]) -> list[Section]:
    """The bar's rows: pario's AU at the step time where the best of DLIO's readers falls to 90 %."""
    made = []
    for part, place in PLACES.items():
        section = Section(part, place.words, "cold")
        for name in place.pario:
            values = [told["au"] for told in _of(runs, part, "round").get(name, [])]
            if values:
                section.rows.append(Row.of(name, values, ">=", BAR))
        made.append(section)
    return made


def _spread(values: list[float], digits: int = 1) -> str:
    if not values:
        return "–"
    middle = f"{statistics.median(values):.{digits}f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.{digits}f}–{max(values):.{digits}f})"


_PARIO = {
    "pario loader": "**pario, `ParioLoader`**",
    "pario loader tier": "pario, `ParioLoader`, copies in memory",
    "pario reader": "pario, `ParioReader`, 1 worker",
}


def _label(name: str) -> str:
    reader, _, threads = name.partition(" ")
    if name == CEILING:
        return "no reading at all"
    if reader == "pario":
        return _PARIO[name]
    workers = {"0": "no worker", "1": "1 worker"}.get(threads, f"{threads} workers")
    return f"DLIO `{reader}`, {workers}"


def _rounds_table(runs: dict[str, Any], part: str) -> str:
    found = _of(runs, part, "round")
    if not found:
        return ""
    one = next(iter(found.values()))
    lines = [
        f"A step of {1e3 * one[0]['step_s']:.1f} ms, {max(map(len, found.values()))} rounds in turn; "
        "median (least–most).",
        "",
        "| reader | AU, % | samples/s | first batch, s |",
        "|---|---:|---:|---:|",
    ]
    for name, told in found.items():
        cells = [_spread([one["au"] for one in told]), _spread([one["samples_per_s"] for one in told], 0)]
        cells.append(_spread([one["first_s"] for one in told], 2) if name != CEILING else "–")
        lines.append(f"| {_label(name)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _sweep_table(runs: dict[str, Any], part: str) -> str:
    rounds = _of(runs, part, "round")
    columns = {factor: _of(runs, part, f"sweep {factor:g}") for factor in FACTORS} | {1.0: rounds}
    columns = {factor: columns[factor] for factor in sorted(columns) if columns[factor]}
    if len(columns) < 2:
        return ""
    step_s = next(iter(rounds.values()))[0]["step_s"]
    head = " | ".join(f"{1e3 * factor * step_s:.1f} ms" for factor in columns)
    lines = [f"| AU, %, with a step of | {head} |", f"|---|{'---:|' * len(columns)}"]
    for name in rounds:
        cells = [
            f"{statistics.median(one['au'] for one in of[name]):.1f}" if name in of else "–" for of in columns.values()
        ]
        lines.append(f"| {_label(name)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _find_table(runs: dict[str, Any], part: str) -> str:
    found = {name: 1e3 * balance(told[0]) for name, told in _of(runs, part, "find").items()}
    cells = [f"{_label(name)}: {ms:.1f}" for name, ms in sorted(found.items(), key=lambda one: one[1])]
    return f"Milliseconds per step with next to no computing: {'; '.join(cells)}." if cells else ""


def _checkpoint_table(runs: dict[str, Any]) -> str:
    lines = ["| checkpoints by | a checkpoint holds the training up for, s |", "|---|---:|"]
    for name in ("torch.save", "pario"):
        told = [one for key, one in runs.items() if key.startswith("checkpoint ") and key.endswith(f" {name}")]
        stalls = [one["checkpoint_s"] for one in told]
        if not stalls:
            return ""
        lines.append(f"| {name} | {_spread(stalls, 2)} |")
    return "\n".join(lines)


def tables(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(name, Markdown) for the places of measurements/dlio.md."""
    machine, runs = document["machine"], document["runs"]
    versions = machine["versions"]
    yield (
        "machine",
        f"Measured on {machine['date'][:10]}: {machine['cpus']} cores ({machine['cpu']}), "
        f"{machine['memory_bytes'] / 1e9:.0f} GB, Linux {machine['kernel']}, Python {machine['python']}, "
        f"numpy {versions.get('numpy')}, mpich {versions.get('mpich')}, dlio_benchmark 2.0.0.",
    )
    for part in PLACES:
        yield f"{part}_find", _find_table(runs, part)
        yield f"{part}_rounds", _rounds_table(runs, part)
        yield f"{part}_sweep", _sweep_table(runs, part)
    yield "checkpoint", _checkpoint_table(runs)


def publish(path: Path, pages: list[Path]) -> int:
    """Print the tables and fill the pages; 1 if a bar is not met."""
    document = json.loads(path.read_text())
    made = dict(tables(document))
    print("\n\n".join(f"{name}\n{text}" for name, text in made.items() if text))
    for page in pages:
        page.write_text(fill_marked(page.read_text(), "dlio", made))
    rows = [row for section in sections(document["runs"]) for row in section.rows]
    return 1 if any(row.figure < BAR for row in rows if row.case == "pario loader") else 0
