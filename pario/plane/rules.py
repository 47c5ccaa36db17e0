"""The rules of a control plane: a TOML file, checked as a whole when it is read (docs/sharing-a-store.md).

Secrets stand in files of their own, one per user, that nobody else can read.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from pario.errors import OptionError
from pario.machine import closing_fd
from pario.plane.bucket import Rates
from pario.text import read_size

Reader = Callable[[Any, str], Any]

#: A secret of fewer characters can be guessed; a file of more bytes is none.
_LEAST_SECRET, _MOST_SECRET = 16, 4096
_MOST_RULES_BYTES = 4 << 20
_RATES = "bytes_per_s", "operations_per_s"


@dataclass(frozen=True)
class Limits:
    """What the plane takes on at most.

    connections : at one time; connections_per_user : of one user; None: half of `connections`. Processes that have a
        connection of their own are as many at most, those counted that have gone and whose leases last
    jobs_per_user : of one user at one time
    line_bytes : of one message from a client
    """

    connections: int = 4096
    connections_per_user: int | None = None
    jobs_per_user: int = 64
    line_bytes: int = 4096

    @property
    def per_user(self) -> int:
        """Connections of one user."""
        return self.connections_per_user or max(1, self.connections // 2)


@dataclass(frozen=True)
class JobRule:
    """What jobs get whose name and user fit these patterns (fnmatch: *, ?, [...]).

    guarantee : what each of them gets if it wants it, 0: nothing is guaranteed
    most : what it gets at most
    safe : at what rates it goes on when it hears nothing from the plane; None: its guarantee, or a part of the store
    """

    name: str = "*"
    user: str = "*"
    guarantee: tuple[float, float] = (0.0, 0.0)
    most: Rates = (None, None)
    safe: Rates = (None, None)


@dataclass(frozen=True)
class Rules:
    """A rules file.

    capacity : of the store, bytes/s and operations/s; None: not limited
    lease_s : for how long a grant holds; cycle_s : how often shares are computed
    secrets : user -> what its jobs prove to know
    """

    capacity: Rates
    lease_s: float = 5.0
    cycle_s: float = 0.25
    jobs: tuple[JobRule, ...] = ()
    limits: Limits = field(default_factory=Limits)
    secrets: Mapping[str, bytes] = field(default_factory=dict, repr=False)

    def rule_of(self, name: str, user: str) -> JobRule:
        """The first one that fits."""
        fitting = (each for each in self.jobs if fnmatchcase(name, each.name) and fnmatchcase(user, each.user))
        return next(fitting, JobRule())


def read_rules(path: str) -> Rules:
    """Raises OptionError with what is wrong, and where."""
    try:
        if sys.version_info >= (3, 11):
            import tomllib as toml
        else:
            import tomli as toml
        with open(path, "rb") as file:
            text = file.read(_MOST_RULES_BYTES + 1)
        if len(text) > _MOST_RULES_BYTES:
            raise OptionError("these are no rules: the file is too long")
        return _rules(toml.loads(text.decode()), os.path.dirname(os.path.abspath(path)))
    except OptionError as e:
        e.at(path=path)
        raise
    except ModuleNotFoundError:
        raise OptionError("reading rules needs Python 3.11, or tomli", path=path, hint="pip install tomli") from None
    except OSError as e:
        raise OptionError(f"cannot read the rules: {e.strerror}", path=path) from e
    except ValueError as e:  # a wrong encoding among them
        raise OptionError(f"the rules are no TOML: {e}", path=path) from None


def _rules(words: dict[str, Any], folder: str) -> Rules:
    """folder : in which the tokens are"""
    counts = {each.name: partial(_number, (int,), 1, 1 << 20) for each in fields(Limits)}
    counts["line_bytes"] = partial(_number, (int,), 1024, 1 << 20)
    readers: dict[str, Reader] = {
        "lease_s": partial(_number, (int, float), 0.5, 3600),
        "cycle_s": partial(_number, (int, float), 0.01, 60),
        "store": lambda value, _: _pair(_table(value, "[store]", dict.fromkeys(_RATES, read_rate))),
        "limits": lambda value, _: Limits(**_table(value, "[limits]", counts)),
        "user": lambda value, _: [_user(each, where, folder) for where, each in _tables(value, "user")],
        "job": lambda value, _: tuple(_job(each, where) for where, each in _tables(value, "job")),
    }
    found = _table({"store": None, **words}, "the file", readers)
    if found["store"] == (None, None):
        raise OptionError("[store] must say bytes_per_s, operations_per_s or both: what the store can give")
    secrets: dict[str, bytes] = {}
    for name, secret in found.pop("user", []):
        if secrets.setdefault(name, secret) is not secret:
            raise OptionError(f"[[user]]: user {name!r} is there twice")
    rules = Rules(found.pop("store"), jobs=found.pop("job", ()), secrets=secrets, **found)
    if rules.cycle_s > rules.lease_s / 3:
        both = f"{rules.lease_s:g} and {rules.cycle_s:g}"
        raise OptionError(f"lease_s must be at least three times cycle_s, got {both}")
    return rules


def _user(words: dict[str, Any], where: str, folder: str) -> tuple[str, bytes]:
    """Name and secret."""
    found = _table(words, where, dict.fromkeys(("name", "token"), _text))
    if len(found) < 2:
        raise OptionError(f'{where} must have name = "..." and token = "FILE"')
    return found["name"], read_token(os.path.join(folder, os.path.expanduser(found["token"])))


def _job(words: dict[str, Any], where: str) -> JobRule:
    readers: dict[str, Reader] = dict.fromkeys(("name", "user"), _text)
    readers |= {before + key: read_rate for before in ("", "most_", "safe_") for key in _RATES}
    found = _table(words, where, readers)
    nbytes, operations = _pair(found)
    rates = (nbytes or 0.0, operations or 0.0), _pair(found, "most_"), _pair(found, "safe_")
    return JobRule(found.get("name", "*"), found.get("user", "*"), *rates)


# -- readers take a value and where it stands ------------------------------------------------------------------------


def _table(words: Any, where: str, readers: Mapping[str, Reader]) -> dict[str, Any]:
    """What the readers of a table's keys make of its values."""
    if not isinstance(words, dict):
        raise OptionError(f"{where} is missing or no table")
    for key in words:
        if key not in readers:
            raise OptionError(f"{where} has no {key!r}; it knows {', '.join(readers)}")
    return {key: readers[key](value, f"{where}: {key}") for key, value in words.items()}


