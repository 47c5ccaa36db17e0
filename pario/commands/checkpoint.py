"""`checkpoint list | verify | restore-to-npz | export | import | prune`: one process looks after checkpoints."""

from __future__ import annotations

import glob
import json
import os
import time
import zipfile
from typing import TYPE_CHECKING, Any

import click

from pario.commands import arguments
from pario.commands.screen import counted, decimal_bytes, screen, seconds, table
from pario.errors import FileError, MissingError, OptionError
from pario.machine import replacing

if TYPE_CHECKING:
    from pario.checkpoint.store import Name

_folder = click.argument("folder", type=click.Path())


@click.group()
def checkpoint() -> None:
    """Look after checkpoints of pario.Checkpointer.

    FOLDER is what the script passed as `slow`.
    """


def _all(folder: str, step: int | None = None) -> list[Name]:
    """The newest first. Raises MissingError if there are none."""
    from pario.checkpoint.store import listed

    there = [name for name in listed(folder) if not name.nodes]
    found = [name for name in there if step in (None, name.step)]
    if not found:
        what = "no complete checkpoint" + ("" if step is None else f" of step {step}")
        hint = f"The newest one is step {there[-1].step}" if there else "FOLDER is what the script passed as slow"
        raise MissingError(what if os.path.isdir(folder) else "there is no such folder", path=folder, hint=hint)
    return found[::-1]


@checkpoint.command("list")
@_folder
@arguments.as_json
def list_(folder: str) -> int:
    """List the complete checkpoints, the one that was saved last first.

    Its branch is drawn on the left: what it goes on from. Other columns are branches that were abandoned.

    \b
    Example:
      python -m pario checkpoint list /scratch/run1
    """
    from pario.checkpoint.finding import DAMAGE, described

    rows = [("branch", "step", "saved", "bytes", "arrays", "ranks", "version", "folder")]
    facts: list[dict[str, Any]] = []
    found = _all(folder)
    for name, branch in zip(found, _drawn(folder, found), strict=True):
        try:
            manifest, _ = described(os.path.join(folder, str(name)))
        except DAMAGE as e:
            rows.append((branch, str(name.step), "", "", "", "", "damaged", str(name)))
            facts.append({"step": name.step, "folder": str(name), "damaged": str(e)})
            screen.say(f"{name}: {e}", err=True)
            continue
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.created))
        size, arrays = decimal_bytes(manifest.nbytes), str(len(manifest.specs))
        rows.append((branch, str(name.step), saved, size, arrays, str(manifest.ranks), manifest.version, str(name)))
        facts.append({"step": name.step, "folder": str(name), "branch": branch, "saved": manifest.created})
        facts[-1] |= {"bytes": manifest.nbytes, "arrays": len(manifest.specs), "ranks": manifest.ranks}
    screen.tell(checkpoints=facts)
    screen.say(table(rows, words=True))
    return 0


def _drawn(folder: str, found: list[Name]) -> list[str]:
    """Per checkpoint, the newest first: "*" in the column of its branch, the present one on the left, and "|" where
    another branch passes."""
    from pario.checkpoint.manifest import branch_of, parents_of

    parents = parents_of(folder, found[::-1], {})
    columns: list[str] = []  # the id that comes next in each
    drawn = []
    for name in found:
        if name.id not in columns:
            columns.append(name.id)
        at = columns.index(name.id)
        drawn.append("".join("*" if k == at else "|" if id_ else " " for k, id_ in enumerate(columns)).rstrip())
        after = branch_of(name.id, parents)[1:2]
        columns = ["" if id_ == name.id else id_ for id_ in columns]
        columns[at] = after[0] if after and after[0] not in columns else ""
        while columns and not columns[-1]:
            columns.pop()
    return drawn


@checkpoint.command()
@_folder
@click.option("--step", type=click.IntRange(0), help="Step to verify. Default: all.")
@arguments.as_json
def verify(folder: str, step: int | None) -> int:
    """Read every byte and compare the checksums; status 1 if anything is damaged.

    \b
    Example:
      python -m pario checkpoint verify /scratch/run1 --step 12000
    """
    from pario.checkpoint.finding import problems

    bad = 0
    facts: list[dict[str, Any]] = []
    for name in _all(folder, step):
        path, began = os.path.join(folder, str(name)), time.perf_counter()
        size = sum(entry.stat().st_size for entry in os.scandir(path) if entry.name.endswith(".h5"))
        bar = screen.bar(size, f"step {name.step}", "B")
        found = problems(path, bar.update)
        screen.end_bar()
        facts.append({"step": name.step, "folder": str(name), "bytes": size, "damage": list(map(str, found))})
        if found:
            bad += 1
            more = f" (and {len(found) - 1} more)" if found[1:] else ""
            screen.say(f"step {name.step}: DAMAGED: {found[0]}{more}")
        else:
            took = seconds(time.perf_counter() - began)
            screen.say(f"step {name.step}: every byte of {decimal_bytes(size)} is as it was written ({took})")
    screen.tell(damaged=bad, checkpoints=facts)
    return 1 if bad else 0


