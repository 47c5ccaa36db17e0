"""`tiers stage | serve | list | verify | clean`: copies of datasets on the nodes, in memory and on disks."""

from __future__ import annotations

import os
import queue
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pario.comm.launcher import node_name
from pario.commands import arguments
from pario.commands.screen import counted, decimal_bytes, screen, seconds, table
from pario.errors import OptionError
from pario.machine import allow_many_files
from pario.options import Options, Tier, read_tiers

if TYPE_CHECKING:
    import numpy as np

    from pario.comm.base import AnyWorld
    from pario.dataset.reader import Reader
    from pario.tiers.copies import Copy

T = TypeVar("T")


# -- ahead of a job ----------------------------------------------------------------------------------------------------


@click.command()
@arguments.path
@arguments.db
@arguments.as_json
@click.option("--to", "folder", required=True, metavar="FOLDER", help="Folder on a disk of the node.")
@click.option("--quota", default="auto", show_default=True, metavar="SIZE", help='Most bytes to keep, as in "400GiB".')
@click.option("--force", is_flag=True, help="Accept a FOLDER on a network file system.")
def stage(path: str, db: str | None, folder: str, quota: str, force: bool) -> int:
    """Copy the records' part of the file to a disk of every node.

    Jobs that name the folder in PARIO_TIERS, or as a pario.Tier, then read the copy. What is there already is not read
    again, so that an interrupted run goes on where it was.

    \b
    Examples:
      python -m pario tiers stage train.lmdb --to /local/nvme
      srun --ntasks-per-node=1 python -m pario tiers stage train.lmdb --to /local/nvme --quota 400GiB
    """
    from pario.dataset.reader import Reader
    from pario.plan.placement import NOBODY

    # Collective: on one node the ranks divide the chunks; on several the first rank of each brings what its node keeps.
    started = time.perf_counter()
    if folder == "memory":
        raise OptionError("memory ends with this command: --to names a folder on a disk of the node")
    if not folder.startswith("$"):  # a variable of each node
        folder = os.path.abspath(os.path.expanduser(folder))
    options = Options(tiers=(Tier(folder, quota, force),))
    with Reader(path, db=db, options=options, progress=screen.progress("leaf pages", "page"), tiers=True) as reader:
        reader.use_tiers()
        world, found = reader.world, reader.stage
        if world.allreduce_max(found is None):  # the rank where it is so has logged why
            raise world.raised_by_all(OptionError(f"{folder} cannot be used on every node", path=reader.path))
        assert found is not None
        chunks = found.used(reader.index, reader.checked)
        (disk,) = found.tiers
        mine = chunks if found.keeps is None else chunks[found.keeps[chunks]]
        missing = mine[~disk.held()[mine]]
        before = _sum_of_nodes(world, len(mine) - len(missing)) - world.allreduce_sum(disk.counts.puts)  # by a walk
        world.barrier()  # nobody begins before all have looked
        screen.running = True
        if found.keeps is None:
            _bring(reader, missing[world.node_rank :: world.node_size])
        elif world.is_leader:
            _bring(reader, missing)
        world.barrier()
        screen.running = False
        wanted, held = _sum_of_nodes(world, len(mine)), _sum_of_nodes(world, int(disk.held()[mine].sum()))
        from_store = world.allreduce_sum(found.store_bytes)
        chunk_bytes = disk.grid.chunk_bytes
        screen.say(
            f"{reader.path}: {held / max(1, wanted):.1%} of {decimal_bytes(wanted * chunk_bytes)} lie in {folder} on "
            f"{counted(world.nodes, 'node')} ({before / max(1, wanted):.1%} did before)"
        )
        screen.say(f"{decimal_bytes(from_store)} read from the store in {seconds(time.perf_counter() - started)}")
        nowhere = 0 if found.placement is None else int((found.placement.owners[chunks] == NOBODY).all(axis=1).sum())
        failed = world.allreduce_sum(disk.counts.errors)
        screen.tell(path=reader.path, folder=folder, nodes=world.nodes, wanted_bytes=wanted * chunk_bytes)
        screen.tell(held_bytes=held * chunk_bytes, read_bytes=from_store, failed_writes=failed)
        if failed:
            screen.say(f"{counted(failed, 'write')} to {folder} failed: see the system log of the nodes")
        if nowhere or (held < wanted and not failed):
            rest = wanted - held + nowhere
            screen.say(
                f"{decimal_bytes(rest * chunk_bytes)} have no room: a larger --quota, or a disk with more free space, "
                "takes more"
            )
        screen.say(f'use it with:  export PARIO_TIERS="{folder}:{quota}"')
    return 0