def _tables(value: Any, key: str) -> list[tuple[str, dict[str, Any]]]:
    """Tables, and where each stands."""
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise OptionError(f"{key} must be tables: write [[{key}]]")
    return [(f"[[{key}]] number {k}", each) for k, each in enumerate(value, 1)]


def _pair(found: dict[str, Any], before: str = "") -> Rates:
    nbytes, operations = (found.get(before + key) for key in _RATES)
    return nbytes, operations


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise OptionError(f"{where} must be a text in quotes, got {value!r}")
    return value


def _number(kinds: tuple[type, ...], least: float, most: float, value: Any, where: str) -> Any:
    """kinds : int alone for a whole number; true and false are none"""
    if type(value) not in kinds or not least <= value <= most:
        whole = "" if float in kinds else "whole "
        raise OptionError(f"{where} must be a {whole}number from {least} to {most}, got {value!r}")
    return kinds[-1](value)


def read_rate(value: Any, where: str) -> float | None:
    """A number, or words as "150 MiB"; powers of 1000 without the i; None: None. Raises OptionError."""
    if value is None:
        return None
    found: float | None = None
    if isinstance(value, str):
        found = read_size(value)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        found = float(value)
    if found is None or not 0 < found <= 1e18:
        raise OptionError(f'{where} must be a number above 0, or words as "150 MiB", got {value!r}')
    return found


def read_token(path: str) -> bytes:
    """The secret in a file that only its owner can read. Raises OptionError."""
    hint: str | None = "Make one: (umask 077; head -c 32 /dev/urandom | base64 > FILE). Plane and job have the same."
    try:
        # Without O_NONBLOCK, opening somebody's pipe would wait for ever.
        with closing_fd(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)) as fd:
            status, secret = os.fstat(fd), b""
            if stat.S_ISREG(status.st_mode):
                secret = os.read(fd, _MOST_SECRET + 1).strip()
    except OSError as e:
        hint = hint if isinstance(e, FileNotFoundError) else None
        raise OptionError(f"cannot read the token: {e.strerror}", path=path, hint=hint) from e
    if not stat.S_ISREG(status.st_mode):
        wrong, hint = "the token is no regular file", None
    elif status.st_uid not in (0, os.geteuid()):
        wrong, hint = f"the token belongs to user {status.st_uid}", None
    elif status.st_mode & 0o077:
        wrong, hint = f"others may use the token (mode {stat.S_IMODE(status.st_mode):04o})", "chmod 600 it."
    elif not _LEAST_SECRET <= len(secret) <= _MOST_SECRET:
        wrong = f"a token has {_LEAST_SECRET} to {_MOST_SECRET:,} characters, this one {len(secret):,}"
    else:
        return secret
    raise OptionError(wrong, path=path, hint=hint)
