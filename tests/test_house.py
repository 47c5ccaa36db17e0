"""The house guards itself: which room may import which, who may know MPI, HDF5, LMDB, mmap or the environment, and how
large things may become.

A room is a file or a folder directly below pario/. Imports go only down the floors; rooms of one floor are strangers.
Every rule is a function of a `House`, so that the tests at the end can show it a house that breaks it.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from house import (
    File,
    House,
    arguments,
    class_checks,
    classes,
    functions,
    hidden_imports,
    imports,
    is_kernel,
    names,
)

import pario
import pario.lmdb
from pario.feed.choose import Way

HOUSE = House.at(Path(pario.__file__).parent)

FACE = "__init__"  # names of all rooms, loaded on first use; only the rooms of the top floor look at it
FLOORS = [
    {"notebook"},
    {"kernels", "errors", "machine", "records", "text"},
    {"threads", "codec"},
    {"wire"},
    {"options", "buffers", "stats", "format", "comm", "decode"},
    {"plan", "plane", "tune"},
    {"fetch"},
    {"locate", "tiers"},
    {"dataset", "checkpoint"},
    {"feed", "lmdb"},
    {"recipes"},
    {"loader", "packing", "files"},
    {"bench", "adapters"},
    {"commands", "demo"},
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS, 1) for room in rooms}
SAME = {"cli": "commands", "__main__": "commands"}  # the command line is one room
TOP = FLOORS[-1]
#: downward, and still not theirs: plan is arithmetic on numbers; py-lmdb's interface serves one process
STRANGERS = {
    "plan": {"format", "comm", "buffers"},
    "lmdb": {"comm", "dataset", "plan"},
}

#: what only some files may know: module -> files or folders
KNOWN_TO = {
    "mpi4py": ("comm/", "demo/"),
    "h5py": ("checkpoint/layout.py",),
    "lmdb": ("lmdb/real.py", "demo/", "packing/writer.py"),
    "mmap": (
        *("comm/memory.py", "fetch/mapped.py", "tiers/memory.py", "tiers/states.py"),
        "files/held.py",  # memory of its own, that large files are read into; never a dataset
    ),
    "matplotlib": (),
    "mfusepy": ("files/",),
    "torch": ("adapters/", "demo/"),
    "jax": ("adapters/", "demo/"),
    "tensorflow": ("adapters/", "demo/"),
    "lightning": ("adapters/",),
    "pytorch_lightning": ("adapters/",),
    "accelerate": ("adapters/",),
    # Benchmarks and tests know the package, never the other way.
    "benchmarks": (),
    "tests": (),
}
#: folders that show names of their own: pario.decode.Datum; `import pario.lmdb as lmdb`
FACES = ("decode/__init__.py", "lmdb/__init__.py")
ENVIRONMENT = (
    *("kernels/jit.py", "dataset/tiers.py", "lmdb/served.py", "comm/launcher.py", "locate/sidecar.py"),
    "plane/joining.py",
    "adapters/torch.py",  # tells torch.distributed its ranks, in the variables that it reads
    *("files/fuse.py", "files/database.py"),  # mfusepy takes the version of libfuse from a variable; PARIO_SERVICE
    "commands/run_service.py",  # what it starts is found through PARIO_SERVICE, by workers, too
)
SCREEN = ("cli.py", "commands/", "demo/")

#: runs the user's script, as Python itself would, or loads the decoder that the user names
RUNS_SCRIPTS = ("commands/run.py", "commands/decoder.py")
#: modules that a file starts in a process of their own, by name: nothing is imported
STARTED = {
    "commands/demo.py": {"pario.demo.train_digits"},
}

#: room -> classes of other rooms by which it checks what a user passed in; classes of errors may be asked for anywhere
USERS_ARGUMENTS = {
    "loader": {"Budget", "Options"},
}

LINES = 500
ARGUMENTS = 8
KERNEL_ARGUMENTS = 12
METHODS = 20
#: public constructors: keyword-only from the ninth argument on at the latest
CONSTRUCTORS = (
    *("loader Loader.__init__", "dataset Reader.__init__", "decode Image.__init__"),
    "checkpoint Checkpointer.__init__",
)
#: signatures that others have made
FOREIGN = {"lmdb Environment.__init__": "py-lmdb's"}
#: classes with more than METHODS methods, and why
LARGE = {
    "lmdb Cursor": "py-lmdb's interface",
    "lmdb Environment": "py-lmdb's interface",
    "loader Loader": "what users call, a few lines each",
    "plan Schedule": "steps, groups and ticks of an epoch, a line each, and the few that CutSchedule answers otherwise",
    "tiers MemoryTier": "a tier's contract, and what the process does besides that fills it",
}

#: what only goes down: code lines of the package, and files and code lines that the Loader's file loads
MOST_LINES = 44_971
#: The same of benchmarks/.
MOST_BENCHMARK_LINES = 14_000
LOADERS_FILES, LOADERS_LINES = 102, 13_099
#: options; sources and ways that the default chooses from; kinds of threads; private names that tests patch
MOST_OPTIONS, MOST_SOURCES, MOST_WAYS, MOST_THREAD_KINDS, MOST_PATCHES = 15, 2, 3, 20, 112

#: rule 10: these say nothing
NO_NAMES = {"place", "some"}


def room_of(file: File | str) -> str:
    room = (file if isinstance(file, File) else File(file, "")).room
    return SAME.get(room, room)


# -- the rules: each returns what breaks it, {key: what is wrong} ------------------------------------------------------


def arrows(house: House) -> dict[str, str]:
    """Imports that do not go down, lazy ones among them, and imports of what does not exist."""
    wrong = {}
    for file in house.files.values():
        mine = room_of(file)
        if mine != FACE and mine not in FLOOR:
            wrong[file.name] = f"room {mine} has no floor: give it one here and in docs/how-it-works.md"
            continue
        for other, said in house.imported(file):
            if other is None:
                wrong[f"{file.name} {said}"] = "no such file in the house"
                continue
            if mine == FACE or said in STARTED.get(file.name, ()):
                continue  # what the face shows is loaded when somebody asks for it
            theirs = room_of(other)
            why = ""
            if theirs == FACE:
                why = "" if mine in TOP else "only the top floor looks at the face of the house"
            elif theirs not in FLOOR:
                why = f"room {theirs} has no floor"
            elif theirs != mine:
                if FLOOR[theirs] >= FLOOR[mine]:
                    why = f"floor {FLOOR[mine]} imports floor {FLOOR[theirs]}"
                elif theirs in STRANGERS.get(mine, ()):
                    why = f"{mine} knows nothing of {theirs}"
                elif other.endswith("/__init__.py") and mine not in TOP:
                    why = "import the file, not the folder"
            if why:
                wrong[f"{file.name} -> {other}"] = why
    return wrong


def circles(house: House) -> dict[str, str]:
    graph = {
        name: [other for other, said in house.imported(file) if other and said not in STARTED.get(name, ())]
        for name, file in house.files.items()
    }
    wrong: dict[str, str] = {}
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        if name in way:
            wrong[name] = " -> ".join([*way[way.index(name) :], name])
        elif name not in done:
            for other in graph.get(name, ()):
                visit(other, (*way, name))
            done.add(name)

    for name in graph:
        visit(name, ())
    return wrong


def hidden(house: House) -> dict[str, str]:
    """Imports that cannot be read, relative ones, and changes of sys.path."""
    wrong = {}
    for file in house.files.values():
        if file.name not in RUNS_SCRIPTS:
            wrong |= {said: "the guard cannot read what this imports" for said in hidden_imports(file)}
        wrong |= {f"{file.name} {module}": "relative import" for module, _ in imports(file) if module.startswith(".")}
    return wrong


def outside(file: File) -> Iterator[tuple[str, int]]:
    """(what the file does to the world outside, line)"""
    for node in file.nodes:
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv"):
            yield "looks at the environment", node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield "prints", node.lineno


def known(house: House) -> dict[str, str]:
    """Modules, the environment and the screen, where they are nobody's business."""
    wrong = {}
    for file in house.files.values():
        for module, _ in imports(file):
            top = module.split(".")[0]
            if top in KNOWN_TO and not file.name.startswith(KNOWN_TO[top]):
                wrong[f"{file.name} knows {top}"] = f"only {', '.join(KNOWN_TO[top]) or 'nobody'} may"
        for what, line in outside(file):
            if not file.name.startswith(ENVIRONMENT if what == "looks at the environment" else SCREEN):
                wrong[f"{file.name} {what}"] = f"line {line}"
    return wrong


