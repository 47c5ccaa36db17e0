"""The study of the recipes: its arithmetic with made-up numbers, its tables, and a tiny one from end to end."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

pytest.importorskip("click")
pytest.importorskip("tqdm")

from launch import tree

from benchmarks.cache import Unavailable
from benchmarks.measure import ratios, spread
from benchmarks.study import __main__ as study_main
from benchmarks.study import plots, stores, tables
from benchmarks.study.__main__ import _tell, chosen, main
from benchmarks.study.by_hand import HandLoop
from benchmarks.study.cells import LOOPS, PRESETS, RECIPES, STORES, Cell, Preset
from benchmarks.study.headline import headline
from benchmarks.study.jobs import Launcher
from benchmarks.study.run import Study, Watcher
from benchmarks.study.sets import held, record_digest
from benchmarks.study.verdicts import BARS, best_loop, best_other, title, verdicts, worst
from benchmarks.study.worker import COLLECTIVES
from pario.comm import memory
from pario.comm.base import AnyWorld
from pario.comm.messages import Messages
from pario.comm.solo import Solo
from pario.comm.world import World
from pario.locate.sidecar import sidecar_places

ROOT = Path(__file__).parents[1]


# -- made-up numbers ---------------------------------------------------------------------------------------------------


def made_run(rate: float, **more: Any) -> dict[str, Any]:
    """One run of 1,000 records of 1 MB in all, on two ranks."""
    return {
        **{"seconds": 1e6 / rate, "open_seconds": 0.1, "first_batch_seconds": 0.01, "epochs": 1},
        **{"records": 1000, "bytes": 1_000_000, "rate": rate, "page_rate": 1.2 * rate, "batches": 20},
        **{"collectives": 0, "voluntary": 100, "involuntary": 10, "minor_faults": 0, "major_faults": 5},
        **{"asked": 0, "asked_calls": 0, "device": 1_200_000, "store": None},
        "stats_late": {},
        "stats": {
            "locate": 0.1,
            "turn": 0.1,
            "read": 0.3,
            "share": 0.2,
            "decode": 0.1,
            "bytes_read": 10**6,
            "reads": 4,
        },
        **more,
    }


def made_cell(runs: dict[str, list[float]], **more: Any) -> dict[str, Any]:
    return {
        **{"store": "disk", "dataset": "3k", "ranks": 2, "nodes": 1, "state": "cold", "order": "none"},
        **{"cap": None, "batch": 25, "steps": {}, "failed": {}},
        "runs": {name: [made_run(rate) for rate in rates] for name, rates in runs.items()},
        **more,
    }


def made_document(*cells: dict[str, Any], **more: Any) -> dict[str, Any]:
    facts = {"date": "today", "cpus": 2, "cpu": "", "memory_bytes": 1 << 30, "kernel": "6", "python": "3"}
    held = {"records": 1000, "value_bytes": 1_000_000, "page_bytes": 1_200_000, "file_bytes": 1_300_000}
    return {
        **{"format": 1, "kind": "study", "preset": "made", "rounds": 2, "seed": 0, "seconds": 60.0, "complete": True},
        "machine": facts | {"versions": {"pario": "0"}},
        "sets": {"3k": held | {"in_order": True}, "variable": held | {"in_order": False}},
        **{"cells": list(cells), "requests": [], "groups": [], "checks": [], "notes": []},
        **more,
    }


def test_spread_and_ratios_pair_by_pair():
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0, "n": 3}
    assert ratios([2.0, 9.0, 4.0], [1.0, 3.0, 4.0]) == {"median": 2.0, "min": 1.0, "max": 3.0, "n": 3}


def test_auto_is_held_against_the_best_other_recipe_round_by_round():
    cell = made_cell({"plain": [1e6, 1e6, 1e6], "coal": [2e6, 4e6, 3e6], "auto": [2e6, 2e6, 2.7e6]})
    assert best_other(cell) == "coal"
    (row,) = verdicts(made_document(cell))["auto ÷ the best other recipe"]
    assert (row.figure, row.low, row.high, row.met) == (0.9, 0.5, 1.0, False)
    assert row.case == "disk, 3k, 2 ranks on 1 node, cold"
    assert "coal" in row.theirs


@pytest.mark.parametrize(("state", "auto", "met"), [("cold", 0.97, False), ("first", 1.0, True), ("warm", 0.96, True)])
def test_the_bar_against_plain_is_lower_when_warm(state, auto, met):
    cell = made_cell({"plain": [1e6, 1e6], "auto": [auto * 1e6] * 2}, state=state)
    (row,) = verdicts(made_document(cell))["auto ÷ plain"]
    assert row.met is met


def test_the_cap_is_held_against_pages_and_only_where_there_is_latency():
    runs = {"auto": [145e6, 157e6]}  # of values; 1.2 times that of pages
    slow = made_cell(runs, store="latency", cap=200_000_000)
    document = made_document(slow, made_cell(runs, store="throttled", cap=200_000_000))
    (row,) = verdicts(document)["latency store: auto ÷ the store's cap"]
    assert row.figure == pytest.approx(0.906)
    assert row.met


def test_collectives_switches_and_reads_in_flight():
    cell = made_cell({"plain": [1e6], "auto": [1e6]})
    store = {"bytes": 1, "operations": 1, "most": 129}
    cell["runs"]["auto"][0] |= {"collectives": 40, "voluntary": 101, "store": store}
    found = verdicts(made_document(cell))
    (calls,) = found["collective calls of auto per batch"]
    assert (calls.figure, calls.met) == (2.0, False)
    (switches,) = found["voluntary context switches of auto per record, against plain's"]
    assert (switches.figure, switches.bar, switches.met) == (0.101, 0.1, False)
    (flight,) = found["latency store: reads of auto in flight at once"]
    assert (flight.figure, flight.bar, flight.met) == (129, 128, False)  # 64 for each of two ranks


def test_speculation_is_held_to_its_bars_in_whole_epochs_in_key_order():
    cell = made_cell({"dm": [1e6]})
    cell["runs"]["dm"][0]["stats"] |= {"guessed": 9, "bytes_read": 1_300_000 * 1.04}
    cell["runs"]["dm"][0]["stats_late"] = {"missed": 1}
    shuffled, cut = made_cell({"dm": [1e6]}, order="global"), made_cell({"dm": [1e6]}, steps={"dm": 5})
    elsewhere = made_cell({"dm": [1e6]}, dataset="variable", steps={"dm": 5})
    elsewhere["runs"]["dm"][0]["stats"] |= {"guessed": 9}
    found = verdicts(made_document(cell, shuffled, cut, elsewhere))
    assert [row.met for row in found["dm: missed pages after two steps, of files in key order"]] == [False]
    (row,) = found["dm: bytes read ÷ the file's"]
    assert row.figure == pytest.approx(1.04)
    assert row.met


def test_wrong_content_and_failed_recipes_are_told():
    check = {"dataset": "3k", "order": "none", "ranks": 2, "nodes": 1, "recipe": "dm", "options": "{}", "records": 1000}
    document = made_document(
        made_cell({"plain": [1e6]}, failed={"dm": "ReadError: no"}),
        checks=[check | {"missing": 1, "repeated": 2, "wrong": 3}],
    )
    found = verdicts(document)
    content, failed = list(BARS)[:2]
    assert [row.figure for row in found[content]] == [6]
    assert [row.met for row in found[failed]] == [False]
    assert "dm" in tables.on_screen(document)


def test_the_worst_row_has_the_least_margin():
    cells = [made_cell({"plain": [1e6], "auto": [f * 1e6]}, ranks=r) for f, r in ((2.0, 1), (0.5, 2), (1.1, 4))]
    row = worst(verdicts(made_document(*cells))["auto ÷ plain"])
    assert row is not None
    assert "2 ranks" in row.case
    assert worst([]) is None


def test_nothing_measured_is_no_verdict():
    document = made_document(made_cell({"plain": [], "auto": []}))
    found = verdicts(document)
    assert not found["auto ÷ plain"]
    assert "not measured" in tables.on_screen(document)


def test_tables_and_the_page_that_they_fill():
    cells = [made_cell({"plain": [1e6, 2e6], "auto": [4e6, 4e6]}, ranks=r) for r in (1, 2)]
    document = made_document(*cells)
    made = tables.parts(document)
    assert "| 1 rank on 1 node | 3.00 (2.00 … 4.00) |" in made["gains"].replace("1.00 (1.00 … 1.00) | ", "")
    assert "| 2 ranks on 1 node | 1.5 (1.0 … 2.0) | 4.0 (4.0 … 4.0) |" in made["rates"]
    page = "a\n<!-- study: gains -->\nformer\n<!-- end -->\nb\n<!-- study: speculation -->\nkept\n<!-- end -->\n"
    filled = tables.fill(page, document)
    assert "former" not in filled
    assert "kept" in filled  # nothing was measured for it
    assert filled.startswith("a\n<!-- study: gains -->\n**3k, bare disk")
    assert tables.fill(filled, document) == filled


def test_dm_that_did_not_guess_is_marked():
    cells = [made_cell({"dm": [1e6], "auto": [1e6]}, ranks=ranks) for ranks in (1, 2)]
    cells[1]["runs"]["dm"][0]["stats"] |= {"guessed": 9, "missed": 0, "extra": 0}
    cells[1]["runs"]["dm"][0]["stats_late"] = {"missed": 0}
    made = tables.parts(made_document(*cells))["rates"]
    assert "| 1 rank on 1 node | 1.0 (1.0 … 1.0) not guessed | 1.0 (1.0 … 1.0) |" in made
    assert "| 2 ranks on 1 node | 1.0 (1.0 … 1.0) | 1.0 (1.0 … 1.0) |" in made


def test_loops_written_by_hand_have_a_table_of_their_own_and_are_no_recipes():
    cells = [
        made_cell({"plain": [1e6], "auto": [6e6], "shard": [8e6], "shard-8M": [7e6]}, state="warm"),
        made_cell({"plain": [1e6], "auto": [6e6]}),
    ]
    assert best_other(cells[0]) == "plain"
    assert best_loop(cells[0]) == "shard"
    assert best_loop(cells[1]) is None
    made = tables.parts(made_document(*cells))
    assert made["by_hand"].splitlines()[-1] == (
        "| disk, 3k, 2 ranks on 1 node, warm | 6.0 (6.0 … 6.0) | 8.0 (8.0 … 8.0) | 7.0 (7.0 … 7.0) |  | "
        "0.75 (0.75 … 0.75) |"
    )
    assert "shard" not in made["rates"] + made["gains"]


def test_the_figure_of_the_readme_has_the_strongest_baseline_in_it():
    where = {"store": "latency", "dataset": "197k"}
    rates = {"plain": [9e6], "auto": [186e6], "shard": [48e6], "shard-8M": [170e6]}
    cells = [
        made_cell(rates, **where),
        made_cell({"auto": [136e6], "get": [0.8e6]}, **where, order="global"),
        made_cell({"auto": [500e6], "shard": [1000e6]}, state="warm"),
    ]
    told = headline(made_document(*cells))
    assert "| pario | 186 (186 … 186) | 136 (136 … 136) |" in told
    assert "| py-lmdb, a contiguous shard per rank, read-ahead 8 MiB | 170 (170 … 170) |  |" in told
    assert "| py-lmdb, `get` of random records, no read-ahead |  | 0.8 (0.8 … 0.8) |" in told
    assert "0.50 to 0.50 times the rate of the loop" in told
    assert headline(made_document(*cells[1:])) == ""  # `fill` then leaves what stands there


def test_a_matplotlib_that_cannot_be_imported_costs_the_figures_only(tmp_path, monkeypatch, capsys):
    broken = tmp_path / "broken" / "matplotlib"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise AttributeError('built for another numpy')")
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(broken.parent))
    _tell(made_document(made_cell({"plain": [1e6], "auto": [2e6]})), tmp_path)
    said = capsys.readouterr().out
    assert "No figures: " in said
    assert "built for another numpy" in said
    assert (tmp_path / "study.md").exists()


def test_figures(tmp_path):
    pytest.importorskip("matplotlib")
    states = [
        made_cell({name: [1e6, 2e6] for name in RECIPES}, state=s, ranks=r) for s in ("cold", "warm") for r in (1, 4)
    ]
    for run in states[0]["runs"]["dm"]:
        run["stats"] |= {"guessed": 300, "missed": 4, "extra": 20}
        run["stats_late"] = {"missed": 0}
    document = made_document(
        *states,
        groups=[made_cell({"G=1": [1e6], "G=2": [2e6]}, nodes=4)],
        requests=[
            {"way": w, "size": s, "bytes": 10**6, "seconds": [0.1, 0.2]}
            for w in ("pread", "mmap")
            for s in (4096, 8192)
        ],
    )
    files = plots.plot(document, tmp_path)
    assert {file.stem for file in files} == {
        *("gain-disk-cold", "gain-disk-warm", "switches-disk-cold", "switches-disk-warm"),
        *("speculation", "requests", "staggering"),
    }
    for file in files:
        assert "<svg" in file.read_text()
        assert file.stat().st_size < 100_000


# -- what is measured --------------------------------------------------------------------------------------------------


def test_the_preset_holds_what_it_promises():
    small = PRESETS["small"]
    assert {cell.store for cell in small.cells} == set(STORES)
    assert small.ranks == [1, 2, 4]
    assert small.rounds >= 5
    assert {cell.dataset for cell in small.cells} == {"3k", "197k", "variable"}
    assert {cell.state for cell in small.cells} == {"cold", "warm", "first"}
    assert len(set(small.cells)) == len(small.cells)


def test_loops_are_in_the_cells_whose_order_they_read():
    for cell in PRESETS["small"].cells:
        loops = [name for name in cell.recipes if name in LOOPS]
        if cell.dataset == "variable" or cell.state == "first" or cell.order == "block":
            assert loops == []
        elif cell.order == "global":
            assert loops == ["get"]
        else:
            assert loops == (["shard", "shard-8M"] if cell.store == "latency" else ["shard"])


@pytest.mark.parametrize(("which", "batch"), [("3k", 16), ("197k", 32)])  # joined; filled value by value
@pytest.mark.parametrize("loop", ["shard", "get"])
def test_a_loop_written_by_hand_delivers_every_record_once(tmp_path, which, batch, loop):
    made = held(tmp_path, which, 50)
    task = {"path": made.folder, "batch": batch, "head": made.head, "pixels": made.pixels, "loop": loop, "seed": 0}
    hand = HandLoop(Solo(), task)
    ids, found = [], []
    for batch_of in hand:
        ids += batch_of.ids.tolist()
        found += [record_digest(row, label) for row, label in zip(batch_of["data"], batch_of["label"], strict=True)]
    hand.close()
    assert sorted(ids) == list(range(50))
    assert (ids == sorted(ids)) == (loop == "shard")
    np.testing.assert_array_equal(np.array(found, np.uint64), made.digests()[ids])


def test_a_part_of_a_preset():
    part = PRESETS["small"].only(recipes=("auto", "plain"), stores=("disk",), ranks=(4,), rounds=2)
    assert {(cell.store, cell.ranks) for cell in part.cells} == {("disk", 4)}
    assert all(set(cell.recipes) <= {"plain", "auto"} for cell in part.cells)
    assert not part.group_cells  # staggering is a matter of "stag"
    assert part.rounds == 2
    assert not PRESETS["small"].only(stores=("latency",)).requests


def test_cells_in_words():
    assert Cell("disk", "3k", 4, 2, "cold", "global").title == 'disk, 3k, 4 ranks on 2 nodes, cold, "global"'
    assert title(made_cell({}, ranks=1)) == "disk, 3k, 1 rank on 1 node, cold"


@pytest.mark.parametrize("which", ["3k", "variable"])
def test_digests_are_those_of_the_records(which, tmp_path):
    made = held(tmp_path, which, 20)
    assert held(tmp_path, which, 20) == made
    with lmdb.open(made.folder, readonly=True, lock=False) as env, env.begin() as txn:
        values = [value for _, value in txn.cursor()]
    assert (len(values), sum(map(len, values))) == (made.records, made.value_bytes)
    digests = made.digests()
    assert len(np.unique(digests)) == 20
    if which == "variable":
        assert max(map(len, values)) > 20 * min(map(len, values))


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.full
def test_an_index_is_hidden_wherever_it_lies_and_a_killed_study_leaves_none_hidden(tmp_path, monkeypatch, which):
    """Beside the data, and in the user's cache directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = held(tmp_path, "variable", 50)
    place = Path(list(sidecar_places(made.file))[which])
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(b"")
    preset = Preset(cells=(Cell("disk", "variable", 1, 1, "first"),), rounds=1, records={"variable": 50}, limit_s=1.0)
    study = Study(preset, name="made", launcher=Launcher(), data=tmp_path)
    ((there, away),) = study._hide_index(stores.Store(), {"path": made.folder})
    assert there == str(place)
    assert not place.exists()
    assert Path(away).exists()
    study._work = str(tmp_path)
    study._make_sets()
    assert not Path(away).exists()
    assert Path(next(sidecar_places(made.file))).exists()


