"""Swapping, recomputing and updates on the host, in virtual time: ``python bench/recompute.py``.

Writes recompute_<hardware>_<date>.{json,md} to bench/results. Figures of virtual time are the same
on every machine; only planning times are this machine's.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import recompute_capuchin as capuchin
import recompute_partitioner as partitioner
from harness import Report, Result, Spread, add_outputs, cases, note, results_folder, table
from policies.ratios import geomean
from policies.report import Target

from umem.analysis import bounds
from umem.base.device_profiles import HOST_BYTES_PER_US, DeviceProfile
from umem.base.progress import over
from umem.base.units import GIB, PAGE_BYTES
from umem.errors import NotSupportedError
from umem.policies import registry
from umem.recompute.planner.bound import lower_bound_us
from umem.recompute.planner.candidates import Checkpoints, per_block
from umem.recompute.planner.graph import RecomputeGraph
from umem.recompute.planner.host_updates import SHARES, candidates
from umem.recompute.planner.modes import RecomputePlanner, graph_of
from umem.recompute.planner.rewrite import Rewritten, rewrite
from umem.simulation import replay
from umem.trace.step_trace import StepTrace

Row = dict[str, Any]

HERE = Path(__file__).resolve().parent
WORK = HERE.parent / "build" / "bench-policies"  # the traces of bench/policies
# Choices other than umem's modes; the tensors that they keep are swapped in the same way.
TORCH = "torch"  # the best choice of its partitioner
HYBRID = "hybrid"  # drops cheap results, as umem's mode `speed`, and swaps the others
CAPUCHIN = "capuchin"
HOST = "host"  # mode auto, and a share of the optimizer's updates on the host
MODES = ("swap", "recompute", "per_block", TORCH, HYBRID, CAPUCHIN, "auto", HOST)
NETS = ("resnet50_b128", "densenet121_b96", "unet_b8_512", "bert_base_b64", "gpt2_medium_b8",
        "vit_l_b64", "unet3d_b2_128", "translation_b32", "diffusion_b64",
        "llama_1b_b8")  # fmt: skip
SIX = NETS[:6]  # that the targets of updates on the host are for
# Not compared with torch's partitioner, whose graph decomposes an op, or refuses a constant.
UNLIKE = ("unet3d_b2_128", "diffusion_b64", "llama_1b_b8")
SMOKE = ("resnet_smoke",)
DEVICES = ("a100-pcie4", "h200-pcie5")
# Shares of the peak; the last is raised to 1.25 of the largest op.
FRACTIONS = ("1/2", "1/3", "1/4")
LARGEST = Fraction(5, 4)
MEAN, MOST = 1.05, 1.15  # step over the bound of the linear program
CUT = 4.0  # times less activations of ResNet-50 by recomputing alone
PLAN_S = 1.0
# With updates on the host: step over compute, the mean of SIX at each share; single networks.
MEAN_HOST = {"1/2": 1.09, "1/3": 1.15, "1/4": 1.20}
MOST_HOST = {("gpt2_medium_b8", "1/3"): 1.30, ("gpt2_medium_b8", "1/4"): 1.35,
             ("llama_1b_b8", "1/3"): 1.25, ("unet_b8_512", "1/4"): 1.22}  # fmt: skip
MEAN_HOST_BOUND = 1.05
NOT_SLOWER = 1.01  # than the best of the fixed shares
NEVER_SLOWER = 1.001  # over the better of swapping and recomputing alone


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench/recompute.py", description=__doc__)
    parser.add_argument("--workload", nargs="+", help="only these of bench/policies/workloads.py")
    parser.add_argument("--device", nargs="+", default=list(DEVICES))
    add_outputs(parser)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--work", type=Path, default=WORK, help="traces (build/)")
    args = parser.parse_args(argv)
    folder = results_folder(parser, args)
    names = args.workload or (SMOKE if args.smoke else NETS)
    begin = time.monotonic()
    with ProcessPoolExecutor(min(args.jobs, len(names))) as pool:
        parts = pool.map(partial(_workload, devices=args.device, work=args.work), names)
        with cases(len(names)) as advance:
            both = list(zip(*over(parts, advance), strict=True))
    rows, beside = ([row for part in half for row in part] for half in both)
    page = report(
        rows, beside, {"workloads": ", ".join(names), "seconds": round(time.monotonic() - begin)}
    )
    print(page.markdown())
    if folder is not None:
        print("\n".join(map(str, page.write(folder))))
    return 0


def _workload(name: str, devices: Sequence[str], work: Path) -> tuple[list[Row], list[Row]]:
    """Plan one network on all devices, in any process, and compare with torch's partitioner."""
    from policies.traces import Traces
    from policies.workloads import WORKLOADS

    traces = Traces(name, work)
    joint = None if name in UNLIKE else partitioner.joint_graph(WORKLOADS[name].make)
    rows: list[Row] = []
    beside: list[Row] = []
    for device in devices:
        profile, step = traces.on(device)
        graph, _ = graph_of(step, traces.recording)
        found = [] if joint is None else list(partitioner.choices(joint, graph))
        where = {"workload": name, "device": device}
        beside += [{**where, **row} for row in partitioner.compared(graph, profile, found)]
        for fraction, budget in _budgets(step):
            about = {**where, "fraction": fraction, "budget": budget}
            rows += [{**about, **row} for row in measured(graph, profile, budget, found)]
            note(f"{name}, {device}, {fraction}")
        rows[-1]["activation_cut"] = activation_cut(graph)
    return rows, beside