def asked_classes(house: House) -> dict[str, str]:
    """Checks for a class of another room, but for errors and users' arguments."""
    wrong = {}
    for file in house.files.values():
        for line, where, name in class_checks(house, file):
            if Path(where).stem != "errors" and name not in USERS_ARGUMENTS.get(room_of(file), ()):
                wrong[f"{room_of(file)} {name}"] = f"{file.name}:{line}: ask the object what it can do, not what it is"
    return wrong


def too_large(house: House) -> dict[str, str]:
    """Rule 6. Keys: a file, "room function" or "room Class"."""
    wrong = {}
    for file in house.files.values():
        lines = len(file.text.splitlines())
        if lines > LINES:
            wrong[file.name] = f"{lines} lines, {LINES} allowed"
        for name, function in functions(file):
            key, most = f"{room_of(file)} {name}", KERNEL_ARGUMENTS if is_kernel(function) else ARGUMENTS
            given, by_position = arguments(function)
            if key in CONSTRUCTORS:
                given = by_position
            if given > most and key not in FOREIGN:
                wrong[key] = f"{file.name}:{function.lineno}: {given} arguments, {most} allowed"
        for name, methods in classes(file):
            key = f"{room_of(file)} {name}"
            if methods > METHODS and key not in LARGE:
                wrong[key] = f"{file.name}: {methods} methods, {METHODS} allowed without a reason in LARGE"
    return wrong


