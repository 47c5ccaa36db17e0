"""`jobscript`: writes a Slurm job script from a template in pario/jobscripts/, with its numbers and knobs filled in."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

import click

from pario.commands.screen import screen

#: the example that a template runs if the user names no script
_LESSONS = dict.fromkeys(("train", "train_staged", "job_array", "shared_store"), "train_ddp")
_LESSONS["train_requeue"] = "train_requeue"
_KNOB = re.compile(r"^([A-Z_]+)=(?:\$\{\1:-(?P<default>.*?)\}|(?P<list>\(.*?\)))(?P<rest> *#.*)?$", re.MULTILINE)


def names() -> list[str]:
    """The names of all templates."""
    return sorted(path.name.removesuffix(".slurm") for path in _folder().iterdir() if path.name.endswith(".slurm"))


def template(name: str) -> str:
    return (_folder() / f"{name}.slurm").read_text()


def knobs(text: str) -> dict[str, str]:
    """Name and line of each knob of a template."""
    return {found[1]: found[0] for found in _KNOB.finditer(text)}


def fill(text: str, sbatch: Mapping[str, str], values: Mapping[str, str]) -> str:
    """A template with `#SBATCH --NAME=VALUE` lines and knobs set; a line that is commented out by ## is activated.

    Raises KeyError for a name that the template does not have.
    """
    for name, value in sbatch.items():
        match = re.search(rf"^##?SBATCH --{re.escape(name)}=\S* *(#.*)?$", text, re.MULTILINE)
        if match is None:
            raise KeyError(f"--{name}")
        before, found, after = text[: match.start()], match[1] or "", text[match.end() :]
        text = f"{before}#SBATCH --{name}={shlex.quote(value)}  {found}".rstrip() + after
    for name, value in values.items():

        def filled(m: re.Match[str], name: str = name, value: str = value) -> str:
            if m[1] != name:
                return m[0]
            if m["list"] is not None:
                return f"{name}=({' '.join(_quoted(word) for word in shlex.split(value))}){m['rest'] or ''}"
            return f"{name}=${{{name}:-{_quoted(value)}}}{m['rest'] or ''}"

        if name not in knobs(text):
            raise KeyError(name)
        text = _KNOB.sub(filled, text)
    return text


@click.command()
@click.argument("name", required=False)
@click.option("--nodes", metavar="N", help="Nodes.")
@click.option("--ntasks-per-node", metavar="N", help="Ranks per node.")
@click.option("--cpus-per-task", metavar="N", help="Cores per rank.")
@click.option("--time", metavar="HH:MM:SS", help="Time limit.")
@click.option("--partition", metavar="NAME", help="Partition of the cluster.")
@click.option("--account", metavar="NAME", help="Account that pays.")
@click.option("--gpus-per-task", metavar="N", help="Accelerators per rank.")
@click.option("--array", metavar="RANGE", help="For job_array, for example 0-19%4.")
@click.option("--signal", metavar="B:USR1@SECONDS", help="For train_requeue: how long before the limit to save.")
@click.option("--data", metavar="PATH", help="The LMDB.")
@click.option("--script", metavar="FILE", help="Your training script. Default: a copy of one of pario's examples.")
@click.option("--set", "others", metavar="KNOB=VALUE", multiple=True, help="Any other knob of the template.")
@click.option("-o", "--output", metavar="FILE", help="Output file. Default: NAME.slurm; - for standard output.")
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
def jobscript(
    name: str | None,
    data: str | None,
    script: str | None,
    others: tuple[str, ...],
    output: str | None,
    force: bool,
    **sbatch: str | None,
) -> int:
    """Write a filled-in Slurm job script.

    Without NAME, list the templates.

    \b
    Examples:
      python -m pario jobscript
      python -m pario jobscript train --nodes 4 --ntasks-per-node 4 --time 04:00:00 --data /scratch/train.lmdb
      python -m pario jobscript train --script train.py --set LAUNCHER=mpiexec --set "ARGUMENTS=--epochs 90"
    """
    if name is not None and name not in names():
        raise click.BadParameter(f"{name!r} is none of {', '.join(names())}", param_hint="NAME")
    values = {}
    for one in others:
        knob, given, value = one.partition("=")
        if not given:
            raise click.BadParameter(f"{one!r} is not KNOB=VALUE", param_hint="--set")
        values[knob] = value
    if name is None:
        screen.say("Templates of Slurm job scripts:\n")
        for one in names():
            screen.say(f"  {one:<16}{_first_sentence(template(one))}")
        screen.say("\nWrite one out:  python -m pario jobscript NAME --nodes 4 --ntasks-per-node 4 --data train.lmdb")
        return 0
    values |= {knob: value for knob, value in (("DATA", data), ("SCRIPT", script)) if value is not None}
    lines = {option.replace("_", "-"): value for option, value in sbatch.items() if value is not None}
    return _write(name, lines, values, output, force)


def _write(name: str, sbatch: Mapping[str, str], values: dict[str, str], output: str | None, force: bool) -> int:
    """Fills a template, and writes it out with the script that it runs. Exit status."""
    text = template(name)
    values.setdefault("VENV", sys.prefix)
    if "DATA" in values:
        values["DATA"] = str(Path(values["DATA"]).absolute())
    script = None if output == "-" else Path(output or f"{name}.slurm")
    if script is not None and script.exists() and not force:
        return screen.refuse(f"{script} exists already: name another file with --output, or replace it with --force")
    if script is not None and not script.parent.is_dir():
        return screen.refuse(f"there is no directory {script.parent}")
    lesson = _LESSONS.get(name)
    copied: Path | None = None
    if lesson and "SCRIPT" not in values:
        if script is not None:
            copied = script.parent / f"{lesson}.py"
            values["SCRIPT"] = str(copied.absolute())
        else:
            values["SCRIPT"] = str(files("pario") / "demo" / f"{lesson}.py")
    elif "SCRIPT" in values and lesson:
        values["SCRIPT"] = str(Path(values["SCRIPT"]).absolute())
        # Those of the template are the example's.
        values.setdefault("ARGUMENTS", "")
    try:
        text = fill(text, sbatch, values)
    except KeyError as e:
        return screen.refuse(f"{name} has no {e.args[0]}; its knobs are {', '.join(knobs(text))}")
    for knob in ("DATA", "SCRIPT") if copied is None else ("DATA",):  # the copy is made below
        if knob in values and "$" not in values[knob] and not Path(values[knob]).exists():
            screen.note(f"note: there is no {values[knob]} here; the job needs it on its nodes")
    if script is None:
        screen.say(text.rstrip("\n"))
        return 0
    script.write_text(text)
    script.chmod(0o755)
    screen.say(f"{script}: read it, change what your site needs, then  sbatch {shlex.quote(str(script))}")
    if lesson and copied is None and not values["ARGUMENTS"]:
        screen.say(f"{values['SCRIPT']} gets no arguments; --set 'ARGUMENTS=--data $DATA' passes the dataset")
    if copied is not None:
        kept = copied.exists()
        if not kept:
            copied.write_text((files("pario") / "demo" / f"{lesson}.py").read_text())
        screen.say(f"{copied}: the script that it runs{', kept as it was' if kept else ''}; --script FILE takes yours")
    return 0


def _folder():  # type: ignore[no-untyped-def]  # importlib's Traversable has another home in each Python version
    return files("pario") / "jobscripts"


def _first_sentence(text: str) -> str:
    """The first sentence of the comment below the #SBATCH lines."""
    words = text.split("\n#\n", 1)[1].split("\n#\n", 1)[0].split("\nset ", 1)[0]
    said = " ".join(line.lstrip("# ") for line in words.splitlines())
    return re.split(r"(?<=[.?:]) ", said)[0].rstrip(":")


def _quoted(word: str) -> str:
    """A word quoted for bash; references to variables stay unquoted."""
    return f'"{word}"' if re.search(r"\$\w|\$\{", word) and '"' not in word else shlex.quote(word)