def _budgets(step: StepTrace) -> Iterator[tuple[str, int]]:
    least = max(int(bounds.largest_op(step).bytes * LARGEST), replay.min_budget(step))
    for fraction in FRACTIONS:
        wanted = int(step.peak_bytes * Fraction(fraction))
        raised = "*" if wanted < least else ""
        yield fraction + raised, max(wanted, least) // PAGE_BYTES * PAGE_BYTES


def measured(
    graph: RecomputeGraph, device: DeviceProfile, budget: int, found: Sequence[partitioner.Choice]
) -> Iterator[Row]:
    """Each way to choose, planned and replayed."""
    step = graph.step
    begin = time.process_time()
    RecomputePlanner(graph, device, budget).plan("auto")
    plan_s = time.process_time() - begin
    try:
        bound = lower_bound_us(graph, device, budget)
    except NotSupportedError:
        bound = None
    planner = RecomputePlanner(graph, device, budget)
    for mode in MODES:
        done: replay.Recomputed | None
        if mode == HOST:
            yield _by_host(graph, device, budget)
            continue
        if mode == TORCH:
            done = (
                None
                if not found
                else _replayed(mode, partitioner.fastest(found, device, budget), device, budget)
            )
        elif mode == CAPUCHIN:
            done = _replayed(mode, capuchin.planned(graph, device, budget), device, budget)
        else:
            done = replay.simulate_recompute(planner, "speed" if mode == HYBRID else mode)
        row = {
            "mode": mode,
            "compute_us": step.compute_us,
            "peak_bytes": step.peak_bytes,
            "bound_us": bound,
            "plan_s": plan_s if mode == "auto" else None,
        }
        if done is not None:
            row |= {
                "step_us": done.result.step_us,
                "again_us": done.new.recompute_us,
                "peak_with": done.new.step.peak_bytes,
                "bytes_in": done.result.bytes_in,
                "bytes_out": done.result.bytes_out,
                "floor_us": done.result.floor_us,
            }
        yield row


def _by_host(graph: RecomputeGraph, device: DeviceProfile, budget: int) -> Row:
    """Plan updates on the host: the share that the planner chooses, and each fixed share."""
    begin = time.process_time()
    found = replay.simulate_updates(graph, device, budget)
    plan_s = time.process_time() - begin
    fixed = {
        f"{share:g}": replay.simulate_updates(graph, device, budget, share).step_us
        for share in SHARES
    }
    try:
        bound = lower_bound_us(graph, device, budget, candidates(graph.step).updates)
    except NotSupportedError:
        bound = None
    result = found.recomputed.result
    return {
        "mode": HOST,
        "compute_us": graph.step.compute_us,
        "peak_bytes": graph.step.peak_bytes,
        "bound_us": bound,
        "plan_s": None,
        "plan_host_s": plan_s,
        "share": found.share,
        "fixed_us": fixed,
        "step_us": result.step_us,
        "host_us": result.host_us,
        "again_us": found.recomputed.new.recompute_us,
        "peak_with": found.recomputed.new.step.peak_bytes,
        "bytes_in": result.bytes_in,
        "bytes_out": result.bytes_out,
        "floor_us": result.floor_us,
    }