def empty_names(house: House) -> dict[str, str]:
    return {
        f"{room_of(file)} {name}": f"{file.name}:{line}: say what it is"
        for file in house.files.values()
        for line, name in names(file)
        if name.strip("_").lower() in NO_NAMES
    }


RULES: dict[str, Callable[[House], dict[str, str]]] = {
    "arrows": arrows,
    "circles": circles,
    "hidden": hidden,
    "known": known,
    "classes": asked_classes,
    "large": too_large,
    "names": empty_names,
}


# -- the house keeps them ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_the_house_keeps(rule: str) -> None:
    wrong = RULES[rule](HOUSE)
    assert not wrong, "\n".join([f"{rule}:", *(f"  {key}: {why}" for key, why in sorted(wrong.items()))])


def test_the_house_does_not_grow() -> None:
    """Ratchets: whoever takes lines away lowers them."""
    assert sum(file.code_lines for file in HOUSE.files.values()) <= MOST_LINES
    loaded = python("-c", "import sys, pario.loader.loader; print(*sys.modules)").split()
    files = [HOUSE.files[HOUSE.file_of(name) or ""] for name in loaded if name.partition(".")[0] == "pario"]
    files = [file for file in files if file.code_lines]  # most folders have a docstring alone
    assert len(files) <= LOADERS_FILES, "\n".join(sorted(file.name for file in files))
    assert sum(file.code_lines for file in files) <= LOADERS_LINES


def test_the_benchmarks_neither_grow_nor_go_in_circles() -> None:
    house = House.at(Path(__file__).parent.parent / "benchmarks")
    assert sum(file.code_lines for file in house.files.values()) <= MOST_BENCHMARK_LINES
    assert circles(house) == {}
    bad = {"a.py": "from benchmarks import b", "b.py": "def late():\n    from benchmarks.a import x"}
    assert circles(House(bad, "benchmarks")), "a circle is not seen"


def test_the_ways_do_not_multiply() -> None:
    """Ratchets, too: what a stranger must know to follow a record, and what keeps a private name from being changed."""
    core = [file for file in HOUSE.files.values() if file.room not in ("bench", "commands")]
    bases = [
        each for file in core if file.room == "feed" for each in ast.walk(file.tree) if isinstance(each, ast.ClassDef)
    ]
    sources = [each.name for each in bases if any(isinstance(b, ast.Name) and b.id == "Source" for b in each.bases)]
    calls = [each for file in core for each in ast.walk(file.tree) if isinstance(each, ast.Call)]
    starts = ("start_thread", "Workers")
    threads = [each for each in calls if isinstance(each.func, ast.Name) and each.func.id in starts]
    inner = HOUSE.files["threads.py"]  # where pools start their threads: no kinds of their own
    threads = [each for each in threads if each not in inner.nodes or isinstance(each.args[0], ast.Constant)]
    named = [each.args[0].value for each in threads if isinstance(each.args[0], ast.Constant)]
    patched = re.compile(r"setattr\(.*[\"'.]_[a-z]", re.IGNORECASE)
    patches = [
        line
        for path in Path(__file__).parent.rglob("*.py")
        for line in path.read_text().splitlines()
        if patched.search(line)
    ]
    assert len(dataclasses.fields(pario.Options)) <= MOST_OPTIONS
    assert len(sources) <= MOST_SOURCES, sources
    assert len(Way) <= MOST_WAYS
    unnamed = [each for each in threads if not isinstance(each.args[0], ast.Constant)]
    assert len(named) + len(unnamed) <= MOST_THREAD_KINDS, named
    assert len(named) == len(set(named)), "two kinds of threads with one name"
    assert len(patches) <= MOST_PATCHES


