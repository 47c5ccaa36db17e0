"""Rules files: what they may say, and what is said about those that are wrong; tokens that nobody else can read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pario.errors import OptionError
from pario.plane.rules import JobRule, Limits, Rules, read_rules, read_token

SECRET = b"0123456789abcdef0123456789abcdef"

WHOLE = """
lease_s = 10
cycle_s = 0.5

[store]
bytes_per_s = "1.5 GiB"
operations_per_s = "20 k"

[limits]
connections = 100
connections_per_user = 50
jobs_per_user = 3
line_bytes = 2048

[[user]]
name = "anna"
token = "anna.token"

[[job]]
name = "train-*"
user = "anna"
bytes_per_s = "150 MiB"
operations_per_s = 500
most_bytes_per_s = 1e9
safe_bytes_per_s = "10MB/s"

[[job]]
most_operations_per_s = 100
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "anna.token").write_bytes(SECRET + b"\n")
    (tmp_path / "anna.token").chmod(0o600)
    return tmp_path


def rules(folder: Path, text: str) -> Rules:
    (folder / "rules.toml").write_text(text)
    return read_rules(str(folder / "rules.toml"))


def test_all_that_a_file_may_say(folder: Path) -> None:
    assert rules(folder, WHOLE) == Rules(
        (1.5 * 2**30, 20_000.0),
        10.0,
        0.5,
        (
            JobRule("train-*", "anna", (150.0 * 2**20, 500.0), (1e9, None), (1e7, None)),
            JobRule("*", "*", (0.0, 0.0), (None, 100.0), (None, None)),
        ),
        Limits(100, 50, 3, 2048),
        {"anna": SECRET},
    )


def test_what_a_short_file_means(folder: Path) -> None:
    assert rules(folder, "[store]\nbytes_per_s = 100e6") == Rules((100e6, None), 5.0, 0.25, (), Limits(), {})


def test_the_first_rule_that_fits(folder: Path) -> None:
    found = rules(folder, WHOLE)
    assert found.rule_of("train-7", "anna") is found.jobs[0]
    assert found.rule_of("train-7", "otto") is found.jobs[1]
    assert Rules((1.0, None)).rule_of("x", "y") == JobRule()


def test_secrets_are_not_shown(folder: Path) -> None:
    assert "0123456789" not in repr(rules(folder, WHOLE))


STORE = "[store]\nbytes_per_s = 1e8\n"
WRONG = {
    "no store": ("", r"\[store\] is missing"),
    "empty store": ("[store]", "bytes_per_s, operations_per_s or both"),
    "no TOML": ("lease_s =", "the rules are no TOML"),
    "policy": ('policy = "fair"\n' + STORE, "the file has no 'policy'; it knows lease_s"),
    "unknown key": (STORE + "rate = 1", r"\[store\] has no 'rate'; it knows bytes_per_s, operations_per_s"),
    "unknown table": (STORE + "[jobs]\n", "the file has no 'jobs'"),
    "zero": ("[store]\nbytes_per_s = 0", "above 0"),
    "negative": ("[store]\nbytes_per_s = -1", "above 0"),
    "infinite": ("[store]\nbytes_per_s = inf", "above 0"),
    "nan": ("[store]\nbytes_per_s = nan", "above 0"),
    "true": ("[store]\nbytes_per_s = true", "above 0"),
    "words": ('[store]\nbytes_per_s = "fast"', "above 0"),
    "no job table": (STORE + "[job]\nname = 'a'", r"write \[\[job\]\]"),
    "job pattern": (STORE + "[[job]]\nname = 7", r"\[\[job\]\] number 1: name must be a text"),
    "job key": (STORE + "[[job]]\n[[job]]\nshare = 7", r"\[\[job\]\] number 2 has no 'share'"),
    "user": (STORE + "[[user]]\nname = 'a'", r"\[\[user\]\] number 1 must have name"),
    "user twice": (STORE + "[[user]]\nname='a'\ntoken='anna.token'\n" * 2, "user 'a' is there twice"),
    "token": (STORE + "[[user]]\nname='a'\ntoken='b.token'", "cannot read the token: No such file"),
    "lease": ("lease_s = 0.1\n" + STORE, "lease_s must be a number from 0.5 to 3600"),
    "cycle": ("lease_s = 1\ncycle_s = 0.5\n" + STORE, "at least three times cycle_s"),
    "limits": (STORE + "[limits]\nconnections = 0", "connections must be a whole number from 1 to"),
    "limits text": (STORE + "[limits]\nconnections = '7'", "connections must be a whole number"),
    "line": (STORE + "[limits]\nline_bytes = 10", "line_bytes must be a whole number from 1024"),
    "no table": ("limits = 7\n" + STORE, r"\[limits\] is missing or no table"),
}


@pytest.mark.parametrize(("text", "said"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_said_with_the_file(folder: Path, text: str, said: str) -> None:
    with pytest.raises(OptionError, match=said) as caught:
        rules(folder, text)
    assert str(folder) in str(caught.value)


def test_files_that_cannot_be_rules(folder: Path) -> None:
    with pytest.raises(OptionError, match="cannot read the rules: No such file"):
        read_rules(str(folder / "none"))
    (folder / "long").write_bytes(b"#" * (5 << 20))
    with pytest.raises(OptionError, match="too long"):
        read_rules(str(folder / "long"))
    (folder / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(OptionError, match="no TOML"):
        read_rules(str(folder / "bytes"))


# -- tokens ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
def test_a_token_that_others_may_use(folder: Path, mode: int) -> None:
    (folder / "anna.token").chmod(mode)
    with pytest.raises(OptionError, match=f"others may use the token \\(mode {mode:04o}\\).*chmod 600"):
        read_token(str(folder / "anna.token"))


@pytest.mark.parametrize("content", [b"", b"short", b" " * 100, b"x" * 5000])
def test_a_token_that_is_none(folder: Path, content: bytes) -> None:
    (folder / "anna.token").write_bytes(content)
    with pytest.raises(OptionError, match="a token has 16 to 4,096 characters"):
        read_token(str(folder / "anna.token"))


def test_a_token_that_is_not_there(folder: Path) -> None:
    with pytest.raises(OptionError, match=r"No such file.*umask 077"):
        read_token(str(folder / "nobody.token"))


def test_other_things_than_files(folder: Path) -> None:
    (folder / "link").symlink_to(folder / "anna.token")
    os.mkfifo(folder / "pipe", 0o600)
    with pytest.raises(OptionError, match="cannot read the token"):
        read_token(str(folder / "link"))
    for name in ("pipe", "."):
        with pytest.raises(OptionError, match="no regular file"):
            read_token(str(folder / name))


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file away")
def test_another_users_token(folder: Path) -> None:
    os.chown(folder / "anna.token", 54321, -1)
    with pytest.raises(OptionError, match="belongs to user 54321"):
        read_token(str(folder / "anna.token"))
