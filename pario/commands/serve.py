"""`serve`: keep copies of datasets for all jobs of this user on a node."""

from __future__ import annotations

import resource
import signal
import sys
import threading

import click

from pario.comm.launcher import node_name
from pario.comm.world import get_world, leave_mpi
from pario.commands.screen import counted, decimal_bytes
from pario.dataset.host import Host
from pario.errors import OptionError
from pario.options import Options, read_tiers

__all__ = ["allow_many_files", "serve"]


def serve(folder: str | None, tiers: str | None, copies: str) -> int:
    """Collective over all ranks; the first one of each node serves until SIGTERM, SIGINT or SIGHUP."""
    if not folder:
        raise OptionError(
            "a service needs a folder where jobs find it", hint="Pass --at FOLDER, or set PARIO_SERVICE to it."
        )
    options = Options(
        tiers=read_tiers(tiers) if tiers is not None else None, copies=copies if copies == "auto" else _number(copies)
    )
    allow_many_files()
    end = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: end.set())
    with get_world(None) as world:
        host = Host(folder, options, world)
    leave_mpi()  # services end one by one
    if host.number is None:
        return 0
    nodes = counted(world.nodes, "node")
    _say(f"{node_name()}: node {host.number} of {nodes}; jobs find it by  export PARIO_SERVICE={host.folder}")
    try:
        end.wait()
        found = host.state()
    finally:
        host.close()
    for each in found:
        _say(
            f"{node_name()}: {each['path']}: {decimal_bytes(each['store_bytes'])} read from the store, "
            f"{decimal_bytes(each['held_bytes'])} of {decimal_bytes(each['file_bytes'])} kept here"
        )
    _say(f"{node_name()}: {decimal_bytes(host.served_bytes)} sent to other processes")
    return 0


def allow_many_files() -> None:
    """Each connection is a file, and so are the tiers; what the system allows at most is what a service needs."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _say(text: str) -> None:
    """Each node has something else to say."""
    click.echo(text)
    sys.stdout.flush()


def _number(copies: str) -> int:
    """Raises OptionError."""
    try:
        return int(copies)
    except ValueError:
        raise OptionError(f'--copies is a number or "auto", got {copies!r}') from None