def _replayed(mode: str, new: Rewritten, device: DeviceProfile, budget: int) -> replay.Recomputed:
    result = replay.replay_step(new.step, registry.DEFAULT, device, budget)
    return replay.Recomputed(mode, new, result)


def activation_cut(graph: RecomputeGraph) -> dict[str, float]:
    """Return how far recomputation alone lowers the activation peak, and its time."""
    nothing = np.zeros(graph.step.n_tensors, bool)
    whole = _activations(rewrite(graph, nothing, nothing, nothing))
    found = [rewrite(graph, *per_block(graph))]
    for count in (3, 4, 6, 8, 12):
        points = Checkpoints(graph, count)
        for share in (0.8, 0.9, 1.0):
            chosen = points.cheapest(share)
            found += [rewrite(graph, *chosen), rewrite(graph, *chosen._replace(free=~nothing))]
    cuts = [(whole / _activations(new), new.step.compute_us / graph.step.compute_us,
             bool(new.freed.any())) for new in found]  # fmt: skip
    enough = [one for one in cuts if one[0] >= CUT]
    cut, time_ratio, freed = min(enough, key=lambda one: one[1]) if enough else max(cuts)
    return {"cut": cut, "step_over_compute": time_ratio, "freed": float(freed)}


def _activations(new: Rewritten) -> int:
    """Return the peak of their live bytes."""
    step = new.step
    mine = np.array([tag == "activation" for tag in step.tags])
    return int(step.live_bytes_of(mine).max())


def report(rows: Sequence[Row], beside: Sequence[Row], config: dict[str, Any]) -> Report:
    """Return the tables and the targets."""
    page = Report("recompute", config)
    found = [*targets(rows), *partitioner.targets(beside)]
    cells = ((t.name, f"{t.value:.3f}", f"<= {t.most:g}", "yes" if t.reached else "**no**",
              t.where or "-") for t in found)  # fmt: skip
    header = ("figure", "value", "target", "reached", "where")
    page.sections = ["## Targets", "", *table(header, cells)]
    for device in dict.fromkeys(row["device"] for row in rows):
        page.sections += [f"## {device}", "", *_table(rows, device)]
    page.sections += partitioner.section(beside)
    page.details = {
        "rows": [_rounded(row) for row in rows],
        "beside": [_rounded(row) for row in beside],
        "targets": [asdict(target) for target in found],
    }
    times = [row["plan_s"] for row in rows if row["plan_s"] is not None]
    page.results.append(Result("planning, CPU time", Spread.of(times), "s", PLAN_S))
    return page


def _rounded(value: Any) -> Any:
    """Return the figures with six digits, which a page needs no more of."""
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value


def targets(rows: Sequence[Row]) -> list[Target]:
    """All, of each device."""
    found: list[Target] = []
    for device in dict.fromkeys(row["device"] for row in rows):
        mine = [r for r in rows if (r["device"], r["mode"]) == (device, "auto")]
        for share in FRACTIONS:
            here = [row for row in mine if row["fraction"].rstrip("*") == share]
            here = [row for row in here if row["bound_us"] is not None]
            if not here:
                continue
            worst = max(here, key=_over_bound)
            name = f"{device}: step / bound at {share}"
            found.append(Target(f"{name}, geomean", geomean(map(_over_bound, here)), MEAN))
            found.append(Target(f"{name}, highest", _over_bound(worst), MOST, worst["workload"]))
        found += _host_targets(device, rows)
        slower = [(row["step_us"] / _better(rows, row), row) for row in mine]
        ratio, row = max(slower, key=lambda pair: pair[0])
        name = f"{device}: step / the better of swap and recompute, highest"
        found.append(Target(name, ratio, NEVER_SLOWER, f"{row['workload']}, {row['fraction']}"))
        slowest = max(mine, key=lambda row: row["plan_s"])
        name = f"{device}: CPU seconds to plan, highest"
        where = f"{slowest['workload']}, {slowest['fraction']}"
        found.append(Target(name, slowest["plan_s"], PLAN_S, where))
    for row in rows:
        if row["workload"].startswith("resnet50") and "activation_cut" in row:
            cut, ratio = (row["activation_cut"][key] for key in ("cut", "step_over_compute"))
            name = f"{row['device']}: ResNet-50's activations left by recomputing alone"
            where = f"at {ratio:.2f} x compute"
            found.append(Target(name, 1 / cut, 1 / CUT, where))
    return found


