"""Pictures of docs/how-fast.md#gallery: a few steps out of a trace; docs/grafana.json's panels, asked of a Prometheus.

    python docs/gallery.py step trace.json docs/figures/step.svg --seconds 0.2
    python docs/gallery.py jobs http://localhost:9090 docs/figures/jobs.svg --seconds 160
"""

from __future__ import annotations

import argparse
import json
import time
import urllib.parse
import urllib.request
from pathlib import Path
from statistics import median
from typing import Any
from xml.sax.saxutils import escape

DASHBOARD = Path(__file__).parent / "grafana.json"
WIDTH, ROW, LEFT, RIGHT, HUGE = 640, 28, 100, 30, 1e12
#: what a thread does -> colour of its bar
SPANS = {"your code": "#009E73", "decode": "#E69F00", "wait for bytes": "#D55E00", "read": "#56B4E9"}
LINES = ("#0072B2", "#D55E00", "#009E73", "#B8A800")
#: Grafana's units -> (divisor, how a number is written)
UNITS = {"Bps": (1e6, "{:g} MB/s"), "ops": (1, "{:g} /s"), "percentunit": (1, "{:.0%}")}


def text(x: float, y: float, words: str, more: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" fill="#222222" {more}>{escape(words)}</text>'


def bar(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.0f}" width="{max(width, 0.6):.1f}" height="{height:.0f}" fill="{fill}"/>'


def sheet(height: float, title: str, parts: list[str]) -> str:
    """A white drawing, which is legible on a dark page, too."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:.0f}" '
        f'viewBox="0 0 {WIDTH} {height:.0f}" font-family="sans-serif" font-size="13" role="img">\n'
        f"<title>{escape(title)}</title>\n"
        f'<rect width="{WIDTH}" height="{height:.0f}" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def step(trace: str, seconds: float) -> str:
    """What each thread of rank 0 does during `seconds`."""
    events = [event for event in json.loads(Path(trace).read_text())["traceEvents"] if event.get("pid") == 0]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans = [event for event in events if event["name"] in SPANS and event["ph"] == "X"]
    begin = median(span["ts"] for span in spans if span["name"] == "your code") - seconds * 5e5
    scale = (WIDTH - LEFT - RIGHT) / (seconds * 1e6)
    rows = sorted({span["tid"] for span in spans}, key=lambda tid: (names[tid] != "training loop", names[tid]))
    parts = [text(8, 46 + ROW * k, names[tid].removeprefix("pario-")) for k, tid in enumerate(rows)]
    bottom = 34 + ROW * len(rows)
    for part in range(6):
        x = LEFT + part / 5 * (WIDTH - LEFT - RIGHT)
        parts.append(f'<path d="M{x:.0f},24V{bottom}" stroke="#dddddd"/>')
        parts.append(text(x, 18, f"{part * seconds * 200:g} ms", 'text-anchor="middle" font-size="11"'))
    for span in spans:
        start, stop = (min(max(at - begin, 0), seconds * 1e6) for at in (span["ts"], span["ts"] + span["dur"]))
        if stop > start:
            y = 30 + ROW * rows.index(span["tid"])
            parts.append(bar(LEFT + start * scale, y, (stop - start) * scale, ROW - 8, SPANS[span["name"]]))
    for k, (name, fill) in enumerate(SPANS.items()):
        parts += [bar(LEFT + 130 * k, bottom + 10, 14, 14, fill), text(LEFT + 20 + 130 * k, bottom + 22, name)]
    return sheet(bottom + 36, "What each thread does during a few steps", parts)


def ask(prometheus: str, query: str, end: float, seconds: float) -> list[dict[str, Any]]:
    """The series of a query, in about 120 points."""
    words = urllib.parse.urlencode({"query": query, "start": end - seconds, "end": end, "step": seconds / 120})
    with urllib.request.urlopen(f"{prometheus}/api/v1/query_range?{words}") as answer:
        found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return found


def panel(given: dict[str, Any], found: list[dict[str, Any]], end: float, seconds: float) -> list[str]:
    """One panel of the dashboard: axes, a line and a word for each series."""
    place, (divisor, form) = given["gridPos"], UNITS[given["fieldConfig"]["defaults"]["unit"]]
    x, y, wide, high = place["x"] * 26.7 + 64, place["y"] * 27 + 40, place["w"] * 26.7 - 84, place["h"] * 27 - 98
    numbers = [(series, [(at, float(value)) for at, value in series["values"]]) for series in found]
    most = max((value for _, each in numbers for _, value in each if value < HUGE), default=1.0) or 1.0
    parts = [text(x - 58, y - 14, given["title"], 'font-weight="bold"')]
    for part in (0, 0.5, 1):
        level = y + high * (1 - part)
        parts.append(f'<path d="M{x:.0f},{level:.0f}h{wide:.0f}" stroke="#dddddd"/>')
        number = form.format(float(f"{most * part / divisor:.2g}"))
        parts.append(text(x - 5, level + 4, number, 'text-anchor="end" font-size="11"'))
        middle = x + wide * part
        parts.append(text(middle, y + high + 16, f"{seconds * part:g} s", 'text-anchor="middle" font-size="11"'))
    for k, (series, each) in enumerate(numbers):
        dots = [(x + wide * (1 - (end - at) / seconds), y + high * (1 - value / most)) for at, value in each]
        line = " ".join(f"{right:.0f},{down:.0f}" for right, down in dots if abs(down) < HUGE)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{LINES[k % 4]}" stroke-width="1.8"/>')
        legend = given["targets"][0]["legendFormat"]
        for label, value in series["metric"].items():
            legend = legend.replace(f"{{{{{label}}}}}", value)
        parts += [bar(x, y + high + 26 + 16 * k, 14, 4, LINES[k % 4]), text(x + 20, y + high + 33 + 16 * k, legend)]
    return parts


def jobs(prometheus: str, seconds: float) -> str:
    """The dashboard over the last `seconds`."""
    end, panels = time.time(), json.loads(DASHBOARD.read_text())["panels"]
    parts = []
    for each in panels:
        parts += panel(each, ask(prometheus, each["targets"][0]["expr"], end, seconds), end, seconds)
    height = max(each["gridPos"]["y"] + each["gridPos"]["h"] for each in panels) * 27
    return sheet(height, "Jobs that share a store: the dashboard of docs/grafana.json", parts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("step", "jobs"))
    parser.add_argument("source", help="a trace; the address of a Prometheus")
    parser.add_argument("svg", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long a time to draw")
    given = parser.parse_args()
    given.svg.write_text({"step": step, "jobs": jobs}[given.what](given.source, given.seconds))
