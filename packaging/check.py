"""Is this tree ready to publish? It builds the sdist and the wheel, and installs them from nothing.

    python packaging/check.py                           # every Python from 3.10 on that this machine has
    python packaging/check.py --python ~/other/bin/python3.12 --dist dist

What it checks, on Linux with pip, and no package beside Python's own:

1. The sdist is built from a copy of the repository's files, and the wheel from the sdist, as pip does it; a wheel built
   straight from the copy holds the same bytes. The wheel has every file below pario/, its license and nothing else; the
   sdist has these, what the build needs, and no tests or docs. `twine check --strict` accepts both, and cffconvert
   accepts CITATION.cff. rattler-build renders the conda recipe. If the project has
   an address, the README's links are absolute.
2. For each Python: a new environment in an empty folder, with this wheel and nothing else of pario on the path.
   packaging/smoke.py imports every module and runs a loop without an MPI library, then the command line and the demo.
3. The same with the oldest releases of the required packages that pyproject.toml allows, in the oldest Python.

Two environments are tried at a time: pip and the compiler of the kernels keep one core busy each. Exit status 1 if
anything fails; a failure in one environment does not keep it from trying the others.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from email.parser import BytesParser
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OLDEST = (3, 10)
AT_ONCE = 2
#: what the sdist has besides the package and its own metadata
SOURCES = {"CHANGELOG.md", "CITATION.cff", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml"}
#: the wheel's own files
TOLD = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt"}
TOOLS = ["build>=1.2", "twine>=6.1", "cffconvert>=2.0", "py-rattler-build>=0.60"]
#: its first releases have no wheels and need the MPI library of the machine, so the newest is taken
NOT_OLDEST = {"mpi4py"}


class Failed(Exception):
    """A check that did not hold, with what there is to say about it."""


def run(*command: str | Path, cwd: Path, seconds: int = 300) -> str:
    """Run a command without the caller's Python settings; its output, or `Failed` with the end of it."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    env |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore", "PIP_NO_INPUT": "1"}
    # Kernels compiled by this check are not the user's, and it is to compile them itself.
    env |= {"PARIO_NUMBA_CACHE": str(cwd / "kernels"), "COLUMNS": "200"}
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words, cwd=cwd, env=env, timeout=seconds, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"{' '.join(words)}: no end after {seconds} s") from None
    if done.returncode != 0:
        raise Failed(f"{' '.join(words)}: status {done.returncode}\n{(done.stdout + done.stderr)[-4000:]}")
    return done.stdout


#: How often each end of a script that closes nothing is tried (tests/exits.py).
REPEATS = os.environ.get("PARIO_EXITS", "1")


# -- the two files ----------------------------------------------------------------------------------------------------


def copy_tree(target: Path) -> None:
    """The repository's files, committed or about to be, and nothing that an earlier build left behind."""
    list_files = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(list_files, capture_output=True, text=True, check=True).stdout
        names = [name for name in listed.split("\0") if name and (ROOT / name).is_file()]
    except (OSError, subprocess.CalledProcessError):  # no clone: an archive of one
        left = {"build", "dist", "__pycache__", ".venv", "pario.egg-info"}
        files = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
        names = [str(path) for path in files if not left.intersection(path.parts)]
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name)


def build(tools: Path, source: Path, work: Path) -> str:
    """Sdist and wheel in work/dist; a wheel made without the sdist must be the same."""
    out, again = work / "dist", work / "again"
    run(tools, "-m", "pip", "install", "-q", *TOOLS, cwd=work, seconds=600)
    run(tools, "-m", "build", "--sdist", "--outdir", out, source, cwd=work)
    sdist = only(out, "*.tar.gz")
    run(tools, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", out, sdist, cwd=work)
    run(tools, "-m", "build", "--wheel", "--outdir", again, source, cwd=work)
    wheel = only(out, "*.whl")
    a, b = unzipped(wheel), unzipped(only(again, "*.whl"))
    differ = sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))
    if differ:
        raise Failed(f"the wheel out of the sdist is not the one out of the tree: {', '.join(differ[:20])}")
    return f"{sdist.name}, {wheel.name}"


def only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


def unzipped(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}


def check_contents(source: Path, sdist: Path, wheel: Path) -> str:
    """Both files hold what they should, byte for byte."""
    package = {str(path.relative_to(source)) for path in (source / "pario").rglob("*") if path.is_file()}
    files = unzipped(wheel)
    names = {name for name in files if ".dist-info/" not in name}
    compare("the wheel", names, package)
    changed = [name for name in sorted(package) if files[name] != (source / name).read_bytes()]
    if changed:
        raise Failed(f"the wheel has other bytes in {', '.join(changed)}")
    compare("the wheel's dist-info", {name.split(".dist-info/")[1] for name in files.keys() - names}, TOLD)
    with tarfile.open(sdist) as archive:
        held = {member.name.split("/", 1)[1] for member in archive.getmembers() if member.isfile()}
    made = {"PKG-INFO", "setup.cfg", *(name for name in held if name.startswith("pario.egg-info/"))}
    compare("the sdist", held, package | SOURCES | made)
    sizes = [f"{path.stat().st_size / 1e6:.2f} MB" for path in (wheel, sdist)]
    return f"wheel: {len(files)} files, {sizes[0]}; sdist: {len(held)} files, {sizes[1]}"


