"""`python -m pario plane serve`: a plane as its user starts it, and the table of what it does."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("click")

from control_plane import SECRET, Process, until

from pario.cli import main
from pario.errors import OptionError, ParioError
from pario.plane import joining
from pario.plane.agent import Agent
from pario.plane.session import Who

RULES = f"""
lease_s = 2
cycle_s = 0.05
[store]
bytes_per_s = "100 MB"
[[user]]
name = "{joining.user_name()}"
token = "me.token"
[[job]]
name = "train"
bytes_per_s = "15 MB"
"""


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    made = Process(tmp_path, RULES)
    monkeypatch.setenv("PARIO_CONTROL_TOKEN", str(tmp_path / "me.token"))
    yield made
    made.kill()


def test_the_table_and_rules_read_again(
    process: Process, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = Agent(process.address, Who(joining.user_name(), SECRET, "12.0", "train", "n"))
    agent.hold()
    agent.take(1, 1)
    until(lambda: agent.joined)
    assert main(["plane", "status", "--at", process.at]) == 0
    said = capsys.readouterr().out
    assert said.startswith("100 MB/s for 1 job, lease 2 s; 2 connections, a cycle takes ")
    assert re.search(r"12\.0 +train +1 +1 +15 MB/s", said), said
    monkeypatch.setenv("PARIO_CONTROL", process.at)
    assert main(["plane", "status", "--prometheus"]) == 0
    assert "pario_control_capacity_bytes_per_second 100000000\n" in capsys.readouterr().out
    (process.folder / "rules.toml").write_text(RULES.replace("100 MB", "50 MB"))
    process.signal(signal.SIGHUP)

    def read_again() -> bool:
        main(["plane", "status"])
        return capsys.readouterr().out.startswith("50 MB/s")

    until(read_again)
    agent.release()
    assert "has ended, which 1 job had joined" in process.end()


def test_without_what_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PARIO_CONTROL", raising=False)
    assert main(["plane", "serve"]) == 2
    assert "Missing option '--rules'" in capsys.readouterr().err
    with pytest.raises(OptionError, match="no control plane is named"):
        main(["plane", "status"])
    with pytest.raises(OptionError, match="cannot read the rules"):
        main(["plane", "serve", "--rules", str(tmp_path / "none")])
    (tmp_path / "token").write_bytes(SECRET)
    (tmp_path / "token").chmod(0o600)
    monkeypatch.setenv("PARIO_CONTROL_TOKEN", str(tmp_path / "token"))
    with pytest.raises(ParioError, match=r"no control plane at 127\.0\.0\.1:1: .*refused"):
        main(["plane", "status", "--at", "127.0.0.1:1"])


def test_the_address_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_text("[store]\noperations_per_s = 100")
    words = ["--rules", "rules.toml", "--at", "./socket", "--tell", "address"]
    child = subprocess.Popen(
        [sys.executable, "-m", "pario", "plane", "serve", *words],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    try:
        until((tmp_path / "address").exists, 30)
        assert (tmp_path / "address").read_text() == f"{tmp_path}/socket\n"
    finally:
        child.send_signal(signal.SIGINT)
        said, _ = child.communicate(timeout=10)
    assert child.returncode == 0
    assert f"export PARIO_CONTROL={tmp_path}/socket" in said
    assert sorted(os.listdir(tmp_path)) == ["address", "rules.toml"]
