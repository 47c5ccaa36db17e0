"""Which control plane this process belongs to: PARIO_CONTROL, and what it tells the plane of itself."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pario.comm.launcher import job_name, node_name
from pario.errors import OptionError

if TYPE_CHECKING:
    from pario.plane.agent import Agent
    from pario.plane.session import Who
    from pario.plane.words import PlaneAddress

_log = logging.getLogger("pario")

_lock = threading.RLock()
#: of this process, by PARIO_CONTROL
_agents: dict[str, Agent] = {}
_warned: set[str] = set()


def plane_address() -> str:
    """What PARIO_CONTROL says; "" without it."""
    return os.environ.get("PARIO_CONTROL", "")


@contextmanager
def store_agent() -> Iterator[Agent | None]:
    """What stands before this process's reads of the store; None without PARIO_CONTROL.

    It ends with the last that holds it. Raises OptionError if PARIO_CONTROL is no address, or PARIO_CONTROL_SAFE no
    rate. If there is no token that could be used, a warning says so, and the job reads at that rate: it is not stopped.
    """
    agent = _held_agent()
    try:
        yield agent
    finally:
        if agent is not None:
            agent.release()


def _held_agent() -> Agent | None:
    text = plane_address()
    if not text:
        return None
    from pario.plane.agent import Agent  # only here, and so in `who`: most jobs have no plane
    from pario.plane.rules import read_rate
    from pario.plane.words import read_address

    try:
        address = read_address(text)
    except OptionError as e:
        raise OptionError(f"PARIO_CONTROL: {e.what}", hint=e.hint) from None
    safe = read_rate(os.environ.get("PARIO_CONTROL_SAFE") or None, "PARIO_CONTROL_SAFE")
    with _lock:
        agent = _agents.get(text)
        if agent is None or not agent.hold():
            me = None
            try:
                me = who(address)
            except OptionError as e:
                if text not in _warned:
                    _warned.add(text)
                    _log.warning("this process cannot join the control plane at %s: %s", address, e)
                if safe is None:
                    return None
            agent = _agents[text] = Agent(address, me, (safe, None))
            agent.hold()
        return agent


def who(address: PlaneAddress) -> Who:
    """This process, for that plane. Raises OptionError without a token that could be used."""
    from pario.plane.rules import read_token
    from pario.plane.session import Who

    path = token_path()
    secret = None
    if not address.path or os.path.exists(path):
        secret = read_token(path)
    return Who(user_name(), secret, *(_short(each) for each in (*job_name(), node_name())))


def token_path() -> str:
    """Where the user's token lies."""
    given = os.environ.get("PARIO_CONTROL_TOKEN", "")
    if given:
        return os.path.expanduser(given)
    config = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return os.path.join(config, "pario", "control.token")


def user_name() -> str:
    """As the system knows the user, or the number for one without a name."""
    from pario.wire.local import user_names

    return user_names(os.geteuid())[0]


def _short(text: str) -> str:
    """As the plane takes it."""
    return "".join(each if each.isprintable() else "?" for each in text)[:128] or "?"


def _forked() -> None:
    """Another thread of the parent may have held the lock."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_forked)
