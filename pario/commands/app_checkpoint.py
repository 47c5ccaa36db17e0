"""The commands `checkpoint list | verify | restore-to-npz | prune`, their arguments and help texts, for click (app.py).
checkpoint.py does the work."""

from __future__ import annotations

import click

__all__ = ["checkpoint"]

_folder = click.argument("folder")
_step = click.option("--step", type=click.IntRange(0), help="Default: the newest complete one.")


@click.group()
def checkpoint() -> None:
    """Look after checkpoints of pario.Checkpointer.

    FOLDER is what the script passed as `slow`.
    """


@checkpoint.command("list")
@_folder
def list_(folder: str) -> int:
    """List the complete checkpoints, the newest first.

    \b
    Example:
      python -m pario checkpoint list /scratch/run1
    """
    from pario.commands.checkpoint import run_list

    return run_list(folder)


@checkpoint.command()
@_folder
@click.option("--step", type=click.IntRange(0), help="Default: all.")
def verify(folder: str, step: int | None) -> int:
    """Read every byte and compare the checksums; status 1 if anything is damaged.

    \b
    Example:
      python -m pario checkpoint verify /scratch/run1 --step 12000
    """
    from pario.commands.checkpoint import run_verify

    return run_verify(folder, step)


@checkpoint.command("restore-to-npz")
@_folder
@click.argument("dst", metavar="DST.npz")
@_step
def restore_to_npz(folder: str, dst: str, step: int | None) -> int:
    """Write the whole arrays to a NumPy file; keys of the tree are joined by "/".

    Other values of the tree go into the array "tree" ("tree_" where one is called that), as JSON. Types that NumPy does
    not know (bfloat16) are written as integers.

    \b
    Example:
      python -m pario checkpoint restore-to-npz /scratch/run1 last.npz
    """
    from pario.commands.checkpoint import run_to_npz

    return run_to_npz(folder, dst, step)


@checkpoint.command()
@_folder
@click.option("--keep", default=3, show_default=True, type=click.IntRange(1), help="So many of the newest stay.")
@click.option("--yes", is_flag=True, help="Delete. Without it, only say what would be deleted.")
def prune(folder: str, keep: int, yes: bool) -> int:
    """Delete old checkpoints. The newest one that verifies is never deleted.

    \b
    Example:
      python -m pario checkpoint prune /scratch/run1 --keep 2 --yes
    """
    from pario.commands.checkpoint import run_prune

    return run_prune(folder, keep, yes)