def test_code_lines_are_counted() -> None:
    text = '"""Two\nlines."""\n\n# why\nx = """a\n\nb"""  # c\n\n\n'
    text += 'def f():\n    "One."\n    return (\n        x  # y\n    )\n'
    assert File("x.py", text).code_lines == 6


def test_exceptions_are_needed() -> None:
    """A table of exceptions only shrinks, too."""
    sizes = {f"{room_of(f)} {name}": arguments(one)[0] for f in HOUSE.files.values() for name, one in functions(f)}
    assert [name for name in (*CONSTRUCTORS, *FOREIGN) if sizes.get(name, 0) <= ARGUMENTS] == []
    large = {f"{room_of(f)} {name}" for f in HOUSE.files.values() for name, methods in classes(f) if methods > METHODS}
    assert LARGE.keys() <= large
    asked = {(room_of(f), name) for f in HOUSE.files.values() for _, _, name in class_checks(HOUSE, f)}
    assert {(room, name) for room, classes_ in USERS_ARGUMENTS.items() for name in classes_} <= asked
    assert all(list(hidden_imports(HOUSE.files[name])) for name in RUNS_SCRIPTS)
    assert all(said <= {module for _, module in HOUSE.imported(HOUSE.files[name])} for name, said in STARTED.items())


def test_folders_have_one_docstring() -> None:
    for name, file in HOUSE.files.items():
        if name.endswith("/__init__.py") and name not in FACES:
            assert len(file.tree.body) == 1, f"{name} holds more than a docstring"
            assert ast.get_docstring(file.tree), f"{name} has no docstring"


def test_tests_are_flat() -> None:
    """A tests/lmdb/ with an __init__.py would shadow the real lmdb."""
    here = Path(__file__).parent
    assert not list(here.rglob("__init__.py"))
    folders = {path.name for path in here.iterdir() if path.is_dir() and path.name[0] not in "._"}
    assert folders <= {"system", "data"}, folders
    names = [path.name for path in here.rglob("test_*.py")]
    assert len(names) == len(set(names)), "two test files of one name"


@pytest.mark.parametrize("face", [pario, pario.decode, pario.lmdb], ids=lambda face: face.__name__)
def test_faces_show_what_exists(face: Any) -> None:
    for name in face.__all__:
        getattr(face, name)
    assert len(set(face.__all__)) == len(face.__all__)
    assert set(face._HOMES) <= set(face.__all__)
    with pytest.raises(AttributeError):
        _ = face.no_such_name


@pytest.mark.parametrize("collects", [True, False])
def test_the_face_leaves_the_collector_as_it_was(collects: bool) -> None:
    say = "import gc; {}; import pario; pario.Options; print(gc.isenabled())"
    assert python("-c", say.format("gc.enable()" if collects else "gc.disable()")) == f"{collects}\n"


def test_the_face_is_lazy_as_a_whole() -> None:
    assert set(pario._HOMES) | {"__version__"} == set(pario.__all__)


def test_face_shows_every_error() -> None:
    from pario import errors

    classes = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert all(getattr(pario, name) is getattr(errors, name) for name in classes)
    assert classes <= set(pario.__all__)
    drawn = {word for word in (errors.__doc__ or "").split() if word.endswith("Error")}
    assert drawn == classes, "the tree at the head of pario/errors.py"


def python(*words: str) -> str:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def test_import_is_light() -> None:
    """`import pario` loads no MPI, compiler, HDF5 or framework, and costs at most 0.3 s."""
    loaded = set(python("-c", "import sys, pario; print(*sys.modules)").split())
    assert not loaded & {"mpi4py", "numba", "h5py", "lmdb", "click", "torch", "jax", "lightning"}, loaded
    clock = "import time; t = time.perf_counter(); {}; print(time.perf_counter() - t)"
    # The best of several: what the machine does meanwhile only adds.
    cost = min(float(python("-c", clock.format("import pario"))) for _ in range(5))
    assert cost <= 0.3, f"import pario takes {cost:.3f} s"