def compare(where: str, found: set[str], expected: set[str]) -> None:
    if found != expected:
        lacks, more = sorted(expected - found), sorted(found - expected)
        raise Failed(f"{where} lacks {lacks[:20] or 'nothing'} and has {more[:20] or 'nothing'} too much")


def metadata_of(wheel: Path) -> Message:
    (data,) = (data for name, data in unzipped(wheel).items() if name.endswith(".dist-info/METADATA"))
    return BytesParser().parsebytes(data)


def check_links(told: Message) -> str:
    """Once the project has an address, no link of the README is relative: an index page would lead nowhere."""
    relative = re.findall(r"\]\((?!https?://|#)([^)\s]+)\)", str(told.get_payload()))
    if not told.get_all("Project-URL"):
        return f"no address yet: before a release set [project.urls], and put it before {len(relative)} README links"
    if relative:
        raise Failed(f"links of README.md lead nowhere on a package index: {', '.join(relative[:5])}")
    return "all absolute"


def claimed(told: Message) -> set[str]:
    """The minor versions of Python that the classifiers name."""
    prefix = "Programming Language :: Python :: "
    words = {line.removeprefix(prefix) for line in told.get_all("Classifier", []) if line.startswith(prefix)}
    return {word for word in words if re.fullmatch(r"3\.\d+", word)}


# -- environments -----------------------------------------------------------------------------------------------------


def interpreters(given: list[Path]) -> dict[tuple[int, int], Path]:
    """The newest release of each minor version of Python from OLDEST on that can make environments."""
    found: dict[tuple[int, int], tuple[int, Path]] = {}
    # One without the global lock is another Python, for which numba has no wheels.
    ask = "import sys, venv, ensurepip; print(*sys.version_info[:3], sys.implementation.name, "
    ask += "getattr(sys, '_is_gil_enabled', lambda: True)())"
    for path in dict.fromkeys(given or candidates()):
        try:
            said = run(path, "-I", "-c", ask, cwd=Path("/"), seconds=60).split()
        except (Failed, OSError) as e:
            print(f"left out: {path} makes no environments: {str(e).strip().splitlines()[-1]}")
            continue
        major, minor, patch = map(int, said[:3])
        if (major, minor) < OLDEST or said[3:] != ["cpython", "True"]:
            print(f"left out: {path} is {said[3]} {'.'.join(said[:3])}")
        elif (patch, path) > found.get((major, minor), (-1, path)):
            found[major, minor] = (patch, path)
    return {version: path for version, (_, path) in sorted(found.items())}


def candidates() -> Iterator[Path]:
    """Interpreters on the PATH, and what pyenv keeps in its folder."""
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    yield from sorted(pyenv.glob("versions/3.*/bin/python3"))
    for minor in range(OLDEST[1], 20):
        path = shutil.which(f"python3.{minor}")
        if path and pyenv not in Path(path).parents:  # pyenv's shims say nothing about what there is
            yield Path(path).resolve()


def environment(python: Path, folder: Path) -> Path:
    """The interpreter of a new environment in the new `folder`."""
    folder.mkdir()
    run(python, "-I", "-m", "venv", folder / "venv", cwd=folder)
    return folder / "venv/bin/python"


def try_wheel(python: Path, wheel: Path, folder: Path, version: str, options: Iterable[str | Path] = ()) -> str:
    """Install the wheel in a new environment and use it there as its users do; what it has to say."""
    fresh = environment(python, folder)
    (empty := folder / "empty").mkdir()
    install = (fresh, "-I", "-m", "pip", "install", "-q", "--only-binary", ":all:", *options)
    smoke = (fresh, "-I", Path(__file__).with_name("smoke.py"))
    run(*install, wheel, cwd=empty, seconds=600)
    run(fresh, "-I", "-m", "pip", "check", cwd=empty)
    said = run(*smoke, "library", version, cwd=empty)
    run(*install, f"{wheel}[demo,mpich]", cwd=empty, seconds=600)
    run(fresh, "-I", "-m", "pip", "check", cwd=empty)
    run(*smoke, "commands", version, cwd=empty)
    (sets := folder / "sets").mkdir()
    cells = [f"{what}:{way}" for what in ("key", "together") for way in ("break", "exception", "whole epoch", "Ctrl-C")]
    run(fresh, "-I", ROOT / "tests/exits.py", sets, REPEATS, "30", *cells, cwd=empty, seconds=900)
    return said.strip()