def _sum_of_nodes(world: AnyWorld, value: int) -> int:
    """The sum of every node's value. Collective."""
    return world.allreduce_sum(value if world.is_leader else 0)


def _bring(reader: Reader, chunks: np.ndarray) -> None:
    """Raises ReadError, SnapshotError."""
    from pario.stats.rank import RankStats
    from pario.tiers.fill import Filler

    assert reader.stage is not None
    pool, (disk,) = reader.file.pool, reader.stage.tiers  # opens the file on this rank
    assert reader.stage.fetcher is not None
    errors: list[BaseException] = []
    stats, before = RankStats(), disk.counts.puts
    pool.knob.at_least(reader.options.usual_inflight)
    fill = Filler(pool, reader.stage.fetcher, disk, iter(chunks.tolist()), stats=stats, failed=errors.append)
    bar = screen.bar(len(chunks) * disk.grid.chunk_bytes, "staging", "B")
    while not fill.is_over:
        time.sleep(0.02)
        bar.update((disk.counts.puts - before) * disk.grid.chunk_bytes - bar.n)
    screen.end_bar()
    for error in errors:
        raise error


# -- while jobs run ----------------------------------------------------------------------------------------------------


@click.command()
@click.option(
    "--at",
    "folder",
    envvar="PARIO_SERVICE",
    metavar="FOLDER",
    help="Folder on the node, where jobs find the service.  [default: $PARIO_SERVICE]",
)
@click.option(
    "--tiers",
    metavar="TIERS",
    help='Where to keep copies, as in "memory:auto,/local/nvme:400GiB".  [default: $PARIO_TIERS]',
)
def serve(folder: str | None, tiers: str | None) -> int:
    """Keep copies of datasets for all your jobs on these nodes, until it is interrupted.

    Start one process per node. Jobs whose PARIO_SERVICE names FOLDER then share the copies, in memory and on disks,
    with each other and across the nodes: the shared store is read once for all of them.

    \b
    Examples:
      export PARIO_SERVICE=/tmp
      python -m pario tiers serve --tiers memory:auto &
      srun --ntasks-per-node=1 --overlap python -m pario tiers serve --tiers memory:auto,/local/nvme:400GiB &
    """
    from pario.comm.world import get_world, leave_mpi
    from pario.dataset.host import Host

    # Collective: the first rank of each node serves until SIGTERM, SIGINT or SIGHUP.
    if not folder:
        raise OptionError(
            "a service needs a folder where jobs find it", hint="Pass --at FOLDER, or set PARIO_SERVICE to it."
        )
    options = Options(tiers=read_tiers(tiers) if tiers is not None else None)
    allow_many_files()
    ends = queue.SimpleQueue[None]()  # an Event hangs if its `set` interrupts its `wait` where that holds the lock
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: ends.put(None))
    with get_world(None) as world:
        host = Host(folder, options, world)
    leave_mpi()  # services end one by one
    if host.number is None:
        return 0
    nodes = counted(world.nodes, "node")
    _say(f"{node_name()}: node {host.number} of {nodes}; jobs find it by  export PARIO_SERVICE={host.folder}")
    with closing(host):
        ends.get()
        found = host.state()
    for each in found:
        _say(
            f"{node_name()}: {each['path']}: {decimal_bytes(each['store_bytes'])} read from the store, "
            f"{decimal_bytes(each['held_bytes'])} of {decimal_bytes(each['file_bytes'])} kept here"
        )
    _say(f"{node_name()}: {decimal_bytes(host.served_bytes)} sent to other processes")
    return 0


def _say(text: str) -> None:
    """Each node has something else to say."""
    click.echo(text)
    sys.stdout.flush()


# -- on disks ----------------------------------------------------------------------------------------------------------


_folders = click.argument("folders", metavar="FOLDER...", nargs=-1, required=True)