def _host_targets(device: str, rows: Sequence[Row]) -> Iterator[Target]:
    mine = [row for row in rows if (row["device"], row["mode"]) == (device, HOST)]
    for share, most in MEAN_HOST.items():
        here = {row["workload"]: row for row in mine if row["fraction"].rstrip("*") == share}
        six = [_ratio(here[name]) for name in SIX if name in here]
        if six:
            name = f"{device}: with updates on the host, step / compute at {share}, geomean of six"
            yield Target(name, geomean(six), most)
        bounded = [_over_bound(row) for row in here.values() if row["bound_us"] is not None]
        if bounded:
            name = f"{device}: with updates on the host, step / bound at {share}, geomean"
            yield Target(name, geomean(bounded), MEAN_HOST_BOUND)
        for (workload, fraction), limit in MOST_HOST.items():
            if fraction == share and workload in here:
                name = f"{device}: with updates on the host, step / compute of {workload}"
                yield Target(name, _ratio(here[workload]), limit, share)
    if mine:
        slower = [(row["step_us"] / min(row["fixed_us"].values()), row) for row in mine]
        ratio, row = max(slower, key=lambda pair: pair[0])
        name = f"{device}: with updates on the host, step / the best fixed share, highest"
        yield Target(name, ratio, NOT_SLOWER, f"{row['workload']}, {row['fraction']}")


def _better(rows: Sequence[Row], row: Row) -> float:
    keys = ("workload", "device", "fraction")
    return min(
        other["step_us"]
        for other in rows
        if other["mode"] in ("swap", "recompute")
        and "step_us" in other
        and all(other[key] == row[key] for key in keys)
    )


def _ratio(row: Row) -> float:
    return float(row["step_us"] / row["compute_us"])


def _over_bound(row: Row) -> float:
    return float(row["step_us"] / row["bound_us"])


def _table(rows: Sequence[Row], device: str) -> list[str]:
    groups: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        if row["device"] == device:
            groups.setdefault((row["workload"], row["fraction"]), {})[row["mode"]] = row
    lines = []
    for (workload, fraction), by_mode in groups.items():
        best, host = by_mode["auto"], by_mode[HOST]
        ratios = ("-" if "step_us" not in by_mode[mode] else f"{_ratio(by_mode[mode]):.2f}"
                  for mode in MODES)  # fmt: skip
        bound, with_host = (
            "-" if row["bound_us"] is None else f"{row['bound_us'] / row['compute_us']:.2f}"
            for row in (best, host)
        )
        share = f"{best['budget'] / best['peak_bytes']:.3f}"
        again = f"{best['again_us'] / best['compute_us']:.0%}"
        moved = f"{best['bytes_in'] / GIB:.2f}/{best['bytes_out'] / GIB:.2f}"
        cells = (workload, fraction, share, *ratios, bound, with_host, f"{host['share']:.0%}",
                 again, moved, f"{best['plan_s']:.2f}", f"{host['plan_host_s']:.1f}")  # fmt: skip
        lines.append(cells)
    header = ("workload", "budget", "of peak", *MODES, "LP bound", "with host", "share",
              "run again", "GiB in/out", "planning s", "with host")  # fmt: skip
    text = (
        "Step over compute; `-`: no way found that fits. `*`: raised to 1.25 of the largest op. "
        "`host`: `auto` with this share of the optimizer's updates on the host, whose memory moves "
        f"{HOST_BYTES_PER_US / 1e3:g} GB/s; its own bound and planning time are next to those of "
        "`auto`, and compute is that of the step without it."
    )
    return [text, "", *table(header, lines)]


if __name__ == "__main__":
    raise SystemExit(main())
