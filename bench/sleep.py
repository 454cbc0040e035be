"""Times of `umem.sleep` and `umem.wake`, against the bytes over the link's bandwidth.

    python bench/sleep.py [--bytes 4GiB] [--rounds 5] [--out FOLDER] [--smoke]

Writes sleep_<hardware>_<date>.{json,md}. On a GPU: wall-clock time, next to copies of as many bytes
to and from pinned memory in the same run. Elsewhere: virtual time on the software device, next to
the rates of its profile.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from harness import Report, Result, Spread, add_outputs, cases, results_folder
from inside import inside

import umem
from umem.base.native import core
from umem.base.progress import Advance, over
from umem.base.units import MIB, format_bytes, parse_bytes

BLOCK = 32 * MIB
TARGET = 1.2  # relative to the bytes over the link's bandwidth
SOFT = "h200-pcie5"


def timed(act: Callable[[], object], now_us: Callable[[], float]) -> float:
    begin = now_us()
    act()
    return now_us() - begin


def measure(
    nbytes: int, rounds: int, device: str, now_us: Callable[[], float], advance: Advance
) -> list[tuple[float, float]]:
    """Return µs of sleeping and of waking all bytes; the first round creates the host's pages."""
    torch_device = "cuda" if device == "cuda" else "cpu"
    blocks = [torch.full((BLOCK // 4,), float(i), device=torch_device)
              for i in range(nbytes // BLOCK)]  # fmt: skip

    def wait() -> None:
        torch.cuda.synchronize() if device == "cuda" else inside.cuCtxSynchronize()

    def woken() -> None:
        umem.wake()
        wait()

    rows = []
    for _ in over(range(rounds + 1), advance):
        wait()
        rows.append((timed(umem.sleep, now_us), timed(woken, now_us)))
        assert all(float(block[-1]) == i for i, block in enumerate(blocks))
    return rows


def pinned_us(nbytes: int, rounds: int, now_us: Callable[[], float]) -> tuple[float, float]:
    """Medians of repeated copies of one block out and in, for as many bytes."""
    there = torch.empty(BLOCK, dtype=torch.uint8, device="cuda")
    here = torch.empty(BLOCK, dtype=torch.uint8, pin_memory=True)

    def copies(target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        def act() -> None:
            for _ in range(nbytes // BLOCK):
                target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()

        return act

    ways = []
    for target, source in ((here, there), (there, here)):
        act = copies(target, source)
        act()
        ways.append(statistics.median(timed(act, now_us) for _ in range(rounds)))
    return ways[0], ways[1]


def run(nbytes: int, rounds: int) -> Report:
    nbytes = nbytes // BLOCK * BLOCK
    device = "cuda" if torch.cuda.is_available() else "soft"
    name = "cuda" if device == "cuda" else f"soft:{SOFT}"
    with umem.enable(device=name, budget=nbytes + 256 * MIB, host_budget="unlimited",
                     policy="lru"):  # fmt: skip
        if device == "cuda":  # the question initialises CUDA, which has to come after umem
            name = torch.cuda.get_device_name()
        clock = (lambda: time.perf_counter() * 1e6) if device == "cuda" else inside.now_us
        with cases(rounds + 1) as advance:
            rows = measure(nbytes, rounds, device, clock, advance)
        if device == "cuda":
            links = pinned_us(nbytes, rounds, clock)
        else:
            (profile,) = (row for row in core.profiles() if row["name"] == SOFT)
            links = nbytes / profile["gb_per_s_out"] / 1e3, nbytes / profile["gb_per_s_in"] / 1e3
    time_of = "wall-clock" if device == "cuda" else "virtual"
    report = Report("sleep", {"device": name, "bytes": nbytes, "rounds": rounds, "time": time_of})
    for what, link, values in zip(("sleep", "wake"), links, zip(*rows, strict=True), strict=True):
        steady = values[1:]
        ratio = Spread.of([value / link for value in steady])
        report.results += [
            Result(f"{what}, of the link", ratio, "x", TARGET, f"link {link / 1e3:.2f} ms"),
            Result(what, Spread.of([value / 1e3 for value in steady]), "ms"),
        ]
        report.details[what] = {"us": values, "link_us": link}
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", type=parse_bytes, default=256 * MIB)
    parser.add_argument("--rounds", type=int, default=5)
    add_outputs(parser)
    args = parser.parse_args()
    if args.bytes < BLOCK or args.rounds < 1:
        parser.error(f"at least {format_bytes(BLOCK)} and one round")
    folder = results_folder(parser, args)
    report = run(BLOCK if args.smoke else args.bytes, 1 if args.smoke else args.rounds)
    print(report.markdown())
    if folder is not None:
        print("\n".join(map(str, report.write(folder))))


if __name__ == "__main__":
    main()
