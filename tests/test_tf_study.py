"""benchmarks/tf_study.py: what its runs say, and that it goes on where it was stopped."""

from __future__ import annotations

import json

import pytest

from benchmarks import tf_study


def runs(rounds: int = 3) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for number in range(rounds):
        for store, gain in (("Lustre-like", 7.8), ("HDD-like", 2.1)):
            for threads in (1, 2, 4, 8):
                rate = 5e6 * min(threads, gain)
                found[f"d1 {number} {store} read {threads}"] = {"bytes_per_s": rate, "cpu": 0.1}
            for factor in (0.5, 1, 2):
                for prefetch in (0, 1, 4):
                    took = 0.1 * factor + 0.1 if not prefetch else 0.1 * max(factor, 1)
                    run = {"seconds": took, "only": 0.1 * factor, "input": 0.1}
                    found[f"d2 {number} {store} {factor:g} {prefetch}"] = run
        for way, total, stall in (("none", 3.0, 0.0), ("direct", 9.0, 1.2), ("fast only", 3.1, 0.02),
                                  ("burst buffer", 3.1, 0.02), ("torch DCP", 9.3, 1.3)):  # fmt: skip
            found[f"d3 {number} {way}"] = {"total": total, "stall": stall, "durable": 9.0}
    return found


def test_the_bars_of_the_three_experiments():
    found = runs()
    first = {(row.case, row.sense): row for row in tf_study.d1(found).rows}
    assert first["Lustre-like, read, 8 threads ÷ 1", ">="].figure == pytest.approx(7.8)
    assert first["HDD-like, read, 8 threads ÷ 1", "<="].bar == 2.8
    assert first["HDD-like, read, 8 threads ÷ 4", "<="].bar == 1.15
    second = {(row.case, row.sense): row for row in tf_study.d2(found).rows}
    assert second["HDD-like, computing 1 × input, prefetch 1", "<="].figure == pytest.approx(1.0)
    assert second["HDD-like, computing 0.5 × input, prefetch 0", ">="].figure == pytest.approx(1.0)
    assert second["Lustre-like, computing 0.5 × input, prefetch 4", ""].met is None
    third = {row.case: row for row in tf_study.d3(found).rows}
    assert third["whole loop: direct ÷ burst buffer"].figure == pytest.approx(9 / 3.1)
    assert third["whole loop: burst buffer ÷ fast only"].bar == 1.05
    assert third["stall per checkpoint: torch DCP ÷ burst buffer"].figure == pytest.approx(65)
    rows = [*first.values(), *second.values(), *third.values()]
    assert all(row.met is not False for row in rows)
    slow = found | {f"d2 {number} HDD-like 2 4": {"seconds": 0.22, "only": 0.2, "input": 0.1} for number in range(3)}
    assert [row.case for row in tf_study.d2(slow).rows if row.met is False] == [
        "HDD-like, computing 2 × input, prefetch 4"
    ]


def test_it_goes_on_where_it_was_stopped(tmp_path):
    out, done = tmp_path / "out.json", []

    def planned(name: str):
        return name, lambda: done.append(name) or {"bytes_per_s": 1e6, "cpu": 0.0}

    names = [f"d1 0 HDD-like read {threads}" for threads in (1, 2, 4, 8)]
    bench = tf_study.Bench(out, 60)
    assert bench.measure(planned(name) for name in names[:2])
    assert not tf_study.Bench(out, -1).measure(planned(name) for name in names)
    assert tf_study.Bench(out, 60).measure(planned(name) for name in names)
    assert done == names
    document = json.loads(out.read_text())
    assert len(document["sections"][0]["rows"]) == 3
    page = tf_study.fill("<!-- bars: d1 -->\n<!-- end -->\n<!-- bars: machine -->\n<!-- end -->\n", document)
    assert "HDD-like, read, 8 threads ÷ 4" in page
    assert "| measured | beside |" in page
    assert "Measured " in page


@pytest.mark.full
def test_figures(tmp_path):
    tf_study.figures(runs(), str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"tf-threads.svg", "tf-overlap.svg", "tf-checkpoint.svg"}
