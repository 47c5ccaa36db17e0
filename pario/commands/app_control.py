"""The command `control`, its arguments and help texts, for click (app.py). control.py does the work."""

from __future__ import annotations

import click

__all__ = ["control"]


@click.group(invoke_without_command=True)
@click.option(
    "--rules", metavar="FILE", help="Who gets what: a TOML file; a plane rereads it on SIGHUP. Of agents: users, limits"
)
@click.option("--agent-of", metavar="ADDRESS", help="Speak for the jobs of this node to the control plane at ADDRESS.")
@click.option(
    "--at", metavar="ADDRESS", help="HOST:PORT, INTERFACE:PORT, or the path of a Unix socket.  [default: a free port]"
)
@click.option("--tell", metavar="FILE", help="Write the address into this file, for the jobs.")
@click.option("--metrics", metavar="FILE", help="Write the state into this file once a second, for Prometheus.")
@click.pass_context
def control(
    context: click.Context,
    rules: str | None,
    agent_of: str | None,
    at: str | None,
    tell: str | None,
    metrics: str | None,
) -> int | None:
    """Share a store among the jobs of a cluster, until it is interrupted.

    Jobs whose PARIO_CONTROL names ADDRESS read the store at the rates that this process grants. The rules say how much
    the store can give, and what is guaranteed to whom; what a job does not use the others get. When this process dies
    the jobs go on.

    With --agent-of this process is a node agent: the node's jobs join it instead of the plane, which hears one line for
    all of them. For more than a thousand processes.

    \b
    Examples:
      python -m pario control --rules rules.toml --at ib0:7400
      python -m pario control --agent-of head:7400 --at /run/pario/control
      python -m pario control status --at head:7400
    """
    if context.invoked_subcommand is not None:
        return None
    if agent_of is not None:
        if at is None:
            raise click.UsageError("--at ADDRESS is missing: where the node's jobs find the agent, as a socket's path")
        from pario.commands.control import speak

        return speak(agent_of, rules, at, tell, metrics)
    if rules is None:
        raise click.UsageError("--rules FILE is missing: what the store can give, and what is guaranteed to whom")
    from pario.commands.control import serve as run

    return run(rules, at, tell, metrics)


@control.command()
@click.option("--at", metavar="ADDRESS", help="Of the control plane.  [default: $PARIO_CONTROL]")
@click.option("--every", metavar="SECONDS", type=click.FloatRange(min=0), help="0: once.  [default: 1 on a terminal]")
@click.option("--prometheus", is_flag=True, help="As text for Prometheus.")
def status(at: str | None, every: float | None, prometheus: bool) -> int:
    """Show what each job is granted and uses."""
    from pario.commands.control import status as run

    return run(at, every, prometheus)
