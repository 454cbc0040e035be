"""Training and inference in a part of their memory, with umem's disk: ``python bench/disk.py``.

Each way is a process in a control group. Training: the limit is 1/2 or 1/3 of plain torch's peak
memory; umem has a disk and a budget of that limit less the process's other memory, and plain torch
a swap file on the same disk. Plain torch and umem without limits are the measure, and the least
time that any order of transfers needs, at the rates that the disk had in that run. Inference
(``weights``): the budget is 1/2 or 1/4 of the weights; umem leaves them in their checkpoint, and
plain torch maps the checkpoint (``torch.load(mmap=True)``). Needs root, and control groups v1.
Writes a report for each network, bench/results/disk-<network>_<hardware>_<date>.{json,md}.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from harness import (
    Report,
    Result,
    Spread,
    add_outputs,
    cases,
    interleave,
    note,
    output_of,
    ratios,
    results_folder,
)

from umem.base.units import GIB, MIB, format_bytes

NETS = ("gpt", "unet", "resnet", "lstm", "bert", "weights")
GROUPS = Path("/sys/fs/cgroup/memory")
OTHER = 400 * MIB  # of the process, beside tensors: torch's code, Python, scratch memory
SWAP = 6 * GIB
SHARES = {"1/2": 0.5, "1/3": 1 / 3}
SHARES_OF_WEIGHTS = {"1/2": 0.5, "1/4": 0.25}
# Steps; umem records and plans in its first ones.
WARM_UP = {"plain": 1, "swap": 1, "umem": 5, "traced": 5, "disk": 5, "mapped": 1, "in file": 5}
STEPS = {"plain": 4, "swap": 1, "umem": 4, "traced": 1, "disk": 4, "mapped": 2, "in file": 4}
FASTER = {"1/2": 3.0, "1/3": 5.0}  # than swap
# Than in RAM, if transfers take a third of the time of the operators at most; else than the floor.
SLOWER_THAN_RAM, SLOWER_THAN_FLOOR = 1.05, 1.15
CPU_MS_A_GB = 50.0
MOST_RSS = 1.05  # of plain torch's, with all in RAM
FASTER_THAN_MAPPED, MOST_READ = 3.0, 1.15  # the latter of the weights beyond the budget


def loss_of(net_name: str, small: bool) -> tuple[Any, Any]:
    """Return the model and a function from a generator to the loss of a new batch."""
    import torch
    from nets import CheckpointedEncoder, ResNet50, UNet
    from torch.nn import functional as F  # noqa: N812  (torch's own convention)

    from umem.demo.nets import GPT

    if net_name == "gpt":  # 118 M parameters: optimizer states move most
        gpt = GPT(8192, 128, 1 if small else 8, 1024, 16)

        def of_text(random: torch.Generator) -> Any:
            tokens = torch.randint(0, 8192, (1, 129), generator=random)
            return F.cross_entropy(gpt(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

        return gpt, of_text
    if net_name == "bert":  # 168 M parameters; layers are recomputed
        bert = CheckpointedEncoder(8192, 1024, 16, 1 if small else 12)

        def of_masked(random: torch.Generator) -> Any:
            tokens = torch.randint(0, 8192, (1, 128), generator=random)
            return F.cross_entropy(bert(tokens).flatten(0, 1), tokens.flatten())

        return bert, of_masked
    if net_name == "lstm":  # 105 M parameters; one operator a pass
        lstm = torch.nn.LSTM(1280, 1280, 1 if small else 8)

        def of_sequences(random: torch.Generator) -> Any:
            return lstm(torch.randn(16, 16, 1280, generator=random))[0].square().mean()

        return lstm, of_sequences
    if net_name == "resnet":
        resnet = ResNet50(64, (3, 4, 6, 3), 1000)

        def of_photos(random: torch.Generator) -> Any:
            photos = torch.randn(2 if small else 24, 3, 160, 160, generator=random)
            return F.cross_entropy(resnet(photos), torch.arange(len(photos)))

        return resnet, of_photos
    unet = UNet(16, 4, 2)  # activations move most

    def of_images(random: torch.Generator) -> Any:
        images = torch.randn(2 if small else 10, 3, 256, 256, generator=random)
        return F.cross_entropy(unet(images), images[:, 0].gt(0).long())

    return unet, of_images


def model_of_weights(small: bool) -> Any:
    """Return a GPT of 0.4 G parameters, 1.6 GB."""
    from umem.demo.nets import GPT

    return GPT(8192, 128, 1 if small else 32, 1024, 16)


def infer(way: str, budget: int, disk: str, small: bool) -> None:
    """Infer in this process from a checkpoint, and print the steps' times and outputs as JSON."""
    import torch

    import umem

    checkpoint = Path(disk, "model.pt")
    if way == "save":
        torch.manual_seed(0)
        net = model_of_weights(small)
        torch.save(net.state_dict(), checkpoint)
        print(json.dumps({"weights": sum(weight.nbytes for weight in net.parameters())}))
        return
    if budget:
        umem.enable(budget=budget, device="soft", disk=disk)
    with torch.device("meta"):
        net = model_of_weights(small)
    if budget:
        umem.load_checkpoint(net, checkpoint, keep_in_file=True)
    else:
        net.load_state_dict(torch.load(checkpoint, mmap=True), assign=True)
    random = torch.Generator().manual_seed(1)
    rows = []
    outputs = []
    with torch.inference_mode():
        for _ in range(WARM_UP[way] + STEPS[way]):
            tokens = torch.randint(0, 8192, (1, 16), generator=random)
            begin, cpu = time.perf_counter(), time.process_time()
            outputs.append(net(tokens).sum().item().hex())
            read = umem.stats().disk_bytes_in if budget else 0
            rows.append((time.perf_counter() - begin, time.process_time() - cpu, read))
    settled = rows[WARM_UP[way] :]
    found: dict[str, Any] = {
        "seconds": [row[0] for row in settled],
        "cpu_seconds": [row[1] for row in settled],
        "outputs": outputs,
    }
    if budget:
        found["bytes_in"] = (rows[-1][2] - rows[WARM_UP[way] - 1][2]) // STEPS[way]
        found["disk_bytes_out"] = umem.stats().disk_bytes_out
        found["budget_bytes"] = umem.stats().budget_bytes
    print(json.dumps(found))