def oldest_releases(told: Message, file: Path) -> Path:
    """A constraints file with the lower bound of each required package."""
    lines = []
    for requirement in told.get_all("Requires-Dist", []):
        if "extra ==" in requirement:
            continue
        bound = re.fullmatch(r"([\w.-]+)>=([\d.]+)", requirement.replace(" ", ""))
        if bound is None:
            raise Failed(f"{requirement} has no lower bound that can be tried")
        if bound[1] not in NOT_OLDEST:
            lines.append(f"{bound[1]}=={bound[2]}")
    file.write_text("\n".join(lines) + "\n")
    return file


# -- all of it --------------------------------------------------------------------------------------------------------


class Results:
    """What was tried and how it ended."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, float, str]] = []
        self.failed = False

    def attempt(self, name: str, work: Callable[[], str]) -> None:
        """Do one thing; a failure is printed and remembered."""
        begin, words = time.monotonic(), "FAILED"
        print(f"--- {name}", flush=True)
        try:
            words = work()
        except (Failed, OSError, ValueError) as e:
            self.failed = True
            print(f"{name}: {type(e).__name__}: {e}", file=sys.stderr, flush=True)
        self.rows.append((name, time.monotonic() - begin, words))

    def show(self) -> None:
        print()
        for name, seconds, words in self.rows:
            print(f"{name:16} {seconds:5.0f} s  {words}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", type=Path, action="append", default=[], help="try this one, not all that are found")
    parser.add_argument("--dist", type=Path, help="a folder in which to leave sdist and wheel if all is well")
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="pario-packages-"))
    try:
        return check(interpreters(options.python), options.dist, work)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def check(pythons: dict[tuple[int, int], Path], dist: Path | None, work: Path) -> int:
    if not pythons:
        print("no Python from 3.10 on was found", file=sys.stderr)
        return 1
    print("found Python", ", ".join(f"{a}.{b} ({path})" for (a, b), path in pythons.items()))
    results = Results()
    source, built = work / "source", work / "dist"
    copy_tree(source)
    tools = environment(list(pythons.values())[-1], work / "tools")
    results.attempt("sdist and wheel", lambda: build(tools, source, work))
    if not results.failed:
        check_files(results, tools, source, built)
        try_everywhere(results, pythons, only(built, "*.whl"), work)
    results.show()
    if results.failed:
        return 1
    if dist is not None:
        shutil.copytree(built, dist, dirs_exist_ok=True)
    print(f"ready to publish: {', '.join(sorted(path.name for path in built.iterdir()))}")
    return 0


def check_files(results: Results, tools: Path, source: Path, built: Path) -> None:
    sdist, wheel = only(built, "*.tar.gz"), only(built, "*.whl")
    twine = (tools, "-m", "twine", "check", "--strict", sdist, wheel)
    cffconvert = (tools.with_name("cffconvert"), "--validate", "-i", source / "CITATION.cff")
    render = "from rattler_build.stage0 import Stage0Recipe as R; import sys; print(*R.from_file(sys.argv[1]).render())"
    recipe = (tools, "-I", "-c", render, source / "packaging/conda/recipe.yaml")
    results.attempt("contents", lambda: check_contents(source, sdist, wheel))
    results.attempt("twine check", lambda: f"{run(*twine, cwd=built.parent).count('PASSED')} passed")
    results.attempt("README's links", lambda: check_links(metadata_of(wheel)))
    results.attempt("CITATION.cff", lambda: run(*cffconvert, cwd=built.parent).strip())
    results.attempt("conda recipe", lambda: run(*recipe, cwd=built.parent).strip())


def try_everywhere(results: Results, pythons: dict[tuple[int, int], Path], wheel: Path, work: Path) -> None:
    told = metadata_of(wheel)
    version = str(told["Version"])

    def attempt(name: str, python: Path, folder: Path, *options: str | Path) -> None:
        results.attempt(name, partial(try_wheel, python, wheel, folder, version, options))
        shutil.rmtree(folder, ignore_errors=True)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        tries = [pool.submit(attempt, f"Python {a}.{b}", path, work / f"{a}.{b}") for (a, b), path in pythons.items()]
        if OLDEST in pythons:  # newer ones have no wheels of these
            oldest = ("-c", oldest_releases(told, work / "oldest.txt"))
            tries.append(pool.submit(attempt, "oldest releases", pythons[OLDEST], work / "oldest", *oldest))
        else:
            print("!!!!! Python 3.10 was not found, and so the oldest releases of the required packages were not tried")
    for each in tries:
        each.result()  # what no attempt catches
    tried = {f"{a}.{b}" for a, b in pythons}
    for versions, why in ((claimed(told) - tried, "claimed, not found here"), (tried - claimed(told), "not claimed")):
        if versions:
            print(f"!!!!! {why}: Python {', '.join(sorted(versions))}")


if __name__ == "__main__":
    sys.exit(main())
