"""The house guards itself: which room may import which, and who may know MPI, HDF5, LMDB, mmap or the environment.

A room is a file or a folder directly below pario/. Imports go only down the floors; rooms of one floor are strangers.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pario

HOUSE = Path(pario.__file__).parent
FACE = "__init__"  # names of all rooms, loaded on first use; only the rooms of the top floor look at it
FLOORS = [
    {"errors", "machine", "records", "words"},
    {"options", "kernels", "buffers", "stats"},
    {"format", "comm", "checkpoint"},
    {"fetch"},
    {"plan", "decode"},
    {"locate"},
    {"feed", "own", "reader", "lmdb"},
    {"assemble", "loop", "scout", "tune"},
    {"loader"},
    {"study"},
    {"commands", "demo"},
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
SAME = {"cli": "commands", "__main__": "commands"}  # the command line is one room
TOP = FLOORS[-1]
#: downward, and still not theirs: plan and decode are arithmetic on numbers and bytes, fetch knows no tree
STRANGERS = {
    "comm": {"format", "fetch"},
    "fetch": {"format", "comm", "checkpoint"},
    "plan": {"format", "comm", "fetch", "checkpoint", "buffers"},
    "decode": {"format", "comm", "fetch", "checkpoint"},
    "lmdb": {"comm", "checkpoint"},
}

#: what only some files may know: module -> files or folders
KNOWN_TO = {
    "mpi4py": ("comm/", "demo/"),
    "h5py": ("locate/index.py", "commands/"),
    "lmdb": ("commands/", "demo/", "study/sets.py", "lmdb/real.py"),
    "mmap": ("fetch/mapped.py", "study/requests.py"),
    "matplotlib": ("study/plots.py",),
    "torch": ("demo/",),
    "prometheus_client": ("stats/prometheus.py",),
}
#: folders that show names of their own: pario.decode.Datum; `import pario.lmdb as lmdb`
FACES = ("decode/__init__.py", "lmdb/__init__.py")
ENVIRONMENT = ("kernels/jit.py", "comm/launcher.py", "locate/index.py", "study/jobs.py")
SCREEN = ("cli.py", "commands/", "demo/")

FILES = sorted(str(path.relative_to(HOUSE)) for path in HOUSE.rglob("*.py"))


def tree(name: str) -> ast.Module:
    return ast.parse((HOUSE / name).read_text(), name)


def room_of(name: str) -> str:
    room = Path(name).parts[0].removesuffix(".py")
    return SAME.get(room, room)


def imports(name: str) -> Iterator[tuple[str, str | None]]:
    """(module, name taken from it) of every import, also those inside functions and below TYPE_CHECKING."""
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno}: relative import"
            yield from ((node.module or "", alias.name) for alias in node.names)


def files_imported(name: str) -> Iterator[tuple[str, bool]]:
    """Files of the house that `name` imports, and whether it names the file itself (not a folder's __init__)."""
    for module, taken in imports(name):
        parts = module.split(".")
        if parts[0] != "pario":
            continue
        for place in ([*parts[1:], taken], parts[1:]) if taken else (parts[1:],):
            path = "/".join(place)
            if path and f"{path}.py" in FILES:
                yield f"{path}.py", True
                break
            if f"{path}/__init__.py".lstrip("/") in FILES:
                yield f"{path}/__init__.py".lstrip("/"), False
                break
        else:
            raise AssertionError(f"{name} imports {module}, {taken}: no such file in the house")


@pytest.mark.parametrize("name", [name for name in FILES if room_of(name) != FACE])
def test_imports_go_down(name: str) -> None:
    mine = room_of(name)
    assert mine in FLOOR, f"room {mine} has no floor: give it one here and in the README's picture"
    for other, is_file in files_imported(name):
        theirs = room_of(other)
        if theirs == FACE:
            assert mine in TOP, f"{name} imports the face of the house"
        elif theirs != mine:
            assert FLOOR[theirs] < FLOOR[mine], f"{name} (floor {FLOOR[mine]}) imports {other} (floor {FLOOR[theirs]})"
            assert theirs not in STRANGERS.get(mine, ()), f"{name} imports {other}: {mine} knows nothing of {theirs}"
            assert is_file or mine in TOP, f"{name} imports {other}: import the file, not the folder"


def test_no_circles() -> None:
    graph = {name: {other for other, _ in files_imported(name)} for name in FILES if name != f"{FACE}.py"}
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, f"circle: {' -> '.join([*way[way.index(name) :], name])}"
        if name not in done:
            for other in graph.get(name, ()):
                visit(other, (*way, name))
            done.add(name)

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize("name", FILES)
def test_who_knows_what(name: str) -> None:
    for module, _ in imports(name):
        allowed = KNOWN_TO.get(module.split(".")[0])
        assert allowed is None or name.startswith(allowed), f"{name} imports {module}; only {allowed} may"
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv"):
            assert name in ENVIRONMENT, f"{name}:{node.lineno} looks at the environment"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            assert name.startswith(SCREEN), f"{name}:{node.lineno} prints"


def test_folders_have_one_docstring() -> None:
    for name in FILES:
        if name.endswith("/__init__.py") and name not in FACES:
            body = tree(name).body
            assert len(body) == 1, f"{name} holds more than a docstring"
            assert ast.get_docstring(tree(name)), f"{name} has no docstring"


def test_tests_are_flat() -> None:
    """A tests/lmdb/ with an __init__.py would shadow the real lmdb."""
    here = Path(__file__).parent
    assert not list(here.rglob("__init__.py"))
    folders = {path.name for path in here.iterdir() if path.is_dir() and path.name[0] not in "._"}
    assert folders <= {"system", "data"}, folders
    names = [path.name for path in here.rglob("test_*.py")]
    assert len(names) == len(set(names)), "two test files of one name"


def test_face_shows_what_exists() -> None:
    for name in pario.__all__:
        getattr(pario, name)
    assert len(set(pario.__all__)) == len(pario.__all__)
    assert set(pario._HOMES) | {"__version__"} == set(pario.__all__)
    with pytest.raises(AttributeError):
        _ = pario.no_such_name


def python(*words: str) -> str:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def test_import_is_light() -> None:
    """`import pario` loads no MPI, compiler or HDF5, and costs at most 0.3 s."""
    loaded = set(python("-c", "import sys, pario; print(*sys.modules)").split())
    assert not loaded & {"mpi4py", "numba", "h5py", "lmdb", "click"}, loaded
    clock = "import time; t = time.perf_counter(); {}; print(time.perf_counter() - t)"
    # The best of several: what the machine does meanwhile only adds.
    cost = min(float(python("-c", clock.format("import pario"))) for _ in range(5))
    assert cost <= 0.3, f"import pario takes {cost:.3f} s"