def test_every_call_in_which_ranks_meet_is_counted():
    """All of the contract that wait for others in MPI, however deep in what World is made of; not those that end it."""
    names: dict[str, set[str]] = {}
    for part in (World, Messages, memory):
        for name, one in vars(part).items():
            if inspect.isfunction(one):
                names.setdefault(name, set()).update(one.__code__.co_names)
    meeting = {"wait", "_wait", "_agree"}
    while more := {name for name, used in names.items() if used & meeting} - meeting:
        meeting |= more
    contract = {name for name, one in vars(AnyWorld).items() if inspect.isfunction(one) and not name.startswith("_")}
    assert (meeting & contract) - {"close", "abandon"} == set(COLLECTIVES)
    said = {name for name in contract if "Collective" in (getattr(AnyWorld, name).__doc__ or "")}
    assert said - {"close"} == set(COLLECTIVES)


class Heard(Watcher):
    def __init__(self) -> None:
        self.ticks: list[int] = []
        self.said: list[str] = []

    def tick(self, runs: int) -> None:
        self.ticks.append(runs)

    def say(self, line: str) -> None:
        self.said.append(line)


def test_what_a_machine_cannot_do_is_told_and_left_out(tmp_path, monkeypatch):
    def missing(*_: object) -> Any:
        raise Unavailable("no store here")

    monkeypatch.setattr(stores, "Group", missing)
    monkeypatch.setattr(stores, "throttled_disk", missing)
    cells = (Cell("disk", "variable", 2, 1, "cold"), Cell("throttled", "variable", 1, 1, "cold"))
    preset = Preset(cells=cells, rounds=3, records={"variable": 50}, limit_s=1.0)
    watcher = Heard()
    study = Study(preset, name="made", launcher=Launcher(), data=tmp_path, watcher=watcher)
    study.run()
    assert sum(watcher.ticks) == study.ticks == 2 * 8 * (3 + 1)
    assert study.document["complete"]
    assert study.document["cells"] == []
    assert study.document["notes"] == [
        "2 ranks on 1 node: not measured, no mpiexec",
        "store throttled: not measured, no store here",
    ]
    assert any("not measured" in line for line in watcher.said)