# -- the rules notice what breaks them ---------------------------------------------------------------------------------

#: a small house in which all is well
SOUND = {
    "__init__.py": '_HOMES = {"Loader": "pario.loader.loader"}\n'
    "def __getattr__(name):\n    home = _HOMES.get(name)\n    return getattr(importlib.import_module(home), name)\n",
    "errors.py": "class BadError(Exception): ...\n",
    "fetch/__init__.py": '"""Bytes."""\n',
    "fetch/posix.py": "from pario.errors import BadError\nclass PosixFetcher: ...\n",
    "plan/__init__.py": '"""Numbers."""\n',
    "plan/epoch.py": "import numpy\n",
    "loader/__init__.py": '"""Loops."""\n',
    "loader/loader.py": "from pario.errors import BadError\nfrom pario.fetch.posix import PosixFetcher\n"
    "def known(e):\n    return isinstance(e, BadError)\n",
    "commands/run.py": "import sys\nsys.path[0] = ''\nexec(code)\n",
}

BREAKS = [
    ("arrows", "plan/epoch.py", "from pario.loader import loader"),
    ("arrows", "plan/epoch.py", "def later():\n    import pario.fetch.posix"),
    ("arrows", "plan/epoch.py", "if TYPE_CHECKING:\n    from pario.fetch.posix import PosixFetcher"),
    ("arrows", "plan/epoch.py", "importlib.import_module('pario.fetch.posix')"),
    ("arrows", "plan/epoch.py", "_LATER = {'Loader': 'pario.loader.loader'}"),
    ("arrows", "plan/epoch.py", "sys.modules['pario.loader.loader']"),
    ("arrows", "plan/epoch.py", "from pario.kernels import nothing"),
    ("arrows", "loader/loader.py", "import pario.fetch"),
    ("arrows", "loader/loader.py", "from pario import Loader"),
    ("arrows", "cellar.py", "import os"),
    ("circles", "fetch/posix.py", "from pario.loader.loader import known"),
    ("circles", "errors.py", "import pario"),
    ("circles", "plan/epoch.py", "def later():\n    importlib.import_module('pario.plan.epoch')"),
    ("hidden", "plan/epoch.py", "importlib.import_module(name)"),
    ("hidden", "plan/epoch.py", "def f(home):\n    importlib.import_module(home)"),
    ("hidden", "plan/epoch.py", "T = {'a': 'b'}\ndef f(x):\n    h = T[x]\n    h = x\n    importlib.import_module(h)"),
    ("hidden", "plan/epoch.py", "T = {'a': x + 'b'}\ndef f(x):\n    importlib.import_module(T[x])"),
    ("hidden", "plan/epoch.py", "T = {**dict.fromkeys(x, x)}\ndef f(x):\n    importlib.import_module(T[x])"),
    ("hidden", "plan/epoch.py", "load = importlib.import_module"),
    ("hidden", "plan/epoch.py", "from importlib import import_module as load"),
    ("hidden", "plan/epoch.py", "import importlib as i"),
    ("hidden", "plan/epoch.py", "import sys as s"),
    ("hidden", "plan/epoch.py", "from sys import path"),
    ("hidden", "plan/epoch.py", "__import__('pario.loader.loader')"),
    ("hidden", "plan/epoch.py", "importlib.util.spec_from_file_location('a', 'b')"),
    ("hidden", "plan/epoch.py", "runpy.run_path('b')"),
    ("hidden", "plan/epoch.py", "exec('import pario')"),
    ("hidden", "plan/epoch.py", "sys.path.append('b')"),
    ("hidden", "plan/epoch.py", "from . import epoch"),
    ("known", "plan/epoch.py", "import mpi4py.MPI"),
    ("known", "plan/epoch.py", "from mpi4py import MPI"),
    ("known", "plan/epoch.py", "importlib.import_module('h5py')"),
    ("known", "plan/epoch.py", "import benchmarks.data"),
    ("known", "plan/epoch.py", "os.environ.get('HOME')"),
    ("known", "plan/epoch.py", "os.getenv('HOME')"),
    ("known", "plan/epoch.py", "print('here')"),
    ("classes", "loader/loader.py", "isinstance(f, PosixFetcher)"),
    ("classes", "loader/loader.py", "isinstance(f, (int, PosixFetcher))"),
    ("classes", "loader/loader.py", "isinstance(f, PosixFetcher | None)"),
    ("classes", "loader/loader.py", "issubclass(f, PosixFetcher)"),
    ("classes", "loader/loader.py", "type(f) is not PosixFetcher"),
    ("classes", "loader/loader.py", "f.__class__ == PosixFetcher"),
    ("classes", "loader/loader.py", "type(f) in (int, PosixFetcher)"),
    ("classes", "loader/loader.py", "match f:\n    case PosixFetcher():\n        pass"),
    ("classes", "loader/loader.py", "from pario.fetch import posix\nisinstance(f, posix.PosixFetcher)"),
    ("large", "plan/epoch.py", "x = 1\n" * 500),
    ("large", "plan/epoch.py", "def f(a, b, c, d, e, f, g, h, i): ..."),
    ("large", "plan/epoch.py", "def f(a, b, c, d, e, /, f, *, g, h, **i): ..."),
    ("large", "plan/epoch.py", "class C:\n    def f(self, a, b, c, d, e, f, g, h, i): ..."),
    ("large", "plan/epoch.py", "def f():\n    def inside(a, b, c, d, e, f, g, h, *i): ..."),
    ("large", "plan/epoch.py", "@kernel\ndef f(a, b, c, d, e, f, g, h, i, j, k, l, m): ..."),
    ("large", "loader/loader.py", "class Loader:\n    def __init__(self, a, b, c, d, e, f, g, h, i): ..."),
    ("large", "plan/epoch.py", "class C:\n" + "".join(f"    def f{k}(self): ...\n" for k in range(21))),
    ("names", "plan/epoch.py", "place = 1"),
    ("names", "plan/epoch.py", "def f(some): ..."),
    ("names", "plan/epoch.py", "class Place: ..."),
    ("names", "plan/epoch.py", "class C:\n    def f(self):\n        self._place = 1"),
]

