"""What the peers do when something is uneven or damaged: untimed, and told as it happened.

uneven      40,960 records over 3 ranks: who gets how much, what is missing or repeated
damaged     three bad JPEGs of 512: raised, skipped, or delivered as something else
flipped     64 bytes of one raw record's file inverted after everything was written
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import ROOT, WorkerError
from benchmarks.peers import sets
from benchmarks.peers.conduct import Bench, write
from benchmarks.peers.judging import judge
from benchmarks.peers.reading import Source
from benchmarks.peers.table import Variant

__all__ = ["behave"]

RANKS = 3
_FLIPPED = 64


def _first(bench: Bench, *more: str) -> Iterable[Variant]:
    """One variant per peer, and these of pario's."""
    seen = set()
    for variant in bench.variants:
        if variant.peer.module not in seen:
            seen.add(variant.peer.module)
            yield variant
            if variant.peer.module == "pario":
                yield from (Variant(variant.peer, name) for name in more)


def _read(bench: Bench, variant: Variant, path: Path, ranks: int = 1) -> list[dict[str, Any]]:
    with bench.start(variant, ranks) as running:
        return running.ask(do="check", folder=str(path), truth=str(path / "truth.npy"))


def _records(path: Path) -> int:
    return int(json.loads((path / "set.json").read_text())["records"])


def _told(found: list[dict[str, Any]], path: Path) -> dict[str, Any]:
    delivered = judge([one["ids"] for one in found], _records(path), sum(one["wrong"] for one in found))
    return {**asdict(delivered), "delivered": sum(delivered.records), "of": _records(path)}


def uneven(bench: Bench, variant: Variant) -> dict[str, Any]:
    path = bench.set("3k")
    return _told(_read(bench, variant, path, RANKS), path)


def damaged(bench: Bench, variant: Variant) -> dict[str, Any]:
    path = bench.out / "sets" / "jpeg-damaged"
    return _told(_read(bench, variant, path), path)


def flipped(bench: Bench, variant: Variant) -> dict[str, Any]:
    path = sets.make(bench.out / "sets", "3k", 2048)
    source = Source(path)
    needle = source[1024][1000 : 1000 + _FLIPPED]
    source.close()
    for file in sorted(path.joinpath(variant.peer.folder).rglob("*")):
        at = file.read_bytes().find(needle) if file.is_file() else -1
        if at >= 0:
            break
    else:
        raise WorkerError("the record's bytes are in no file as they are")
    _invert(file, at)
    try:
        return _told(_read(bench, variant, path), path)
    finally:
        _invert(file, at)


def _invert(file: Path, at: int) -> None:
    with open(file, "r+b") as held:
        held.seek(at)
        found = np.frombuffer(held.read(_FLIPPED), np.uint8)
        held.seek(at)
        held.write((~found).tobytes())


def behave(bench: Bench) -> None:
    """Everything that is not in the results yet."""
    bad = bench.out / "sets" / "jpeg-damaged"
    small = sets.make(bench.out / "sets", "jpeg", 512)
    if not (bad / "set.json").exists():
        sets.damage(small, bad)
    write(bench, [bad, sets.make(bench.out / "sets", "3k", 2048)])
    sums = [sys.executable, "-m", "pario", "data", "checksum", str(bench.out / "sets" / "3k-2048" / "source")]
    subprocess.run(sums, cwd=ROOT, check=True, timeout=120)
    for name, act, more in (("uneven", uneven, ()), ("damaged", damaged, ("skip",)), ("flipped", flipped, ("verify",))):
        for variant in _first(bench, *more):
            _note(bench, name, variant.key, lambda act=act, variant=variant: act(bench, variant))


def _note(bench: Bench, name: str, key: str, act: Any) -> None:
    held = bench.found["behaviour"].setdefault(name, {})
    if key in held or bench.late():
        return
    try:
        held[key] = act()
    except WorkerError as e:
        held[key] = {"error": str(e)[:300]}
    print(f"{name}, {key}: {held[key]}", flush=True)
    bench.save()
