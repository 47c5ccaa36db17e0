"""`python -m pario jobscript`: what it writes, as bash reads it. tests/system/test_slurm.py runs it for real."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("click")

from pario.cli import main
from pario.commands.jobscript import fill, knobs, names, template

ROOT = Path(__file__).parents[1]
NAMES = ["job_array", "read_bench", "shared_store", "train", "train_requeue", "train_staged"]


def common(text: str) -> str:
    """What stands between the line that says so and the next rule."""
    found = re.search(
        r"^# ---- from here to the next line: the same .*?\n(.*?)^# -{100,}$", text, re.MULTILINE | re.DOTALL
    )
    assert found
    return found[1]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_templates_are_those_in_jobscripts() -> None:
    assert names() == NAMES
    for name in NAMES:
        assert template(name) == (ROOT / "jobscripts" / f"{name}.slurm").read_text()
    assert {path.stem for path in (ROOT / "jobscripts").iterdir()} == set(NAMES)


@pytest.mark.parametrize("name", ["train_ddp", "train_requeue"])
def test_lessons_in_the_package_are_those_in_examples(name: str) -> None:
    assert (ROOT / "examples" / f"{name}.py").read_bytes() == (ROOT / "pario" / "demo" / f"{name}.py").read_bytes()


def test_what_templates_share_is_the_same() -> None:
    assert len({common(template(name)) for name in NAMES}) == 1


@pytest.mark.parametrize("name", NAMES)
def test_every_knob_says_what_it_is(name: str) -> None:
    for knob, line in knobs(template(name)).items():
        assert re.search(r"  +# \w", line), knob
    above = template(name).split("# ---- from here", 1)[0].split("# ---- knobs", 1)[1]
    assert set(knobs(template(name))) == {
        line.split("=")[0] for line in above.splitlines() if re.match("[A-Z_]+=", line)
    }


def test_lists_without_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["jobscript"]) == 0
    said = capsys.readouterr().out
    for name in NAMES:
        assert re.search(rf"^  {name} +\w.{{20,}}$", said, re.MULTILINE)


def test_written_filled_in(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "train --nodes 3 --ntasks-per-node 2 --cpus-per-task 5 --time 1-00:00:00 --partition gpu --account me --data d"
    )
    assert (
        main(["jobscript", *words.split(), "--set", "LAUNCHER=mpiexec", "--set", "ARGUMENTS=--epochs 9 -x 'a b'"]) == 0
    )
    text = (here / "train.slurm").read_text()
    for line in (
        "nodes=3",
        "ntasks-per-node=2",
        "cpus-per-task=5",
        "time=1-00:00:00",
        "partition=gpu",
        "account=me",
    ):
        assert re.search(rf"^#SBATCH --{line}(  #.*)?$", text, re.MULTILINE), line
    assert "##SBATCH --gpus-per-task=1" in text
    assert stat.S_IMODE((here / "train.slurm").stat().st_mode) & 0o100
    assert (here / "train_ddp.py").read_text() == (ROOT / "examples" / "train_ddp.py").read_text()
    assert "train_ddp.py" in capsys.readouterr().out
    values = in_bash(text, "DATA", "SCRIPT", "VENV", "LAUNCHER", "ARGUMENTS[@]")
    assert values == [str(here / "d"), str(here / "train_ddp.py"), sys.prefix, "mpiexec", "--epochs", "9", "-x", "a b"]
    # and what is set from outside comes first
    assert in_bash(text, "DATA", env={"DATA": "/other"}) == ["/other"]


def in_bash(text: str, *variables: str, env: dict[str, str] | None = None) -> list[str]:
    """What bash makes of the knobs."""
    lines = "\n".join(knobs(text).values())
    script = lines + "\nprintf '%s\\n' " + " ".join(f'"${{{name}}}"' for name in variables)
    done = subprocess.run(
        ["bash", "-uc", script], env=env or {}, capture_output=True, text=True, timeout=20, check=True
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    "value", ["plain", "/a path/with blanks", "it's", '"quoted"', "$HOME/x", "a`b", "x}y", "back\\slash"]
)
def test_values_reach_bash_unchanged(value: str) -> None:
    text = fill(template("train"), {}, {"DATA": value})
    assert in_bash(text, "DATA", env={"HOME": "/home/me"}) == [value.replace("$HOME", "/home/me")]


def test_references_in_arguments_stay_open() -> None:
    text = fill(template("train"), {}, {"DATA": "/some data", "ARGUMENTS": '--data "$DATA" --rate 0.1'})
    assert in_bash(text, "ARGUMENTS[@]") == ["--data", "/some data", "--rate", "0.1"]


def test_a_file_is_not_replaced(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "train.slurm").write_text("mine")
    (here / "train_ddp.py").write_text("mine")
    assert main(["jobscript", "train"]) == 2
    assert "--force" in capsys.readouterr().err
    assert (here / "train.slurm").read_text() == "mine"
    assert main(["jobscript", "train", "--force"]) == 0
    assert "#SBATCH" in (here / "train.slurm").read_text()
    assert (here / "train_ddp.py").read_text() == "mine"  # never


def test_own_script_and_own_file(here: Path) -> None:
    assert main(["jobscript", "train", "--script", "mine.py", "-o", "job.sh"]) == 0
    assert [path.name for path in here.iterdir()] == ["job.sh"]
    assert in_bash((here / "job.sh").read_text(), "SCRIPT", "#ARGUMENTS[@]") == [str(here / "mine.py"), "0"]


def test_own_script_gets_the_arguments_that_are_set(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["jobscript", "train", "--script", "mine.py", "--data", "d"]) == 0
    assert "mine.py gets no arguments; --set 'ARGUMENTS=--data $DATA'" in capsys.readouterr().out
    words = ["--script", "mine.py", "--data", "d", "--set", "ARGUMENTS=--data $DATA", "--force"]
    assert main(["jobscript", "train", *words]) == 0
    assert "no arguments" not in capsys.readouterr().out
    assert in_bash((here / "train.slurm").read_text(), "ARGUMENTS[@]") == ["--data", str(here / "d")]


def test_to_standard_output(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["jobscript", "job_array", "--array", "5-9", "-o", "-"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("#!/usr/bin/env bash\n")
    assert re.search(r"^#SBATCH --array=5-9  #", text, re.MULTILINE)
    [script] = in_bash(text, "SCRIPT", env={"SEED": "5"})
    assert os.path.isfile(script)
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian"], "'trian' is none of job_array, read_bench, shared_store, train, train_requeue, train_staged"),
        (["train", "--array", "1"], "train has no --array; its knobs are DATA, SCRIPT,"),
        (["read_bench", "--set", "RUN=x"], "read_bench has no RUN; its knobs are DATA, BATCH_SIZE,"),
        (["train", "--set", "DATA"], "'DATA' is not KNOB=VALUE"),
        (["train", "-o", "nowhere/train.slurm"], "there is no directory nowhere"),
    ],
)
def test_a_mistake_is_named(here: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert main(["jobscript", *words]) == 2
    assert said in capsys.readouterr().err
    assert list(here.iterdir()) == []


def test_what_is_not_here_is_said(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "there.lmdb").mkdir()
    for data, said in (("there.lmdb", ""), ("not.lmdb", f"note: there is no {here / 'not.lmdb'} here"), ("$DATA", "")):
        assert main(["jobscript", "train", "--data", data, "-o", "-"]) == 0
        found = capsys.readouterr().err
        assert found.startswith(said)
        assert bool(found) == bool(said)
    assert main(["jobscript", "train", "--data", "not.lmdb"]) == 0
    assert f"note: there is no {here / 'not.lmdb'} here" in capsys.readouterr().err
