"""The options of a Checkpointer, checked, and its folders: named, made, and swept of what killed jobs have left."""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from contextlib import suppress
from typing import Any

import numpy as np

from pario.checkpoint.store import ATTEMPT, TRASH, discard, make_folder
from pario.codec.base import Codec
from pario.codec.registry import parse
from pario.comm.base import AnyWorld, together
from pario.errors import CheckpointError, OptionError

__all__ = ["check_apart", "check_options", "codec_of", "open_folders", "run_of", "step_error", "sweep_folders"]


def check_options(keep: Any, rate: Any, full: Any, pending: Any, timeout_s: Any, alone: bool) -> None:
    """alone : partner copies without a fast tier"""
    if keep is not None and (type(keep) is not int or keep < 1):
        raise OptionError(f"keep must be a whole number from 1 on, or None, got {keep!r}")
    if rate is not None and not (isinstance(rate, int | float) and rate > 0):
        raise OptionError(f"rate must be bytes per second above 0, or None, got {rate!r}")
    if full not in ("wait", "slow"):
        raise OptionError(f'full must be "wait" or "slow", got {full!r}')
    if type(pending) is not int or pending < 1:
        raise OptionError(f"pending must be a whole number from 1 on, got {pending!r}")
    if not (isinstance(timeout_s, int | float) and timeout_s > 0):
        raise OptionError(f"timeout_s must be seconds above 0, got {timeout_s!r}")
    if alone:
        raise OptionError("partner=True copies what is on the nodes' fast tiers, and there are none", hint="Give fast=")


def step_error(step: Any) -> OptionError | None:
    """What is wrong with it."""
    if isinstance(step, bool) or not isinstance(step, int | np.integer) or not 0 <= step < 10**12:
        return OptionError(f"step must be a whole number from 0 to 10^12 - 1, got {step!r}")
    return None


def codec_of(compress: str | None) -> Codec | None:
    """Raises OptionError, also where the codec's package is missing."""
    if compress is not None and not isinstance(compress, str):
        raise OptionError(f"compress must be a codec and its level, as in 'zstd:3', or None, got {compress!r}")
    return None if compress is None else parse(compress)


def run_of(slow: str) -> str:
    """Of the run that saves into this folder: a name on the fast tier."""
    return f"run-{hashlib.sha256(os.path.realpath(slow).encode(errors='surrogateescape')).hexdigest()[:16]}"


def open_folders(world: AnyWorld, slow: str, fast: str | None) -> None:
    """Rank 0 makes the slow tier's, each node's first rank its fast one. Raises CheckpointError."""
    if world.rank == 0:
        _make(slow)
    if fast is not None and world.is_leader:
        _make(fast)
        status = os.lstat(fast)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid not in (os.geteuid(), 0):
            raise CheckpointError("this is not a folder of yours", path=fast, hint="Name another fast=")


def check_apart(world: AnyWorld, fast: str) -> None:
    """Whether each node has a fast folder of its own, as partner copies need it. Collective; raises on all ranks."""
    mark = world.bcast(f"{ATTEMPT}step-{secrets.token_hex(8)}-")  # `_sweep` deletes what a kill leaves
    mine = os.path.join(fast, f"{mark}{world.node}")
    try:
        with together(world, "comparing the nodes' fast tiers"):
            if world.is_leader:
                os.mkdir(mine)
        with together(world, "comparing the nodes' fast tiers"):
            seen = sum(name.startswith(mark) for name in os.listdir(fast)) if world.is_leader else 1
            if seen > 1:
                raise OptionError(
                    f"partner=True needs a fast tier of each node's own, and {seen} nodes have this one in common",
                    path=fast,
                    hint="Name a folder on the nodes' disks or in their memory, or leave partner out",
                )
    finally:
        if world.is_leader:
            with suppress(OSError):
                os.rmdir(mine)


def sweep_folders(world: AnyWorld, slow: str, fast: str | None) -> None:
    """Delete what killed jobs have left; not before this one saves, since it may only read what another one saves.
    Collective calls come between this and the first new attempt."""
    if world.rank == 0:
        _sweep(slow)
    if fast is not None and world.is_leader:
        _sweep(fast)


def _make(folder: str) -> None:
    try:
        make_folder(folder)
    except OSError as e:
        raise CheckpointError(f"cannot make the folder for checkpoints: {e.strerror}", path=folder) from e


def _sweep(folder: str) -> None:
    """Delete what killed jobs have left. Best effort."""
    with suppress(OSError):
        for name in os.listdir(folder):
            if name.startswith((f"{ATTEMPT}step-", f"{TRASH}step-")):
                discard(os.path.join(folder, name))