# -- from end to end ---------------------------------------------------------------------------------------------------


def start(*args: object, **how: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.study", "--preset", "tiny", *map(str, args)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, **how)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("sets")


@pytest.mark.full
def test_a_tiny_study(data, tmp_path):
    out = tmp_path / "out"
    child = start("--recipes", "plain,auto,shard", "--out", out, "--data", data)
    said, complained = child.communicate(timeout=240)
    assert child.returncode == 0, complained
    assert "auto ÷ plain" in said
    document = json.loads((out / "study.json").read_text())
    assert document["complete"]
    assert not document["notes"]
    assert [(cell["ranks"], cell["state"]) for cell in document["cells"]] == [(1, "cold"), (2, "warm"), (2, "first")]
    for cell in document["cells"]:
        assert not cell["failed"]
        for recipe in ("plain", "auto", *(["shard"] if cell["state"] != "first" else [])):
            (run,) = cell["runs"][recipe]
            assert run["records"] == run["epochs"] * document["sets"][cell["dataset"]]["records"]
            assert run["rate"] > 0
            assert run["seconds"] > 0
            assert run["batches"] > 0
            assert {"voluntary", "involuntary", "major_faults", "minor_faults", "store", "stats"} <= set(run)
        assert cell["runs"]["auto"][0]["collectives"] == 0
    checks = document["checks"]
    assert len(checks) == 2 * 3 + 2
    assert all(check["missing"] == check["repeated"] == check["wrong"] == 0 for check in checks)
    assert {row["size"] for row in document["requests"]} == {4096, 1 << 20}
    assert "**3k, bare disk" in (out / "study.md").read_text()
    drawn = importlib.util.find_spec("matplotlib") is not None
    assert (out / "figures" / "gain-disk-cold.svg").exists() == drawn
    assert ("No figures" in said) != drawn
    assert not [path for path in out.iterdir() if path.name.startswith("data-")]


@pytest.mark.full
def test_ctrl_c_keeps_what_is_measured_and_leaves_nothing(data, tmp_path):
    out = tmp_path / "out"
    child = start("--recipes", "auto", "--ranks", "2", "--rounds", "500", "--out", out, "--data", data)
    mine: set[int] = set()
    end = time.monotonic() + 120
    while time.monotonic() < end and child.poll() is None:
        mine = set(tree(child.pid))
        # The launcher has these words, too, further on.
        if sum(command(pid).split()[1:3] == ["-m", "benchmarks.study.worker"] for pid in mine) >= 2:
            break
        time.sleep(0.1)
    time.sleep(2)
    mine |= set(tree(child.pid))
    child.send_signal(signal.SIGINT)
    said, complained = child.communicate(timeout=60)
    assert child.returncode == 130, complained
    document = json.loads((out / "study.json").read_text())
    assert not document["complete"]
    assert "Cut short" in said
    assert not [pid for pid in mine if "benchmarks.study" in command(pid)]


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--recipes", "plain,best"], "'best' is no recipe"),
        (["--ranks", "1,x"], "'x' is no number of ranks; there are 1, 2, 4"),
        (["--rounds", "0"], "--rounds is at least 1"),
        (["--seed", "-1"], "--seed at least 0"),
        (["--preset", "large"], "invalid choice: 'large'"),
    ],
)
def test_wrong_arguments(capsys, monkeypatch, words, said):
    monkeypatch.setattr(study_main, "study", lambda **_: pytest.fail("a study has started"))
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_names_of_an_option():
    assert chosen(" plain, auto", RECIPES, "recipe") == ("plain", "auto")
    assert chosen(None, RECIPES, "recipe") == ()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (["--ranks", "2", "--stores", "latency"], "disk: ranks 1, 2, 4; throttled: ranks 4; latency: ranks 1, 4"),
        (["--out", "/proc/nope"], "error: no folder can be made there"),
        (["--out", "/dev/shm/pario-no-study/x"], "/dev/shm/pario-no-study/x is kept in memory"),
    ],
)
def test_what_cannot_be_is_one_line(capsys, how, said):
    assert main(how) == 2
    complained = capsys.readouterr().err
    assert said in complained
    assert complained.count("\n") == 1
    assert not Path("/dev/shm/pario-no-study").exists()


def test_no_job_of_ranks_starts_a_study(capsys, monkeypatch):
    monkeypatch.setattr(study_main, "launched_rank", lambda: 0)
    assert main([]) == 2
    assert "without mpiexec" in capsys.readouterr().err