def trace_of(net_name: str, folder: str) -> Path:
    """Return the file of the network's trace."""
    return Path(folder, f"{net_name}.jsonl.gz")


def worker(net_name: str, way: str, budget: int, disk: str, small: bool) -> None:
    """Train in this process, and print the steps' times and the losses as JSON."""
    import resource

    import torch

    import umem

    torch.manual_seed(0)
    if budget:
        trace = trace_of(net_name, disk) if way == "traced" else None
        folder = disk if way == "disk" else None
        umem.enable(budget=budget, device="soft", disk=folder, trace=trace)
    net, loss = loss_of(net_name, small)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    random = torch.Generator().manual_seed(1)
    warm_up, steps = WARM_UP[way], STEPS[way]
    rows: list[tuple[float, float]] = []
    losses = []
    on_disk = ("disk_bytes_in", "disk_bytes_out", "disk_busy_in_us", "disk_busy_out_us")
    for number in range(warm_up + steps):
        if number == warm_up:
            Path("/proc/self/clear_refs").write_text("5")  # the peak is of settled steps
            before = {name: getattr(umem.stats(), name) for name in on_disk} if budget else {}
        begin, cpu = time.perf_counter(), time.process_time()
        value = loss(random)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item().hex())
        rows.append((time.perf_counter() - begin, time.process_time() - cpu))
    status = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in status)
    found: dict[str, Any] = {
        "seconds": [row[0] for row in rows[warm_up:]],
        "cpu_seconds": [row[1] for row in rows[warm_up:]],
        "losses": losses,
        "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        "settled_peak_rss": int(fields["VmHWM"].split()[0]) << 10,
    }
    if way == "traced":
        umem.disable()
    elif budget:
        stats = umem.stats()
        names = ("faults", "stall_us", "plan_hits", "plan_misses", "peak_live_bytes")
        found |= {name: getattr(stats, name) for name in names}
        found |= {name: (getattr(stats, name) - before[name]) / steps for name in on_disk}
    print(json.dumps(found))


