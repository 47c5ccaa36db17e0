"""The rules of a control plane: a TOML file, checked as a whole when it is read (docs/sharing-a-store.md).

Secrets stand in files of their own, one per user, that nobody else can read.
"""

from __future__ import annotations

import fnmatch
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from pario.errors import OptionError
from pario.plane.bucket import Rates

#: A secret of fewer characters can be guessed; a file of more bytes is none.
_LEAST_SECRET, _MOST_SECRET = 16, 4096
_MOST_RULES_BYTES = 4 << 20
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([kKMGT]?)(i?)B?(?:/s)?\s*")


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

    def fits(self, name: str, user: str) -> bool:
        return fnmatch.fnmatchcase(name, self.name) and fnmatch.fnmatchcase(user, self.user)


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
        return next((rule for rule in self.jobs if rule.fits(name, user)), JobRule())


def read_rules(path: str) -> Rules:
    """Raises OptionError with what is wrong, and where."""
    try:
        with open(path, "rb") as file:
            text = file.read(_MOST_RULES_BYTES + 1)
    except OSError as e:
        raise OptionError(f"cannot read the rules: {e.strerror}", path=path) from e
    if len(text) > _MOST_RULES_BYTES:
        raise OptionError("these are no rules: the file is too long", path=path)
    toml = _toml(path)
    try:
        words = toml.loads(text.decode())
    except ValueError as e:  # a wrong encoding among them
        raise OptionError(f"the rules are no TOML: {e}", path=path) from None
    try:
        return _rules(words, os.path.dirname(os.path.abspath(path)))
    except OptionError as e:
        e.at(path=path)
        raise


def _toml(path: str) -> Any:
    try:
        import tomllib
    except ModuleNotFoundError:  # before Python 3.11
        try:
            import tomli as tomllib  # type: ignore[no-redef]
        except ModuleNotFoundError:
            raise OptionError(
                "reading rules needs Python 3.11, or tomli", path=path, hint="pip install tomli"
            ) from None
    return tomllib


def _rules(words: dict[str, Any], folder: str) -> Rules:
    _only(words, "the file", "lease_s", "cycle_s", "store", "limits", "user", "job")
    store = _table(words.get("store"), "[store]")
    _only(store, "[store]", "bytes_per_s", "operations_per_s")
    capacity = _rates(store, "[store]")
    if capacity == (None, None):
        raise OptionError("[store] must say bytes_per_s, operations_per_s or both: what the store can give")
    lease_s = _number(words, "lease_s", 5.0, 0.5, 3600.0)
    cycle_s = _number(words, "cycle_s", 0.25, 0.01, 60.0)
    if cycle_s > lease_s / 3:
        raise OptionError(f"lease_s must be at least three times cycle_s, got {lease_s:g} and {cycle_s:g}")
    jobs = tuple(_job(each, f"[[job]] number {k}") for k, each in enumerate(_tables(words, "job"), 1))
    return Rules(capacity, lease_s, cycle_s, jobs, _limits(words.get("limits", {})), _users(words, folder))


def _users(words: dict[str, Any], folder: str) -> dict[str, bytes]:
    """Their secrets."""
    secrets: dict[str, bytes] = {}
    for k, each in enumerate(_tables(words, "user"), 1):
        where = f"[[user]] number {k}"
        _only(each, where, "name", "token")
        name, token = each.get("name"), each.get("token")
        if not isinstance(name, str) or not name or not isinstance(token, str) or not token:
            raise OptionError(f'{where} must have name = "..." and token = "FILE"')
        if name in secrets:
            raise OptionError(f"{where}: user {name!r} is there twice")
        secrets[name] = read_token(os.path.join(folder, os.path.expanduser(token)))
    return secrets