@checkpoint.command("restore-to-npz")
@_folder
@click.argument("dst", metavar="DST.npz")
@click.option("--step", type=click.IntRange(0), help="Step to read. Default: the newest complete one.")
def restore_to_npz(folder: str, dst: str, step: int | None) -> int:
    """Write the whole arrays to a NumPy file; keys of the tree are joined by "/".

    Other values of the tree go into the array "tree" ("tree_" where one is called that), as JSON. Types that NumPy does
    not know (bfloat16) are written as integers.

    \b
    Example:
      python -m pario checkpoint restore-to-npz /scratch/run1 last.npz
    """
    import numpy as np

    from pario.checkpoint.exchange import opened_at
    from pario.checkpoint.restoring import Wish, read_all
    from pario.checkpoint.store import empty_bytes
    from pario.checkpoint.tree import dtype_of
    from pario.comm.solo import Solo

    opened = opened_at(os.path.join(folder, str(_all(folder, step)[0])))
    manifest = opened.manifest
    wishes = [
        Wish(number, ((0,) * len(spec.shape), spec.shape), empty_bytes(spec.nbytes))
        for number, spec in enumerate(manifest.specs)
    ]
    read_all(Solo(), opened, wishes)
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
    import numpy as np

    try:
        with replacing(dst) as file:
            with zipfile.ZipFile(file, "w") as archive:
                for name, array in arrays.items():
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                        np.lib.format.write_array(member, array, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
    except OSError as e:
        raise FileError(f"cannot write it: {e.strerror or e}", path=dst) from e


@checkpoint.command()
@_folder
@click.argument("dst", metavar="DST")
@click.option("--step", type=click.IntRange(0), help="Step to read. Default: the newest complete one.")
@click.option("--under", "below", default="", metavar="KEY/KEY", help="Part of the tree to write.")
def export(folder: str, dst: str, step: int | None, below: str) -> int:
    """Write a checkpoint for others: DST.safetensors, or a folder for torch.distributed.checkpoint (needs torch).

    An array is named by its keys with "." between them, as `state_dict` and its loaders expect it; those of --under are
    left out. Little memory is needed, whatever the size.

    \b
    Example:
      python -m pario checkpoint export /scratch/run1 model.safetensors --under model
      python -m pario checkpoint export /scratch/run1 dcp-folder
    """
    from pario.checkpoint.exchange import opened_at, to_safetensors

    opened = opened_at(os.path.join(folder, str(_all(folder, step)[0])))
    write = to_safetensors if dst.endswith(".safetensors") else _dcp().to_dcp
    count = write(opened, dst, below.split("/") if below else ())
    screen.say(f"{dst}: {counted(count, 'array')} of step {opened.manifest.step}")
    return 0


@checkpoint.command("import")
@click.argument("src", metavar="SRC")
@_folder
@arguments.number("--step", help="Step of the checkpoint to make.", default=0, kind=click.IntRange(0))
def import_(src: str, folder: str, step: int) -> int:
    """Make a checkpoint out of one of others: SRC.safetensors, a folder of such files, or one of
    torch.distributed.checkpoint (needs torch).

    The checkpoint in FOLDER begins a new run. Little memory is needed: for torch.distributed.checkpoint as much as the
    largest array has. Its description is a pickle: import only what you trust.

    \b
    Example:
      python -m pario checkpoint import model.safetensors /scratch/run1
    """
    from pario.checkpoint.exchange import Foreign, SafeTensors, bring

    files = [src] if os.path.isfile(src) else sorted(glob.glob(os.path.join(glob.escape(src), "*.safetensors")))
    if not files and not os.path.exists(os.path.join(src, ".metadata")):
        raise MissingError("there is no safetensors file, and no folder of torch.distributed.checkpoint", path=src)
    foreign: Foreign = SafeTensors(files) if files else _dcp().Dcp(src)
    name = bring(foreign, folder, step)
    screen.say(f"{os.path.join(folder, str(name))}: {counted(len(foreign.specs), 'array')}")
    return 0


def _dcp() -> Any:
    try:
        from pario.adapters import dcp
    except ImportError as e:
        raise OptionError(f"torch.distributed.checkpoint needs torch: {e}", hint="pip install torch") from None
    return dcp


@checkpoint.command()
@_folder
@arguments.number("--keep", help="Number of checkpoints to keep, the newest ones.", default=3)
@click.option("--after", metavar="STEP", type=click.IntRange(0), help="Delete abandoned branches behind this step.")
@click.option("--yes", is_flag=True, help="Delete. Without it, only say what would be deleted.")
@arguments.as_json
def prune(folder: str, keep: int, after: int | None, yes: bool) -> int:
    """Delete old checkpoints. The newest one that verifies is never deleted.

    What the newest one goes on from counts for --keep; other branches stay. --after STEP deletes those instead: the
    checkpoints of later steps that the newest one does not go on from.

    \b
    Example:
      python -m pario checkpoint prune /scratch/run1 --keep 2 --yes
      python -m pario checkpoint prune /scratch/run1 --after 12000 --yes
    """
    from pario.checkpoint.finding import problems
    from pario.checkpoint.manifest import branch_of, parents_of
    from pario.checkpoint.store import discard

    found = _all(folder)
    good = next((name for name in found if not problems(os.path.join(folder, str(name)))), None)
    present = branch_of(found[0].id, parents_of(folder, found[::-1], {}))
    gone = [name for name in found if name.id in present[keep:] and name != good]
    if after is not None:
        gone = [name for name in found if name.id not in present and name.step > after and name != good]
    if good is None:
        gone = []
        screen.say("no checkpoint here is undamaged: nothing is deleted", err=True)
    for name in gone:
        if yes:
            discard(os.path.join(folder, str(name)))
        screen.say(f"{'deleted' if yes else 'would delete'} {name}")
    screen.tell(deleted=[str(name) for name in gone] if yes else [], kept=len(found) - len(gone))
    screen.tell(would_delete=[] if yes else [str(name) for name in gone])
    screen.say(f"{counted(len(found) - len(gone), 'checkpoint stays', 'checkpoints stay')}")
    return 0 if good is not None else 1