KEEPS = [
    ("hidden", "plan/epoch.py", "importlib.import_module('numpy')"),
    ("hidden", "plan/epoch.py", "T = {'a': 'numpy'}\ndef f(x):\n    importlib.import_module(T[x])"),
    ("hidden", "plan/epoch.py", "T = {**dict.fromkeys(x, 'numpy')}\ndef f(x):\n    importlib.import_module(T[x])"),
    ("known", "comm/world.py", "from mpi4py import MPI"),
    ("classes", "fetch/direct.py", "from pario.fetch.posix import PosixFetcher\nisinstance(f, PosixFetcher)"),
    ("classes", "loader/loader.py", "f is PosixFetcher"),
    ("large", "plan/epoch.py", "x = 1\n" * 498),
    ("large", "plan/epoch.py", "def f(a, b, c, d, e, f, g, h): ..."),
    ("large", "plan/epoch.py", "class C:\n    def f(self, a, b, c, d, e, f, g, h): ..."),
    ("large", "plan/epoch.py", "@kernel(cache=True)\ndef f(a, b, c, d, e, f, g, h, i, j, k, l): ..."),
    ("large", "loader/loader.py", "class Loader:\n    def __init__(self, a, b, *, c, d, e, f, g, h, i): ..."),
    ("large", "plan/epoch.py", "class C:\n" + "".join(f"    def f{k}(self): ...\n" for k in range(20))),
    ("names", "plan/epoch.py", "print(place, some.place)"),
]


def changed(name: str, text: str) -> House:
    return House(SOUND | {name: SOUND.get(name, "") + text + "\n"})


def test_a_sound_house_breaks_nothing() -> None:
    for rule in RULES.values():
        assert rule(House(SOUND)) == {}


@pytest.mark.parametrize(("rule", "name", "text"), BREAKS)
def test_a_broken_rule_is_noticed(rule: str, name: str, text: str) -> None:
    assert RULES[rule](changed(name, text))


@pytest.mark.parametrize(("rule", "name", "text"), KEEPS)
def test_a_kept_rule_is_not_held_against_anybody(rule: str, name: str, text: str) -> None:
    assert RULES[rule](changed(name, text)) == {}
