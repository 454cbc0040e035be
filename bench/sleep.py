"""How long `umem.sleep` and `umem.wake` take, against the bytes over the link's bandwidth.

    python bench/sleep.py [--bytes 4GiB] [--rounds 5] [--json FILE]

On a GPU: wall-clock time, beside copies of as many bytes to and from pinned memory in the same run.
Elsewhere: virtual time on the software device, beside the rates of its profile.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import umem
from umem.native import core
from umem.units import MIB, format_bytes, parse_bytes

BLOCK = 32 * MIB


def timed(act: Callable[[], object], now_us: Callable[[], float]) -> float:
    begin = now_us()
    act()
    return now_us() - begin


def measure(nbytes: int, rounds: int, device: str, now_us: Callable[[], float]) -> dict[str, Any]:
    """Medians, in microseconds, of sleeping and of waking until all bytes are back."""
    torch_device = "cuda" if device == "cuda" else "cpu"
    blocks = [torch.full((BLOCK // 4,), float(i), device=torch_device)
              for i in range(nbytes // BLOCK)]  # fmt: skip

    def wait() -> None:
        torch.cuda.synchronize() if device == "cuda" else core.driver.cuCtxSynchronize()

    def woken() -> None:
        umem.wake()
        wait()

    rows = []
    for _ in range(rounds + 1):
        wait()
        rows.append((timed(umem.sleep, now_us), timed(woken, now_us)))
        assert all(float(block[-1]) == i for i, block in enumerate(blocks))
    out, back = zip(*rows[1:], strict=True)  # the first one makes the host's pages
    return {
        "bytes": len(blocks) * BLOCK,
        "first_sleep_us": rows[0][0],
        "sleep_us": statistics.median(out),
        "wake_us": statistics.median(back),
    }


def pinned_us(nbytes: int, rounds: int, now_us: Callable[[], float]) -> tuple[float, float]:
    """Medians of copies out and in, one block again and again, for as many bytes."""
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


def run(nbytes: int, rounds: int) -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "soft"
    name = torch.cuda.get_device_name() if device == "cuda" else "soft:h200-pcie5"
    with umem.enable(device="cuda" if device == "cuda" else name, budget=nbytes + 256 * MIB,
                     host_budget="unlimited", policy="lru"):  # fmt: skip
        clock = (lambda: time.perf_counter() * 1e6) if device == "cuda" else core.driver.now_us
        result = measure(nbytes, rounds, device, clock)
        if device == "cuda":
            out, back = pinned_us(result["bytes"], rounds, clock)
        else:
            (profile,) = (row for row in core.profiles() if row["name"] == "h200-pcie5")
            out = result["bytes"] / profile["gb_per_s_out"] / 1e3
            back = result["bytes"] / profile["gb_per_s_in"] / 1e3
    return {
        "device": name, "clock": "wall" if device == "cuda" else "virtual",
        "torch": torch.__version__, "python": platform.python_version(), "rounds": rounds,
        **result, "link_out_us": out, "link_in_us": back,
        "sleep_ratio": result["sleep_us"] / out, "wake_ratio": result["wake_us"] / back,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", type=parse_bytes, default=256 * MIB)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.bytes < BLOCK or args.rounds < 1:
        parser.error(f"at least {format_bytes(BLOCK)} and one round")
    result = run(args.bytes, args.rounds)
    print(
        f"{result['device']}: {format_bytes(result['bytes'])}, sleep {result['sleep_us'] / 1e3:.2f}"
        f" ms ({result['sleep_ratio']:.3f} of the link), wake {result['wake_us'] / 1e3:.2f} ms "
        f"({result['wake_ratio']:.3f}), {result['clock']} time"
    )
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
