"""`plane serve | status`: one process that shares a store among the jobs of a cluster, and a look at it."""

from __future__ import annotations

import signal
import sys
import time
from contextlib import closing
from typing import Any

import click

from pario.comm.launcher import own_addresses
from pario.commands import arguments
from pario.commands.screen import counted, screen, seconds, table
from pario.errors import OptionError, ParioError
from pario.machine import allow_many_files, replacing
from pario.plane.bucket import rates_words

#: of the table of a thousand jobs
_MOST_BYTES = 16 << 20


@click.group()
def plane() -> None:
    """Share a store among the jobs of a cluster."""


@plane.command()
@click.option("--rules", metavar="FILE", required=True, help="TOML file that says who gets what; SIGHUP rereads it.")
@click.option(
    "--at", metavar="ADDRESS", help="HOST:PORT, INTERFACE:PORT, or the path of a Unix socket.  [default: a free port]"
)
@click.option("--tell", metavar="FILE", help="Write the address into this file, for the jobs.")
def serve(rules: str, at: str | None, tell: str | None) -> int:
    """Share a store among the jobs of a cluster, until it is interrupted.

    Jobs whose PARIO_CONTROL names ADDRESS read the store at the rates that this process grants. The rules say how much
    the store can give, and what is guaranteed to whom; what a job does not use the others get. When this process dies
    the jobs go on.

    \b
    Examples:
      python -m pario plane serve --rules rules.toml --at ib0:7400
      python -m pario plane status --at head:7400
    """
    from pario.plane.plane import Plane
    from pario.plane.rules import read_rules
    from pario.plane.words import read_address

    found = read_rules(rules)
    if at is None:
        addresses = own_addresses()
        if not addresses:
            raise OptionError("this node has no network", hint="Pass --at HOST:PORT, or the path of a Unix socket.")
        at = f"{addresses[0]}:0"
    server = Plane(read_address(at), found, read_rules=lambda: read_rules(rules))
    signal.signal(signal.SIGHUP, lambda *_: server.reload())
    allow_many_files()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.cancel())
    if tell is not None:
        _replace(tell, f"{server.address}\n")
    screen.say(f"the control plane listens; jobs join it by  export PARIO_CONTROL={server.address}")
    server.run()
    screen.say(f"the control plane has ended, which {counted(server.book.seen, 'job')} had joined")
    return 0


def _replace(path: str, text: str) -> None:
    """Readers see the old text or the new. Raises ParioError."""
    try:
        with replacing(path) as file:
            file.write(text.encode())
    except OSError as e:
        raise ParioError(f"cannot write: {e.strerror}", path=path) from e


@plane.command()
@click.option("--at", metavar="ADDRESS", help="Address of the control plane.  [default: $PARIO_CONTROL]")
@click.option(
    "--every",
    metavar="SECONDS",
    type=click.FloatRange(min=0),
    help="Seconds between two looks; 0: look once.  [default: 1 on a terminal]",
)
@click.option("--prometheus", is_flag=True, help="Print text for Prometheus.")
@arguments.as_json
def status(at: str | None, every: float | None, prometheus: bool) -> int:
    """Show what each job is granted and uses."""
    from pario.plane.joining import plane_address, who
    from pario.plane.metrics import metrics_text
    from pario.plane.session import connected
    from pario.plane.words import read_address

    if screen.json and (every or prometheus):
        raise click.UsageError("--json prints one state: leave out --every and --prometheus")
    text = at or plane_address()
    if not text:
        raise OptionError("no control plane is named", hint="Pass --at ADDRESS, or set PARIO_CONTROL to it.")
    address = read_address(text)
    if every is None:
        every = 1.0 if sys.stdout.isatty() and not (prometheus or screen.json) else 0.0
    with closing(connected(address, who(address), {"do": "status"}, _MOST_BYTES)) as session:
        try:
            state = session.first["status"]
            screen.tell(state)
            while True:
                if every:
                    click.clear()
                screen.say(metrics_text(state).rstrip("\n") if prometheus else _status_text(state))
                if not every:
                    return 0
                time.sleep(max(0.1, every))
                session.send({"ask": "status"})
                state = session.answer()["status"]
        except (OSError, KeyError) as e:
            raise ParioError(f"the control plane at {address} does not answer: {e}") from None


def _status_text(state: dict[str, Any]) -> str:
    """The table of `plane status`. state : of `Plane.state`"""
    lines = [f"{_head(state)}, a cycle takes {seconds(state['cycle_s'])}"]
    if state["jobs"]:
        head = ("user", "job", "name", "nodes", "processes", "guaranteed", "granted", "used", "")
        rows: list[tuple[str, ...]] = [head]
        rows += [
            (
                *(str(job[key]) for key in ("user", "job", "name", "nodes", "members")),
                *(_both(job[key]) for key in ("guarantee", "grant", "used")),
                f"{job['lost']} not connected" if job["lost"] else "",
            )
            for job in sorted(state["jobs"], key=lambda job: (job["user"], job["job"]))
        ]
        lines.append(table(rows, left=3, words=True))
    return "\n".join(lines)


def _head(state: dict[str, Any]) -> str:
    of = " and ".join(rates_words(state["capacity"]))
    about = f"lease {state['lease_s']:g} s; {counted(state['connections'], 'connection')}"
    return f"{of} for {counted(len(state['jobs']), 'job')}, {about}"


def _both(rates: list[float | None]) -> str:
    return ", ".join(rates_words(rates)) or ("-" if rates == [0, 0] else "all")
