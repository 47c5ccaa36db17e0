"""`checkpoint list | verify | restore-to-npz | prune`: one process looks after the checkpoints of a folder."""

from __future__ import annotations

import json
import os
import time
import zipfile
from typing import Any

import numpy as np

from pario.checkpoint.finding import Opened
from pario.checkpoint.restoring import Wish, empty_bytes, read_all
from pario.checkpoint.store import Name, discard, listed
from pario.checkpoint.tree import dtype_of
from pario.checkpoint.verifying import described, problems
from pario.comm.solo import Solo
from pario.commands.screen import counted, decimal_bytes, screen, seconds, table
from pario.errors import FileError, MissingError

__all__ = ["run_list", "run_prune", "run_to_npz", "run_verify"]


def _all(folder: str, step: int | None = None) -> list[Name]:
    """The newest first. Raises MissingError if there are none."""
    there = [name for name in listed(folder) if not name.nodes]
    found = [name for name in there if step in (None, name.step)]
    if not found:
        what = "no complete checkpoint" + ("" if step is None else f" of step {step}")
        hint = f"The newest one is step {there[-1].step}" if there else "FOLDER is what the script passed as slow"
        raise MissingError(what if os.path.isdir(folder) else "there is no such folder", path=folder, hint=hint)
    return found[::-1]


def run_list(folder: str) -> int:
    rows = [("step", "saved", "bytes", "arrays", "ranks", "version", "folder")]
    for name in _all(folder):
        try:
            manifest, _ = described(os.path.join(folder, str(name)))
        except FileError as e:
            rows.append((str(name.step), "", "", "", "", "damaged", str(name)))
            screen.say(f"{name}: {e}", err=True)
            continue
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.created))
        size, arrays = decimal_bytes(manifest.nbytes), str(len(manifest.specs))
        rows.append((str(name.step), saved, size, arrays, str(manifest.ranks), manifest.version, str(name)))
    screen.say(table(rows, words=True))
    return 0


def run_verify(folder: str, step: int | None) -> int:
    bad = 0
    for name in _all(folder, step):
        path, began = os.path.join(folder, str(name)), time.perf_counter()
        size = sum(entry.stat().st_size for entry in os.scandir(path) if entry.name.endswith(".h5"))
        bar = screen.bar(size, f"step {name.step}", "B")
        found = problems(path, bar.update)
        screen.end_bar()
        if found:
            bad += 1
            more = f" (and {len(found) - 1} more)" if found[1:] else ""
            screen.say(f"step {name.step}: DAMAGED: {found[0]}{more}")
        else:
            took = seconds(time.perf_counter() - began)
            screen.say(f"step {name.step}: every byte of {decimal_bytes(size)} is as it was written ({took})")
    return 1 if bad else 0


def run_to_npz(folder: str, dst: str, step: int | None) -> int:
    name = _all(folder, step)[0]
    path = os.path.join(folder, str(name))
    manifest, parts = described(path)
    wishes = [
        Wish(number, ((0,) * len(spec.shape), spec.shape), empty_bytes(spec.nbytes))
        for number, spec in enumerate(manifest.specs)
    ]
    read_all(Solo(), Opened(manifest, parts, [dict.fromkeys(range(len(parts)), path)]), wishes)
    arrays: dict[str, Any] = {
        spec.path or "root": wish.memory.view(dtype_of(spec.dtype)).reshape(spec.shape)
        for spec, wish in zip(manifest.specs, wishes, strict=True)
    }
    rest = "tree"
    while rest in arrays:
        rest += "_"
    arrays[rest] = np.array(json.dumps(manifest.description))
    _save(dst, arrays)
    screen.say(f"{dst}: {counted(len(manifest.specs), 'array')} of step {manifest.step}")
    return 0


def _save(dst: str, arrays: dict[str, Any]) -> None:
    """As np.savez, which takes no array named "file". Complete, or not there. Raises FileError."""
    part = f"{dst}.{os.getpid()}.part"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(part, flags, 0o666), "wb") as file:
            try:
                with zipfile.ZipFile(file, "w") as archive:
                    for name, array in arrays.items():
                        with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                            np.lib.format.write_array(member, array, allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
                os.replace(part, dst)
            except BaseException:
                os.unlink(part)
                raise
    except OSError as e:
        raise FileError(f"cannot write it: {e.strerror or e}", path=dst) from e


def run_prune(folder: str, keep: int, yes: bool) -> int:
    found = _all(folder)
    good = next((name for name in found if not problems(os.path.join(folder, str(name)))), None)
    gone = [name for name in found[keep:] if name != good]
    if good is None:
        gone = []
        screen.say("no checkpoint here is undamaged: nothing is deleted", err=True)
    for name in gone:
        if yes:
            discard(os.path.join(folder, str(name)))
        screen.say(f"{'deleted' if yes else 'would delete'} {name}")
    screen.say(f"{counted(len(found) - len(gone), 'checkpoint stays', 'checkpoints stay')}")
    return 0 if good is not None else 1