def _job(words: dict[str, Any], where: str) -> JobRule:
    _only(
        words, where, "name", "user", "bytes_per_s", "operations_per_s", "most_bytes_per_s", "most_operations_per_s",
        "safe_bytes_per_s", "safe_operations_per_s",
    )  # fmt: skip
    for key in ("name", "user"):
        if not isinstance(words.get(key, "*"), str):
            raise OptionError(f"{where}: {key} must be a pattern in quotes, got {words[key]!r}")
    guarantee = _rates(words, where)
    return JobRule(
        words.get("name", "*"),
        words.get("user", "*"),
        (guarantee[0] or 0.0, guarantee[1] or 0.0),
        _rates(words, where, "most_"),
        _rates(words, where, "safe_"),
    )


def _limits(words: Any) -> Limits:
    words = _table(words, "[limits]")
    _only(words, "[limits]", *(each.name for each in fields(Limits)))
    for key, value in words.items():
        if type(value) is not int or not 1 <= value <= 1 << 20:
            raise OptionError(f"[limits]: {key} must be a whole number above 0, got {value!r}")
    if words.get("line_bytes", 4096) < 1024:
        raise OptionError(f"[limits]: line_bytes must be at least 1024, got {words['line_bytes']}")
    return Limits(**words)


def _rates(words: dict[str, Any], where: str, before: str = "") -> Rates:
    keys = f"{before}bytes_per_s", f"{before}operations_per_s"
    nbytes, operations = (read_rate(words.get(key), f"{where}: {key}") for key in keys)
    return nbytes, operations


def read_rate(value: Any, where: str) -> float | None:
    """A number, or words as "150 MiB"; powers of 1000 without the i; None: None. Raises OptionError."""
    if value is None:
        return None
    found: float | None = None
    if isinstance(value, str) and (match := _SIZE.fullmatch(value)) is not None:
        power = " KMGT".index(match[2].upper() or " ")
        found = float(match[1]) * (1024 if match[3] else 1000) ** power
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        found = float(value)
    if found is None or not 0 < found <= 1e18:
        raise OptionError(f'{where} must be a number above 0, or words as "150 MiB", got {value!r}')
    return found


def _number(words: dict[str, Any], key: str, default: float, least: float, most: float) -> float:
    value = words.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise OptionError(f"{key} must be a number of seconds between {least:g} and {most:g}, got {value!r}")
    return float(value)


def _table(words: Any, where: str) -> dict[str, Any]:
    if not isinstance(words, dict):
        raise OptionError(f"{where} is missing or no table")
    return words


def _tables(words: dict[str, Any], key: str) -> list[dict[str, Any]]:
    found = words.get(key, [])
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise OptionError(f"{key} must be tables: write [[{key}]]")
    return found


def _only(words: dict[str, Any], where: str, *known: str) -> None:
    for key in words:
        if key not in known:
            raise OptionError(f"{where} has no {key!r}; it knows {', '.join(known)}")


def read_token(path: str) -> bytes:
    """The secret in a file that only its owner can read. Raises OptionError."""
    try:
        # Without O_NONBLOCK, opening somebody's pipe would wait for ever.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as e:
        how = "Make one: (umask 077; head -c 32 /dev/urandom | base64 > FILE). Plane and job have the same."
        hint = how if isinstance(e, FileNotFoundError) else None
        raise OptionError(f"cannot read the token: {e.strerror}", path=path, hint=hint) from e
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OptionError("the token is no regular file", path=path)
        if status.st_uid not in (0, os.geteuid()):
            raise OptionError(f"the token belongs to user {status.st_uid}", path=path)
        if status.st_mode & 0o077:
            mode = stat.S_IMODE(status.st_mode)
            raise OptionError(f"others may use the token (mode {mode:04o})", path=path, hint="chmod 600 it.")
        secret = os.read(fd, _MOST_SECRET + 1).strip()
    except OSError as e:
        raise OptionError(f"cannot read the token: {e.strerror}", path=path) from e
    finally:
        os.close(fd)
    if not _LEAST_SECRET <= len(secret) <= _MOST_SECRET:
        raise OptionError(
            f"a token has {_LEAST_SECRET} to {_MOST_SECRET:,} characters, this one {len(secret):,}",
            path=path,
            hint="For example: head -c 32 /dev/urandom | base64 > FILE",
        )
    return secret
