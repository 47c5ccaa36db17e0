"""The commands as a tree: names, help texts, examples, JSON, old names, completion. The oracles are click's own view of
the tree, bash, and what py-lmdb says about the files."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import lmdb
import numpy as np
import pytest

import pario
from pario.cli import main
from pario.commands.app import group
from pario.commands.screen import screen
from pario.errors import ParioError

ROOT = Path(__file__).parents[1]
N = 30
TREE = {
    "data": "checksum choose head index info pack unpack verify",
    "tiers": "clean list serve stage verify",
    "bench": "run",
    "checkpoint": "export import list prune restore-to-npz verify",
    "plane": "serve status",
    "files": "mount view",
    "": "advise completion demo doctor jobscript run trace",
}
#: what reads nothing: it serves until it is interrupted, runs a program, or writes what it was told to
NO_JSON = {
    "run", "trace", "demo", "jobscript", "completion", "tiers serve", "plane serve", "files mount", "files view",
    "checkpoint export", "checkpoint import", "checkpoint restore-to-npz",
}  # fmt: skip


def walk(command: click.Command, words: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    for name, each in getattr(command, "commands", {}).items():
        if isinstance(each, click.Group):
            yield from walk(each, (*words, name))
        else:
            yield " ".join([*words, name]), each


COMMANDS = dict(walk(group))

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    def run(*words: object) -> tuple[int, str, str]:
        try:
            status = main([str(word) for word in words])
        except ParioError as e:
            sys.excepthook(type(e), e, e.__traceback__)
            status = 1
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with lmdb.open(str(tmp_path / "set"), map_size=1 << 22) as env, env.begin(write=True) as txn:
        for i in range(N):
            txn.put(b"%04d" % i, b"some text %d" % i)
    return tmp_path / "set"


# -- help ------------------------------------------------------------------------------------------------------------


def test_every_command_is_where_it_belongs() -> None:
    expected = {f"{room} {name}".strip() for room, names in TREE.items() for name in names.split()}
    assert set(COMMANDS) == expected


@pytest.mark.parametrize("name", COMMANDS)
def test_help_texts_are_sentences(name: str) -> None:
    command = COMMANDS[name]
    for text in (command.help, *(each.help for each in command.params if isinstance(each, click.Option))):
        hidden = [each for each in command.params if isinstance(each, click.Option) and each.hidden]
        if text is None and hidden:
            continue
        assert text, f"{name}: an option without a help text"
        first = re.sub(r"  \[.*\]$", "", text.strip().splitlines()[0])
        assert re.match(r'[A-Z"]', first), f"{name}: {first}"
        assert not re.match(r"(That|Of|In|Who|As) ", first), f"{name}: {first!r} lacks its noun"
        assert re.search(r"[.:)]$", first) or "\n" in text.strip(), f"{name}: {first}"


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {"plane status"}))  # it has that of `plane serve`
def test_examples_are_well_formed(name: str) -> None:
    """Their commands exist, and their options are those of the command."""
    examples = re.findall(r"(?:-m |\(|^ *)pario ([a-z].*)", COMMANDS[name].help or "", re.MULTILINE)
    assert examples
    for example in examples:
        words = shlex.split(example.split(" --  ")[0].rstrip("&").replace('")', ""), posix=False)
        said = next(many for k in (2, 1) if (many := " ".join(words[:k])) in COMMANDS)
        known = {option for each in COMMANDS[said].params for option in each.opts}
        if said in ("run", "trace", "files view"):  # the script's own follow
            words = words[: next((k for k, word in enumerate(words) if word.endswith(".py") or word == "--"), None)]
        assert {word for word in words if word.startswith("-") and word != "--"} <= known


# -- JSON --------------------------------------------------------------------------------------------------------------


def test_what_reads_prints_json() -> None:
    with_json = {name for name, command in COMMANDS.items() if any("--json" in each.opts for each in command.params)}
    assert with_json == COMMANDS.keys() - NO_JSON


def one_line(found: tuple[int, str, str], status: int = 0) -> dict[str, object]:
    assert (found[0], found[2]) == (status, "")
    assert found[1].count("\n") == 1
    told = json.loads(found[1])
    assert isinstance(told, dict)
    return told


def test_the_facts_of_data(call: Call, path: Path, tmp_path: Path) -> None:
    with lmdb.open(str(path), readonly=True, lock=False) as env, env.begin() as txn:
        items, stat = list(txn.cursor()), env.stat()
    total = sum(len(value) for _, value in items)
    told = one_line(call("data", "info", path, "--json"))
    assert (told["records"], told["value_bytes"], told["index"]) == (N, total, None)
    names = ("depth", "branch_pages", "leaf_pages", "overflow_pages")
    (main_,) = told["databases"]
    assert {name: main_[name] for name in names} == {name: stat[name] for name in names}
    assert "pario.Loader(" in told["lines"][0]
    told = one_line(call("data", "head", path, "-n", "2", "--json"))
    assert [(each["id"], each["key"], each["bytes"]) for each in told["records"][:2]] == [
        (i, key.decode(), len(value)) for i, (key, value) in enumerate(items[:2])
    ]
    told = one_line(call("data", "index", path, "--json"))
    assert (told["records"], Path(told["index"]).exists()) == (N, True)
    assert one_line(call("data", "checksum", path, "--json"))["records"] == N
    told = one_line(call("data", "verify", path, "--json"))
    assert (told["damaged"], told["faults"]) == (0, [])
    assert told["databases"] == [{"name": None, "records": N, "value_bytes": total, "damaged": 0}]
    packed = tmp_path / "packed.lmdb"
    told = one_line(call("data", "pack", path, packed, "--codec", "deflate:1", "--json", "-q"))
    assert (told["records"], told["raw_bytes"]) == (N, total)
    assert one_line(call("data", "unpack", packed, tmp_path / "again", "--json"))["records"] == N
    file = path / "data.mdb"
    content, before = bytearray(file.read_bytes()), file.stat()
    content[content.index(b"some text 7")] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    told = one_line(call("data", "verify", path, "--json"), 1)
    assert (told["damaged"], len(told["faults"])) == (1, 1)
    assert "record 7" in told["faults"][0]


def test_the_facts_of_tiers_and_bench(call: Call, path: Path, tmp_path: Path) -> None:
    told = one_line(call("tiers", "stage", path, "--to", tmp_path / "disk", "--json"))
    assert told["held_bytes"] == told["wanted_bytes"] > 0
    (copy,) = one_line(call("tiers", "list", tmp_path / "disk", "--json"))["copies"]
    assert (copy["path"], copy["file_bytes"]) == (str(path / "data.mdb"), (path / "data.mdb").stat().st_size)
    assert one_line(call("tiers", "verify", tmp_path / "disk", "--json"))["damaged"] == 0
    told = one_line(call("tiers", "clean", tmp_path / "disk", "--json"))
    assert told["freed_bytes"] == copy["disk_bytes"]
    assert one_line(call("tiers", "list", tmp_path / "disk", "--json")) == {"copies": []}
    assert one_line(call("bench", "run", path, "--json"))["epochs"][0]["records"] == N


def test_the_facts_of_checkpoints(call: Call, tmp_path: Path) -> None:
    with pario.Checkpointer(comm="self", slow=str(tmp_path / "run")) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"w": np.ones(3)}).wait()
    found = one_line(call("checkpoint", "list", tmp_path / "run", "--json"))["checkpoints"]
    assert [(each["step"], each["bytes"], each["arrays"]) for each in found] == [(2, 24, 1), (1, 24, 1)]
    told = one_line(call("checkpoint", "verify", tmp_path / "run", "--json"))
    assert (told["damaged"], [each["damage"] for each in told["checkpoints"]]) == (0, [[], []])
    told = one_line(call("checkpoint", "prune", tmp_path / "run", "--keep", "1", "--json"))
    assert (told["deleted"], len(told["would_delete"]), told["kept"]) == ([], 1, 1)


# -- old names, -q, -v, completion -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "now"),
    [
        *((name, f"data {name}") for name in TREE["data"].split()),
        *((name, f"tiers {name}") for name in ("stage", "serve")),
        *((f"cache {name}", f"tiers {name}") for name in ("list", "verify", "clean")),
        *((name, f"files {name}") for name in ("view", "mount")),
        *(("bench --shuffle none x", "bench run"), ("bench x", "bench run")),
        *(("control", "plane serve"), ("control --rules x", "plane serve"), ("control status", "plane status")),
    ],
)
def test_old_names_go_on_and_say_the_new_one(old: str, now: str) -> None:
    context = click.Context(group)
    screen.begin(None)
    notes: list[str] = []
    note, screen.note = screen.note, notes.append  # type: ignore[method-assign]
    try:
        name, command, rest = group.resolve_command(context, old.split())
        while isinstance(command, click.Group):
            inner, command, rest = command.resolve_command(context, rest)
            name = f"{name} {inner}"
    finally:
        screen.note = note  # type: ignore[method-assign]
    assert command is COMMANDS[now]
    (said,) = notes
    assert f"`pario {now.removesuffix(old.split()[-1]).strip()}" in said or f"`pario {now}`" in said


def test_an_old_name_does_the_same(call: Call, path: Path) -> None:
    status, out, err = call("info", path)
    assert (status, out, "") == call("data", "info", path)
    assert err == "note: `pario info` is `pario data info` now; the old name goes with the next release\n"
    assert call("-q", "info", path)[2] == ""
    assert call("choose", path, "--iteration", "9", "--batch", "4", "--seconds", "0.01", "--json", "-q")[0] == 0


def test_quiet_and_verbose(call: Call, tmp_path: Path) -> None:
    status, out, err = call("data", "info", tmp_path / "none", "-v")
    assert (status, out) == (1, "")
    assert "Traceback" in err
    assert "MissingError" in err
    assert call("data", "info", tmp_path / "none")[2].count("\n") == 1


@pytest.mark.parametrize("name", ["threads", "overlap", "checkpoint"])
def test_what_has_left_the_package_is_named(call: Call, path: Path, tmp_path: Path, name: str) -> None:
    status, out, err = call("bench", name, "--json")
    assert (status, out, err.count("\n")) == (2, "", 1)
    (module,) = re.findall(rf"`python -m ([\w.]+) {name}`", err)
    assert (ROOT / module.replace(".", "/") / "__main__.py").exists()
    (tmp_path / name).symlink_to(path)  # a dataset may have that name
    assert one_line(call("-q", "bench", tmp_path / name, "--json"))["records"] == N
    assert one_line(call("bench", "run", tmp_path / name, "--json"))["records"] == N


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(call: Call, shell: str) -> None:
    status, out, _ = call("completion", shell)
    assert status == 0
    assert "_PARIO_COMPLETE" in out


def test_bash_completes_words_options_and_files(tmp_path: Path) -> None:
    """In bash itself, with `pario` as the script that pip makes."""
    pario_ = tmp_path / "pario"
    code = f"import sys; sys.argv[0] = {str(pario_)!r}; from pario.cli import main; sys.exit(main())"
    pario_.write_text(f"#!{sys.executable}\n{code}\n")
    pario_.chmod(0o755)
    (tmp_path / "train.lmdb").mkdir()
    asked = {"pario da": ["data"], "pario data ch": ["checksum", "choose"], "pario bench run --bat": ["--batch-size"]}
    lines = [f'eval "$({pario_} completion bash)"']
    for words in asked:
        count = len(words.split())
        lines.append(f"COMP_WORDS=({words}); COMP_CWORD={count - 1}; COMPREPLY=(); _pario_completion {pario_}")
        lines.append('echo "${COMPREPLY[*]}"')
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    script = "\n".join(lines)
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert [line.split() for line in done.stdout.splitlines()] == list(asked.values()), done.stderr
