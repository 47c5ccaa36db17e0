"""The planted defects of benchmarks/mutants.py: each can still be planted, and the tool's parts do what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.mutants import chosen, phases, table
from benchmarks.mutation.defects import Defect, functions, planted, read_all
from benchmarks.mutation.jobs import OTHERS, QUICK, SERIAL, Setting
from benchmarks.mutation.reach import Kernels, Witness, in_order

ROOT = Path(__file__).resolve().parent.parent
ROOMS = {"format", "kernels", "plan", "comm", "decode", "locate", "fetch", "feed", "tiers", "text.py"}

SOURCE = '''
class A:
    """Text that nobody runs."""

    def f(self, x):
        if (
            x > 1
        ):
            x = 0
        def g():
            return x
        return g

def f(x):
    return x > 1
'''

LIST = """
# a comment
@ comm/a.py A.f
- x > 1
+ x >= 1
= one is taken
~ nobody has one
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "pario" / "comm").mkdir(parents=True)
    (tmp_path / "pario" / "comm" / "a.py").write_text(SOURCE)
    return tmp_path


def test_every_defect_can_be_planted() -> None:
    """A list that does not fit the sources any more would test nothing."""
    defects = read_all()
    for defect in defects:
        defect.spoilt(ROOT)
    assert len(defects) >= 80
    assert {defect.room for defect in defects} == ROOMS
    assert len({defect.name for defect in defects}) == len(defects)


def test_a_list_is_read(tmp_path: Path, tree: Path) -> None:
    (tmp_path / "a.txt").write_text(LIST)
    (defect,) = read_all(tmp_path)
    assert defect == Defect("pario/comm/a.py", "A.f", "x > 1", "x >= 1", "one is taken", "nobody has one")
    assert defect.room == "comm"
    assert chosen([defect], "comm") == chosen([defect], "a.py:A") == [defect]
    assert chosen([defect], "plan") == []
    assert defect.lines(tree) == (5, range(6, 9))
    for text, why in (
        (LIST + LIST, "listed twice"),
        (LIST.replace("= one", "one"), "no line of a defect"),
        (LIST.replace("+ x >= 1\n", ""), "needs a file"),
        (LIST.replace(" A.f", ""), "needs a file"),
    ):
        (tmp_path / "a.txt").write_text(text)
        with pytest.raises(ValueError, match=why):
            read_all(tmp_path)


def test_functions_have_qualified_names() -> None:
    assert [(each.name, each.first, each.last) for each in functions(SOURCE)] == [
        ("A.f", 5, 12), ("A.f.g", 10, 11), ("f", 14, 15)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("function", "old", "new", "why"),
    [
        ("A.f", "x > 2", "x", "stands 0 times"),
        ("A.f", "x", "y", "stands 4 times"),
        ("A.h", "x", "y", "0 functions A.h"),
        ("f", "x > 1", "x > ", "no Python any more"),
        ("f", "x > 1", "x  >  1", "only text that nobody runs"),
    ],
)
def test_what_is_no_defect(tree: Path, function: str, old: str, new: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Defect("pario/comm/a.py", function, old, new, "").spoilt(tree)


def test_a_defect_is_planted_and_taken_out_again(tree: Path) -> None:
    path = tree / "pario" / "comm" / "a.py"
    before = path.stat()
    defect = Defect("pario/comm/a.py", "f", "x > 1", "x < 1", "")
    with planted(defect, tree, 1):
        assert path.read_text() == SOURCE[::-1].replace("1 > x", "1 < x", 1)[::-1]
        # Compiled code of the sound file, of the same size and the same second, must not be taken for this one's.
        assert path.stat().st_mtime >= before.st_mtime + 9
    assert path.read_text() == SOURCE
    assert path.stat().st_mtime_ns == before.st_mtime_ns


def test_who_calls_a_kernel() -> None:
    """Directly, through other kernels, by the module's name, and from tests."""
    kernels = Kernels(ROOT)

    def callers(file: str, function: str) -> set[tuple[str, str]]:
        text = next(each for each in functions((ROOT / file).read_text()) if each.name == function)
        body = (ROOT / file).read_text().split("\n")[text.first - 1 : text.last]
        line = next(line for line in body if body.count(line) == 1 and line.startswith("    ") and "=" in line)
        return {(user, name) for user, name, _ in kernels.lines_of(Defect(file, function, line, "", ""), ROOT)}

    assert ("pario/plan/schedule.py", "_pool_share") in callers("pario/kernels/permute.py", "_advance")
    assert ("pario/plan/epoch.py", "GlobalOrder.__init__") in callers("pario/kernels/permute.py", "permute")
    assert ("tests/test_kernels_convert.py", "test_crop") in callers("pario/kernels/convert.py", "crop_u8")
    assert ("pario/decode/datum.py", "Datum._decode") in callers("pario/kernels/convert.py", "crop_u8")
    # A kernel that is compiled into others makes theirs stale too.
    stale = kernels.stale("pario/kernels/pack.py")
    assert stale >= {f"pario.kernels.{name}" for name in ("pack", "convert", "datum")}
    assert "pario.kernels.scan" not in stale
    assert kernels.is_compiled("pario/kernels/reads.py", "read_spans")
    assert not kernels.is_compiled("pario/fetch/posix.py", "PosixFetcher.read")


def test_cheap_tests_of_the_same_room_come_first() -> None:
    def test(name: str, seconds: float, setting: Setting = SERIAL, marked: bool = False) -> Witness:
        return Witness(f"tests/{name}", setting, seconds, marked, 10)

    near = [test(f"test_plan_a.py::test_a[{case}]", 1.0 + case) for case in range(9)]
    far, slow = test("test_x.py::test_b", 1.0), test("test_plan_a.py::test_c", 4.5)
    assert in_order([*near, far, slow], {"plan"})[:4] == [near[0], far, near[1], slow]
    ranks, others = test("test_mpi_a.py::test_d", 1.0, QUICK[0]), test("test_mpi_a.py::test_d", 1.0, OTHERS[0])
    marked, system = test("test_x.py::test_e", 1.0, marked=True), test("system/test_x.py::test_f", 1.0)
    run = phases([far, ranks, others, marked, system], {"plan"})
    assert [(suite, setting, tests) for suite, setting, tests in run if tests] == [
        ("default", SERIAL, [far]), ("default", QUICK[0], [ranks]),
        ("full", SERIAL, [system, marked]), ("full", OTHERS[0], [others]),
    ]  # fmt: skip


def test_the_table_says_who_noticed() -> None:
    defects = [
        Defect("pario/comm/a.py", "f", "1", "2", "one is two"),
        Defect("pario/plan/b.py", "g", "1", "2", "one is two", "nobody counts"),
    ]
    found = {"suite": "default", "setting": "2 ranks", "test": "tests/test_a.py::test_a", "how": "hang", "seconds": 3.0}
    text = table(defects, {defects[0].name: found, defects[1].name: {"suite": "", "seconds": 9.0}})
    assert "| comm | 1 | 1 (100%) | 1 (100%) |" in text
    assert "| all | 2 | 1 (50%) | 1 (50%) |" in text
    assert "| `comm/a.py` f | one is two | default | `test_a.py::test_a` | does not end, 2 ranks | 3 |" in text
    assert "- `plan/b.py` g, one is two: nobody counts" in text