@contextlib.contextmanager
def swapping(folder: str) -> Iterator[None]:
    """Swap to a file on the same disk within."""
    path = Path(folder, "swap")
    output_of(["fallocate", "-l", str(SWAP), str(path)])
    path.chmod(0o600)
    output_of(["mkswap", str(path)])
    output_of(["swapon", str(path)])
    try:
        yield
    finally:
        output_of(["swapoff", str(path)])
        path.unlink()


def limited(command: Sequence[str], limit: int) -> str:
    """Run the command in a control group with this much memory; 0 for no limit."""
    if not limit:
        return output_of(command)
    group = GROUPS / "umem-bench"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit))
        join = f'echo $$ > {group}/cgroup.procs && exec "$@"'
        return output_of(["sh", "-c", join, "sh", *command])
    finally:
        time.sleep(0.5)  # the kernel removes its last process
        group.rmdir()


def measured(net: str, way: str, limit: int, folder: str, small: bool) -> dict[str, Any]:
    """Train once in a process of its own."""
    low = limit - OTHER
    budget = {"umem": 8 * GIB, "traced": 8 * GIB, "disk": low, "in file": low}.get(way, 0)
    note(f"{net}, {way}, {format_bytes(limit) if limit else 'no limit'}")
    words = [net, way, str(budget), folder]
    command = [sys.executable, __file__, "--worker", *words, *(["--smoke"] if small else [])]
    with swapping(folder) if way == "swap" else contextlib.nullcontext():
        found: dict[str, Any] = json.loads(limited(command, limit))
    return {"net": net, "way": way, "limit": limit, **found}