@click.command("list")
@_folders
@arguments.as_json
def list_(folders: tuple[str, ...]) -> int:
    """List cached datasets with their size and last use.

    \b
    Example:
      python -m pario tiers list /local/nvme
    """
    rows = [("node", "folder", "data file", "copied", "on disk", "used", "copy")]
    for node, copies in _on_every_node(folders, lambda copy: copy):
        for copy in copies:
            _tell(node, copy, file_bytes=copy.grid.file_bytes)
        rows += [
            (node, copy.folder, copy.path or "?", _part(copy), decimal_bytes(copy.disk_bytes), _when(copy), _name(copy))
            for copy in copies
        ]
    screen.say(table(rows, words=True) if len(rows) > 1 else "no copies")
    return 0


@click.command("verify")
@_folders
@arguments.as_json
def verify_copies(folders: tuple[str, ...]) -> int:
    """Read all copies and compare their checksums. The exit status is 1 if there is damage.

    Damaged chunks are dropped: the next job fetches them again.

    \b
    Example:
      srun --ntasks-per-node=1 python -m pario tiers verify /local/nvme
    """
    from pario.tiers.copies import verify as verified

    damaged = 0
    for node, found in _on_every_node(folders, lambda copy: (copy, *verified(copy))):
        for copy, right, wrong in found:
            damaged += wrong
            _tell(node, copy, chunks=right + wrong, damaged=wrong)
            words = f"{counted(wrong, 'chunk')} damaged, which jobs fetch again" if wrong else "no damage"
            screen.say(f"{node}: {_name(copy)} of {copy.path or '?'}: {counted(right + wrong, 'chunk')}, {words}")
    screen.tell(damaged=damaged)
    screen.say(f"{damaged} damaged")
    return 1 if damaged else 0


@click.command()
@_folders
@arguments.as_json
@click.option(
    "--older-than",
    "days",
    default=0.0,
    metavar="DAYS",
    type=click.FloatRange(min=0),
    help="Keep those that a job used in the last DAYS days.",
)
def clean(folders: tuple[str, ...], days: float) -> int:
    """Remove the copies that no job uses now.

    \b
    Example:
      srun --ntasks-per-node=1 python -m pario tiers clean /local/nvme --older-than 7
    """
    from pario.tiers.copies import remove

    freed = 0
    for node, found in _on_every_node(folders, lambda copy: (copy, copy.days >= days and remove(copy))):
        for copy, gone in found:
            freed += copy.disk_bytes if gone else 0
            _tell(node, copy, removed=gone)
            kept = "in use" if copy.in_use else f"used {_when(copy)}"
            screen.say(f"{node}: {_name(copy)} of {copy.path or '?'} {'removed' if gone else f'kept: {kept}'}")
    screen.tell(freed_bytes=freed)
    screen.say(f"{decimal_bytes(freed)} freed")
    return 0


def _on_every_node(folders: Sequence[str], what: Callable[[Copy], T]) -> list[tuple[str, list[T]]]:
    """(name of the node, what `what` says of each copy), on all ranks; the first one of each node looks. Collective.
    Raises OSError, ParioError."""
    from pario.comm.base import together
    from pario.comm.world import get_world
    from pario.tiers.copies import copies_below

    screen.tell(copies=[])
    world: AnyWorld = get_world(None)
    with world:
        mine: tuple[str, list[T]] | None = None
        with together(world, "looking after copies"):
            if world.is_leader:
                mine = node_name(), [what(copy) for folder in folders for copy in copies_below(folder)]
        return [each for each in world.allgather(mine) if each is not None]


def _tell(node: str, copy: Copy, **more: Any) -> None:
    names = ("folder", "path", "identity", "held_bytes", "disk_bytes", "used_at", "in_use")
    screen.add("copies", {"node": node, **{name: getattr(copy, name) for name in names}, **more})


def _part(copy: Copy) -> str:
    return f"{copy.held_bytes / copy.grid.file_bytes:.0%} of {decimal_bytes(copy.grid.file_bytes)}"


def _when(copy: Copy) -> str:
    return "now" if copy.in_use else f"{copy.days:.1f} days ago"


def _name(copy: Copy) -> str:
    return copy.identity[:12]
