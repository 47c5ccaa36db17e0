"""The commands in the bash blocks of the documentation: docs_shim.py NAME ARGUMENTS... instead of NAME ARGUMENTS...

python runs what it is given, or only parses it (docs_blocks.PARSED); mpiexec and srun start two ranks at most; what no
machine has is checked for its form. Anything unknown is an error.
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

from docs_blocks import PARSED, ROOT

MOST_RANKS = 2
#: Packages that pages install besides pario.
PACKAGES = {"torch"}

_SRUN = re.compile(r"-N|-n|--(ntasks-per-node|nodes|cpus-per-task|mpi|overlap|ntasks)")


def place(folder: Path) -> None:
    """Make a folder of these commands, for PATH."""
    folder.mkdir(parents=True)
    for name in COMMANDS:
        file = folder / name
        file.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" {name} "$@"\n')
        file.chmod(0o755)


def wrong(why: str) -> NoReturn:
    sys.exit(f"docs_shim: {why}")


def python(words: list[str]) -> NoReturn:
    if words[:2] == ["-m", "venv"]:
        fake_environment(Path(words[2]))
    if words[:2] == ["-m", "pip"]:
        pip(words[2:])
    said = " ".join(["python", *words])
    if any(said.startswith(command) for command in PARSED):
        parse(words)
    os.execv(sys.executable, [sys.executable, *words])


def parse(words: list[str]) -> NoReturn:
    """Read the arguments as the program does, and end before it begins."""
    module = words[1]
    parsed: list[bool] = []
    sys.path.insert(0, str(ROOT))
    if module in ("pario", "benchmarks.micro"):
        import click

        if module == "pario":
            from pario.commands.app import group
        else:
            from benchmarks.micro.__main__ import group

        def count(command: click.Command, context: click.Context) -> None:
            parsed.append(command is not group)

        click.Command.invoke = count  # type: ignore[method-assign,assignment]
        group.main(args=words[2:], standalone_mode=False)
        sys.exit(0 if any(parsed) else 1)

    read = argparse.ArgumentParser.parse_args

    def read_and_stop(self: argparse.ArgumentParser, *args: Any, **options: Any) -> Any:
        read(self, *args, **options)
        sys.exit(0)

    argparse.ArgumentParser.parse_args = read_and_stop  # type: ignore[method-assign,assignment]
    sys.argv = [module, *words[2:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    wrong(f"{module} parsed nothing")


def fake_environment(folder: Path) -> NoReturn:
    """What `python -m venv` makes, with these commands in it."""
    place(folder / "bin")
    (folder / "bin" / "activate").write_text(f'PATH="$PWD/{folder}/bin:$PATH"\n')
    sys.exit(0)


def pip(words: list[str]) -> NoReturn:
    """The packages are known, and pario has the extras."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    if words[0] != "install":
        wrong(f"pip {words[0]}")
    for word in words[1:]:
        if word in ("-q", "-e") or word in PACKAGES:
            continue
        found = re.fullmatch(r"(?:\.|pario)(?:\[([\w,-]+)\])?", word)
        if found is None:
            wrong(f"pip install {word}")
        missing = set((found[1] or "").split(",")) - {"", *extras}
        if missing:
            wrong(f"pario has no extra {', '.join(sorted(missing))}")
    sys.exit(0)


def mpiexec(words: list[str]) -> NoReturn:
    if words[0] != "-n":
        wrong(f"mpiexec {words[0]}")
    launch(int(words[1]), words[2:])


def launch(ranks: int, command: list[str]) -> NoReturn:
    from launch import POLITE, is_open_mpi
    from launch import mpiexec as launcher

    program = launcher()
    options = ["--oversubscribe", "--allow-run-as-root"] if is_open_mpi(program) else []
    os.environ.update(POLITE)
    os.execv(program, [program, *options, "-n", str(min(ranks, MOST_RANKS)), *command])


def srun(words: list[str]) -> NoReturn:
    ranks = MOST_RANKS
    while words[0].startswith("-"):
        option, _, value = words.pop(0).partition("=")
        if not _SRUN.fullmatch(option):
            wrong(f"srun {option}")
        if option in ("-N", "-n"):
            value = words.pop(0)
        if (option, value) == ("--ntasks-per-node", "1"):
            ranks = 1
    if ranks == 1:
        os.execvp(words[0], words)
    launch(ranks, words)


def sbatch(words: list[str]) -> NoReturn:
    text = Path(words[0]).read_text()
    if not re.search(r"(?m)^#SBATCH --nodes=\d+", text):
        wrong(f"{words[0]} asks for no nodes")
    sys.exit(subprocess.run(["bash", "-n", words[0]], check=False).returncode)


def torchrun(words: list[str]) -> NoReturn:
    if words[0] == "--no-python":
        os.execvp(words[1], words[1:])
    if words[0] != "--nproc-per-node" or not words[1].isdigit():
        wrong(f"torchrun {words[0]}")
    os.execv(sys.executable, [sys.executable, *words[2:]])


def apptainer(words: list[str]) -> NoReturn:
    if words[0] == "build":
        sys.exit(0 if words[1] == "pario.sif" and (ROOT / words[2]).is_file() else 1)
    inside = contained(words[1:], {"--bind": True}, "pario.sif") if words[0] == "exec" else wrong(words[0])
    os.execvp(inside[0], inside)


def docker(words: list[str]) -> NoReturn:
    inside = contained(words[1:], {"--rm": False, "-v": True, "--shm-size": False}, "pario")
    os.execvp(inside[0], inside)


def contained(words: list[str], options: dict[str, bool], image: str) -> list[str]:
    """The command behind the options (True: with a value in the next word) and the image."""
    while words[0].startswith("-"):
        option = words.pop(0).partition("=")[0]
        if option not in options:
            wrong(option)
        if options[option]:
            words.pop(0)
    if words[0] != image:
        wrong(words[0])
    return words[1:]


COMMANDS = {
    "python": python, "python3": python, "pip": pip, "mpiexec": mpiexec, "mpirun": mpiexec, "srun": srun,
    "sbatch": sbatch, "torchrun": torchrun, "apptainer": apptainer, "docker": docker,
}  # fmt: skip


if __name__ == "__main__":
    COMMANDS[sys.argv[1]](sys.argv[2:])