def compare(net: str, rounds: int, folder: str, small: bool) -> list[dict[str, Any]]:
    """Run all ways in turn, `rounds` times."""
    peak = measured(net, "plain", 0, folder, small)["peak_rss"]
    shares = {"1/1": 0, **{name: int(peak * share) // MIB * MIB for name, share in SHARES.items()}}
    if small:
        shares = {"1/1": 0, "1/2": OTHER + 128 * MIB}
    turns = [
        (share, way)
        for share in shares
        for way in (("plain", "umem") if share == "1/1" else ("disk", "swap"))
    ]

    def run(share: str, way: str) -> dict[str, Any]:
        return {"share": share, **measured(net, way, shares[share], folder, small)}

    rows = in_turns(turns, rounds, run)
    measured(net, "traced", 0, folder, small)
    trace = trace_of(net, folder)
    for row in rows:
        if row["way"] == "disk":
            row["floor"] = floor_of(trace, row)
    trace.unlink()
    return rows


def floor_of(trace: Path, row: dict[str, Any]) -> dict[str, float]:
    """Return what the step needs at least at the rates that the disk had, over its operators'.

    ``ratio`` is that; ``transfers`` the time of both directions together, over the operators'.
    """
    rates = [
        1e-3 * row[f"disk_bytes_{way}"] / max(row[f"disk_busy_{way}_us"], 1.0) or 1e3  # none: any
        for way in ("in", "out")
    ]
    words = ["--device", "cpu-disk", "--link", ",".join(f"{rate:.6g}" for rate in rates)]
    budget = row["limit"] - OTHER
    command = [sys.executable, "-m", "umem", "replay", str(trace), *words, "--json"]
    step = json.loads(output_of([*command, "--budget", str(budget)]))
    busy = row["disk_busy_in_us"] + row["disk_busy_out_us"]
    return {
        "ratio": step["floor_us"] / step["compute_us"],
        "transfers": busy / step["compute_us"],
        "gb_per_s_in": rates[0],
        "gb_per_s_out": rates[1],
        "budget": step["budget"],  # raised where an operator needs more
    }


def in_turns(
    turns: Sequence[tuple[str, str]], rounds: int, run: Callable[[str, str], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Run each share and way once a round; return the rows, those of one way in their order."""
    candidates = {" ".join(turn): functools.partial(run, *turn) for turn in turns}
    with cases(rounds) as advance:
        found = interleave(candidates, rounds, advance)
    return list(itertools.chain.from_iterable(found.values()))


def drop_cached(path: Path) -> None:
    """Take the file out of the page cache, where it would be another control group's."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def compare_weights(rounds: int, folder: str, small: bool) -> list[dict[str, Any]]:
    """Infer both ways in turn, `rounds` times, each in all shares."""
    weights = measured("weights", "save", 0, folder, small)["weights"]
    shares = {"1/2": 0.5} if small else SHARES_OF_WEIGHTS
    turns = [(share, way) for share in shares for way in ("in file", "mapped")]

    def run(share: str, way: str) -> dict[str, Any]:
        limit = OTHER + int(weights * shares[share]) // MIB * MIB
        drop_cached(Path(folder, "model.pt"))
        row = measured("weights", way, limit, folder, small)
        return {"share": share, "weights": weights, **row}

    return in_turns(turns, rounds, run)


def check_agreement(name: str, what: str, rows: list[dict[str, Any]]) -> None:
    """Check that all rows have the same numbers, as far as each goes.

    Raises:
        SystemExit: they differ.
    """
    longest = max((row[what] for row in rows), key=len)
    for row in rows:
        if row[what] != longest[: len(row[what])]:
            raise SystemExit(f"{name}: the {what} differ")


def results_of_weights(rows: list[dict[str, Any]]) -> list[Result]:
    """Return the figures of inference; a ratio compares medians of the same round."""
    check_agreement("weights", "outputs", rows)
    found = []
    for share in sorted({row["share"] for row in rows}, reverse=True):

        def of(way: str, share: str = share) -> list[dict[str, Any]]:
            return [row for row in rows if (row["share"], row["way"]) == (share, way)]

        kept, mapped = (
            [1e3 * Spread.of(row["seconds"]).median for row in of(way)]
            for way in ("in file", "mapped")
        )
        row = of("in file")[-1]
        beyond = row["weights"] - row["budget_bytes"]
        read = Spread.of([each["bytes_in"] / beyond for each in of("in file")])
        written = Spread.of([each["disk_bytes_out"] / MIB for each in of("in file")])
        found += [
            Result(f"weights, budget {share}, written", written, "MiB", 0.0, "by all of a process"),
            Result(f"weights, budget {share}, in the file", Spread.of(kept), "ms", note="a step"),
            Result(f"weights, budget {share}, mapped", Spread.of(mapped), "ms", note="a step"),
            Result(
                f"weights, budget {share}, in the file over mapped", ratios(kept, mapped), "x",
                1 / FASTER_THAN_MAPPED, f"weights {format_bytes(row['weights'])}",
            ),
            Result(
                f"weights, budget {share}, read over the least", read, "x", MOST_READ,
                f"budget {format_bytes(row['budget_bytes'])}",
            ),
        ]  # fmt: skip
    return found


def results_of(net: str, rows: list[dict[str, Any]]) -> list[Result]:
    """Return the figures of one network; a ratio compares medians of the same round."""
    check_agreement(net, "losses", rows)

    def medians(share: str, way: str, what: str = "seconds") -> list[float]:
        return [
            Spread.of(row[what]).median
            for row in rows
            if (row["share"], row["way"]) == (share, way)
        ]

    plain, in_ram = medians("1/1", "plain"), medians("1/1", "umem")
    rss = {
        way: [row["settled_peak_rss"] for row in rows if row["way"] == way]
        for way in ("umem", "plain")
    }
    found = [
        Result(f"{net}, plain torch", Spread.of(plain), "s"),
        Result(f"{net}, umem, no limit", ratios(in_ram, plain), "x", note="of plain torch"),
        Result(
            f"{net}, umem, no limit, peak RSS of settled steps", ratios(rss["umem"], rss["plain"]),
            "x", MOST_RSS, "of plain torch",
        ),
    ]  # fmt: skip
    for share in SHARES:
        disk, swap = medians(share, "disk"), medians(share, "swap")
        if not disk:
            continue
        of_disk = [row for row in rows if (row["share"], row["way"]) == (share, "disk")]
        row = of_disk[-1]
        written = row["disk_bytes_out"]
        cpu, base = medians(share, "disk", "cpu_seconds"), medians("1/1", "umem", "cpu_seconds")
        moved = [1e-9 * (each["disk_bytes_in"] + each["disk_bytes_out"]) for each in of_disk]
        a_gb = Spread.of(
            [1e3 * (on - off) / gb for on, off, gb in zip(cpu, base, moved, strict=True)]
        )
        floors = [each["floor"] for each in of_disk]
        hides = all(3 * floor["transfers"] <= 1 for floor in floors)
        over = ratios(
            disk, [each * floor["ratio"] for each, floor in zip(in_ram, floors, strict=True)]
        )
        rates = "read {gb_per_s_in:.2g}, wrote {gb_per_s_out:.2g} GB/s".format(**floors[-1])
        found += [
            Result(
                f"{net} in {share}, disk", ratios(disk, in_ram), "x",
                SLOWER_THAN_RAM if hides else None, "of umem, no limit",
            ),
            Result(
                f"{net} in {share}, disk over the floor", over, "x",
                None if hides else SLOWER_THAN_FLOOR, rates,
            ),
            Result(f"{net} in {share}, disk, processor time", ratios(cpu, base), "x"),
            Result(
                f"{net} in {share}, disk, processor time of transfers", a_gb, "ms/GB", CPU_MS_A_GB,
            ),
            Result(
                f"{net} in {share}, disk over swap", ratios(disk, swap), "x", 1 / FASTER[share],
                f"limit {format_bytes(row['limit'])}, wrote {format_bytes(int(written))} a step",
            ),
        ]  # fmt: skip
    return found


def draw(net: str, rows: list[dict[str, Any]], path: Path) -> None:
    """Draw each way's median step; nothing without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return
    words = {"plain": "plain PyTorch", "disk": "umem with a disk", "swap": "plain PyTorch, swap"}
    bars = {
        f"{words[way]}, {'all of its memory' if share == '1/1' else share + ' of the memory'}": (
            Spread.of([second for row in found for second in row["seconds"]]).median,
            {"plain": "grey", "disk": "steelblue", "swap": "indianred"}[way],
        )
        for share in ("1/1", *SHARES)
        for way in words
        if (found := [row for row in rows if (row["share"], row["way"]) == (share, way)])
    }
    figure = Figure(figsize=(7.0, 0.9 + 0.36 * len(bars)), layout="constrained")
    axes = figure.subplots()
    drawn = axes.barh(list(bars), [each[0] for each in bars.values()])
    for bar, (_, colour) in zip(drawn, bars.values(), strict=True):
        bar.set_color(colour)
    axes.bar_label(drawn, fmt="%.1f s", padding=3)
    axes.margins(x=0.15)
    axes.invert_yaxis()
    axes.set_xlabel(f"seconds for a training step, {net}")
    figure.savefig(path, dpi=90)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_outputs(parser)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--nets", nargs="+", choices=NETS, default=NETS)
    parser.add_argument("--disk", default="/var/tmp", help="a folder on the disk (%(default)s)")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        net, way, budget, disk = options.worker
        if net == "weights":
            infer(way, int(budget), disk, options.smoke)
        else:
            worker(net, way, int(budget), disk, options.smoke)
        return
    folder = results_folder(parser, options)
    if os.geteuid() != 0 or not GROUPS.is_dir():
        note("skipped: it needs root, and control groups v1 (swap files, limits)")
        return
    config = {"rounds": options.rounds, "disk": options.disk, "other": OTHER}
    with tempfile.TemporaryDirectory(dir=options.disk) as disk:
        for net in options.nets:
            report = Report(f"disk-{net}", config)
            rounds = 1 if options.smoke else options.rounds
            if net == "weights":
                rows = compare_weights(rounds, disk, options.smoke)
                report.results += results_of_weights(rows)
            else:
                rows = compare(net, rounds, disk, options.smoke)
                report.results += results_of(net, rows)
            report.details[net] = rows
            print(report.markdown())
            if folder is not None:
                data, page = report.write(folder)
                print(f"{data}\n{page}")
                draw(net, rows, data.with_suffix(".png"))


if __name__ == "__main__":
    main()
