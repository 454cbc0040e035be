"""The page of a large trace: the time to make it, to show it and to move in it:
``bench/report.py``.

Makes traces of a synthetic training of about a million events, as 20 steps and as one, writes their
pages with `umem report`, and opens them in a headless Chromium: the first paint, and the frames
while the view moves and zooms continuously. Needs Chromium.

Writes report_<hardware>_<date>.{json,md} to bench/results.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from facts import ROOT
from harness import Report, Result, Spread, add_outputs, cases, note, output_of, results_folder

from umem.base.progress import Advance, over
from umem.base.units import MIB
from umem.trace.ids import BlockId, block_ids
from umem.trace.schema import Alloc, Event, Free, Header, Op, Step
from umem.trace.writer import Writer

sys.path.append(str(ROOT / "tools"))
import browser

MAKE_S, SIZE_MB, PAINT_MS, FRAME_MS = 10.0, 5.0, 1000.0, 1000 / 30
# In every frame the view is another one; a second of moving, a second of zooming.
MOVE = """
new Promise((done) => {
  const frames = [], { show } = window.umemReport, whole = 1 << 20, begun = performance.now();
  const next = (now) => {
    frames.push(now);
    const t = (performance.now() - begun) / 1000;
    if (t > 2) return done(frames);
    const width = t < 1 ? whole / 4 : whole / (1 + 60 * (t - 1));
    const at = ((t * 0.37) % 1) * (whole - width);
    show(at, at + width);
    requestAnimationFrame(next);
  };
  requestAnimationFrame(next);
})
"""


PAINT = """
new Promise((done) => new PerformanceObserver((list) => {
  const found = list.getEntriesByName("first-contentful-paint")[0];
  if (found) done(found.startTime);
}).observe({ type: "paint", buffered: true }))
"""


class Case(NamedTuple):
    """A trace: the number of steps, and of layers in each."""

    name: str
    steps: int
    layers: int
    rounds: int


CASES = (
    Case("20 steps of 50,000 events", 20, 7_092, 3),
    Case("1 step of 1,000,000 events", 1, 125_000, 3),
)
SMALL = (Case("2 steps of 700 events", 2, 100, 1),)


def events(case: Case) -> Iterator[Event]:
    """Yield a training: weights, activations that are kept, gradients; 7 events a layer."""
    ids = block_ids()
    sizes = [16 * MIB, 8 * MIB, 300 << 10, 64 * MIB, 5 * MIB]
    weights = [next(ids) for _ in range(case.layers)]
    for weight in weights:
        yield Alloc(weight, 4 * MIB, "param", "linear")
    yield Step()
    for _ in range(case.steps):
        kept: list[BlockId] = []
        for layer, weight in enumerate(weights):
            made = next(ids)
            origin = {"module": f"layers.{layer}", "line": f"net.py:{layer % 90 + 1}"}
            yield Alloc(made, sizes[layer % 5], "activation", "linear", extra=origin)
            reads = (weight, *kept[-1:])
            yield Op("aten::mm", reads, (made,), 153.25, family="linear")
            kept.append(made)
        gradient = None
        for layer in reversed(range(case.layers)):
            grown = next(ids)
            yield Alloc(grown, sizes[layer % 5], "temp", "linear")
            reads = (weights[layer], kept[layer], *(() if gradient is None else (gradient,)))
            yield Op("aten::mm_backward", reads, (grown,), 306.5, family="linear")
            if gradient is not None:
                yield Free(gradient)
            yield Free(kept[layer])
            gradient = grown
        assert gradient is not None
        yield Free(gradient)
        for weight in weights:
            yield Op("aten::add_", (weight,), (weight,), 20.5)
        yield Step()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench/report.py", description=__doc__)
    add_outputs(parser)
    args = parser.parse_args(argv)
    folder = results_folder(parser, args)
    path = browser.find()
    if path is None:
        parser.error("no Chromium is installed: apt-get install chromium")
    page = Report("report", {"chromium": _version(path), "window": "1280 x 900, no GPU"})
    with tempfile.TemporaryDirectory() as work:
        chosen = SMALL if args.smoke else CASES
        with cases(sum(case.rounds for case in chosen)) as advance:
            for case in chosen:
                note(case.name)
                page.results += measured(case, Path(work), path, advance)
    print(page.markdown())
    if folder is not None:
        print("\n".join(map(str, page.write(folder))))
    return 0


def measured(case: Case, work: Path, chromium: str, advance: Advance) -> list[Result]:
    """Make a page, and open it in a new browser each time."""
    trace, out = work / "t.jsonl.gz", work / "t.html"
    with Writer(trace, Header("a100-pcie4", "bench/report.py", case.name)) as writer:
        count = 0
        for event in events(case):
            writer.write(event)
            count += 1
    seconds, worked, paints, frames = [], [], [], []
    for _ in over(range(case.rounds), advance):
        begun, before = time.perf_counter(), _processor_s()
        output_of([sys.executable, "-m", "umem", "report", str(trace), "--out", str(out)])
        seconds.append(time.perf_counter() - begun)
        worked.append(_processor_s() - before)
        paint, times = shown(out, chromium)
        paints.append(paint)
        frames += [after - before for before, after in itertools.pairwise(times)]
    size = out.stat().st_size / 1e6
    note = f"{count:,} events"
    return [
        Result(f"{case.name}: to make the page", Spread.of(seconds), "s", MAKE_S, note),
        # The time on an otherwise idle machine: the two differ if other processes run.
        Result(f"{case.name}: processor time of that", Spread.of(worked), "s"),
        Result(f"{case.name}: size", Spread.of([size]), "MB", SIZE_MB),
        Result(f"{case.name}: first paint", Spread.of(paints), "ms", PAINT_MS),
        Result(f"{case.name}: a frame, moving and zooming", Spread.of(frames), "ms", FRAME_MS),
    ]


def shown(page: Path, chromium: str) -> tuple[float, list[float]]:
    """Return the milliseconds until the first paint, and when each frame of two seconds began."""
    with browser.started(chromium) as started:
        tab = started.tab()
        tab.size(1280, 900)
        tab.open(page)
        paint = tab.run(PAINT)
        times = tab.run(MOVE)
        if tab.problems:
            raise SystemExit(f"the page has errors: {tab.problems}")
    return float(paint), [float(one) for one in times]


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _version(path: str) -> str:
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    raise SystemExit(main())
