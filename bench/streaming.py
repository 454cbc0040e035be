"""Weights larger than the budget: ``python bench/streaming.py [--smoke]``, on the software device.

The peak memory of ways to load a checkpoint, each in a new process, and a step of
examples/stream_llm.py against a lower bound for all schedules. Writes
bench/results/streaming_<hardware>_<date>.{json,md}.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness import Report, Result, Spread, add_outputs, cases, output_of, results_folder, table

from umem.base.progress import over
from umem.base.units import MIB, format_bytes

HERE = Path(__file__).resolve().parent
WIDTH, LAYER = 1024, 4 * MIB
WAYS = {  # by the kind of file
    "pt": ("load_checkpoint", "torch.load", "torch.load, mmap", "torch.load, assign"),
    "safetensors": ("load_checkpoint", "safetensors.load_file", "safetensors.safe_open"),
}


@dataclass(frozen=True)
class Config:
    """Benchmark parameters and repetitions."""

    rounds: int = 5
    layers: int = 64  # of 4 MiB, in the checkpoint
    budget: int = 64 * MIB
    decodes: tuple[tuple[str, ...], ...] = (
        ("--budget=25%",),
        ("--budget=10%",),
        ("--budget=50%",),
        ("--budget=25%", "--layers=16"),
        ("--budget=25%", "--policy=stream_layers"),
        ("--budget=25%", "--policy=lru"),
    )


SMOKE = Config(1, 16, 16 * MIB, (("--budget=25%", "--layers=2", "--tokens=11"),))


def made(layers: int) -> Any:
    """Build a model of `layers` weights of 4 MiB."""
    import torch

    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))


def save(folder: Path, layers: int) -> list[str]:
    """Checkpoints of all kinds that can be written here: the kinds."""
    import torch

    state = made(layers).state_dict()
    torch.save(state, folder / "model.pt")
    if importlib.util.find_spec("safetensors") is None:
        return ["pt"]
    from safetensors.torch import save_file

    save_file(state, folder / "model.safetensors")
    return ["pt", "safetensors"]


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"/proc/self/status has no {name}")


def _ways(path: Path, net: Any) -> dict[str, Callable[[], object]]:
    import torch

    import umem

    def whole() -> None:
        from safetensors.torch import load_file

        net.to_empty(device="cpu").load_state_dict(load_file(path))

    def one_by_one() -> None:
        from safetensors import safe_open

        net.to_empty(device="cpu")
        with safe_open(path, "pt") as file, torch.no_grad():
            for name, weight in net.state_dict(keep_vars=True).items():
                weight.copy_(file.get_tensor(name))

    return {
        "load_checkpoint": lambda: umem.load_checkpoint(net, path),
        "torch.load": lambda: net.to_empty(device="cpu").load_state_dict(torch.load(path)),
        "torch.load, mmap": lambda: net.to_empty(device="cpu").load_state_dict(
            torch.load(path, mmap=True)
        ),
        "torch.load, assign": lambda: net.load_state_dict(torch.load(path), assign=True),
        "safetensors.load_file": whole,
        "safetensors.safe_open": one_by_one,
    }


def load(way: str, path: Path, config: Config) -> dict[str, float]:
    """Load in this process; return the seconds, and the max bytes held beyond the start."""
    import torch

    import umem
    import umem.offload.checkpoint.load

    torch.set_num_threads(1)
    umem.enable(device="soft", budget=config.budget, policy="lru")
    with torch.device("meta"):
        net = made(config.layers)
    act = _ways(path, net)[way]
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts over
    before, clock = _status("VmRSS"), time.perf_counter()
    act()
    seconds = time.perf_counter() - clock
    stats = umem.stats()
    return {
        "seconds": seconds,
        "rss_bytes": _status("VmHWM") - before,
        "umem_bytes": stats.peak_host_bytes + stats.peak_resident_bytes,
    }


def child(*arguments: str) -> str:
    """Run Python in a new process and return its output; it has no GPU, as the report says."""
    return output_of([sys.executable, *arguments], env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})


def loads(config: Config, smoke: bool, report: Report) -> None:
    """Run all ways in turn, each in its own process."""
    total = config.layers * LAYER
    with tempfile.TemporaryDirectory() as folder:
        kinds = save(Path(folder), config.layers)
        rows: dict[str, list[dict[str, float]]] = {}
        each = [(kind, way) for kind in kinds for way in WAYS[kind]] * config.rounds
        with cases(len(each)) as advance:
            for kind, way in over(each, advance):
                arguments = [__file__, "--load", way, f"{folder}/model.{kind}"]
                out = child(*arguments, *(["--smoke"] if smoke else []))
                rows.setdefault(f".{kind}: {way}", []).append(json.loads(out))
    report.details["loads"] = rows
    for name, found in rows.items():
        held = Spread.of([row["rss_bytes"] / total for row in found])
        ours = "load_checkpoint" in name
        books = max(row["umem_bytes"] for row in found) / total
        seconds = Spread.of([row["seconds"] for row in found]).median
        note = f"{books:.2f} of the checkpoint by umem's books; {seconds:.2f} s"
        target = 1.1 if ours else None
        report.results.append(Result(f"{name}, memory", held, "x", target, note))


def decodes(config: Config, report: Report) -> None:
    """Run the example unchanged."""
    rows = []
    with cases(len(config.decodes)) as advance:
        example = str(HERE.parent / "examples" / "stream_llm.py")
        outs = [child(example, *arguments) for arguments in over(config.decodes, advance)]
    for arguments, out in zip(config.decodes, outs, strict=True):
        found = re.search(r"step ([0-9.]+) ms, floor ([0-9.]+) ms: ratio ([0-9.]+)", out)
        moved = re.search(r"plan: (.*) in, (.*) out; .* less than (.*) in", out)
        assert found is not None
        assert moved is not None
        assert "tokens identical: yes" in out
        name = " ".join(arguments)
        rows.append((name, *moved.groups(), *found.groups()))
        target = 1.1 if arguments == ("--budget=25%",) else None
        ratio = Spread.of([float(found[3])])
        report.results.append(Result(f"stream_llm.py {name}, step over floor", ratio, "x", target))
    report.details["decodes"] = rows
    header = ("stream_llm.py", "in a step", "out", "least in", "step, ms", "floor, ms", "ratio")
    report.sections += table(header, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_outputs(parser)
    parser.add_argument("--load", nargs=2, metavar=("WAY", "PATH"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    config = SMOKE if options.smoke else Config()
    if options.load:
        print(json.dumps(load(options.load[0], Path(options.load[1]), config)))
        return
    folder = results_folder(parser, options)
    checkpoint = format_bytes(config.layers * LAYER)
    report = Report("streaming", {**asdict(config), "checkpoint": checkpoint})
    loads(config, options.smoke, report)
    decodes(config, report)
    print(report.markdown())
    if folder is not None:
        print("\n".join(map(str, report.write(folder))))


if __name__ == "__main__":
    main()
