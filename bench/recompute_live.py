"""umem.optimize against plain torch and checkpoints: ``python bench/recompute_live.py [--smoke]``.

One CPU thread, everything fits: the cost and the savings of dropping and rebuilding. Writes
bench/results/recompute-live_<hardware>_<date>.{json,md}.
"""

from __future__ import annotations

import argparse
import copy
import gc
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from harness import (
    Report,
    Result,
    Spread,
    add_outputs,
    cases,
    differences,
    interleave,
    ratios,
    results_folder,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import umem
from umem.base.progress import Advance
from umem.base.units import MIB
from umem.recompute.executor.forward import Prepared, dropping
from umem.recompute.optimize import report as report_of

OPS = 200


@dataclass(frozen=True)
class Config:
    """Benchmark parameters and repetitions."""

    rounds: int = 9
    layers: int = 4
    width: int = 256
    length: int = 256
    batch: int = 8
    channels: int = 32
    image: int = 48
    images: int = 16
    micro_rounds: int = 15


SMOKE = Config(rounds=2, layers=2, length=64, image=16, micro_rounds=2)


class Attention(nn.Module):
    """A block of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width),
        )  # fmt: skip
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(),
            nn.Linear(4 * width, width), nn.Dropout(0.1),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (8, -1)).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        out: torch.Tensor = x + self.mlp(x)
        return out


class Residual(nn.Module):
    """A block of a ResNet."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True), nn.Conv2d(channels, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu_(self.body(x) + x)


class Checkpointed(nn.Module):
    """The same blocks, each under a checkpoint of torch."""

    def __init__(self, blocks: nn.Sequential) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            out = checkpoint(block, x, use_reentrant=False)
            assert isinstance(out, torch.Tensor)
            x = out
        return x


def nets(config: Config) -> dict[str, tuple[nn.Sequential, torch.Tensor]]:
    """Nets by name, with their inputs."""
    blocks = (Attention(config.width) for _ in range(config.layers))
    residuals = (Residual(config.channels) for _ in range(config.layers))
    size = (config.images, config.channels, config.image, config.image)
    return {
        "transformer": (
            nn.Sequential(*blocks), torch.randn(config.batch, config.length, config.width),
        ),
        "resnet": (nn.Sequential(*residuals), torch.randn(size)),
    }  # fmt: skip


def step(net: nn.Module, x: torch.Tensor) -> float:
    """Seconds of a step."""
    net.zero_grad()
    begin = time.perf_counter()
    net(x).square().mean().backward()
    return time.perf_counter() - begin


def peak(net: nn.Module, x: torch.Tensor) -> int:
    """Return the max bytes alive in a step, minus those alive before it."""
    step(net, x)
    net.zero_grad()
    gc.collect()
    before = umem.stats().live_bytes
    umem.reset_peak_stats()
    step(net, x)
    return umem.stats().peak_live_bytes - before


def compare(
    name: str, made: tuple[nn.Sequential, torch.Tensor], rounds: int, report: Report, *,
    advance: Advance,
) -> None:  # fmt: skip
    """Step times and peaks of one net's variants."""
    plain, x = made
    checkpointed = Checkpointed(copy.deepcopy(plain))
    target = peak(checkpointed, x)
    probe = umem.optimize(copy.deepcopy(plain), mode="recompute", budget="100%")
    for _ in range(2):  # the second has a plan, from the first
        step(probe, x)
    expected = report_of(probe).expected
    assert expected is not None
    # The planner counts the model and its inputs too, which were there before the step.
    held = sum(t.untyped_storage().nbytes() for t in (*plain.parameters(), *plain.buffers(), x))
    share = 100 * (target + held) / expected.peak_bytes
    del probe
    variants: dict[str, nn.Module] = {
        "plain": plain,
        "checkpoint per block": checkpointed,
        "optimize, per_block": umem.optimize(copy.deepcopy(plain), mode="per_block"),
        "optimize, recompute, the checkpoints' peak": umem.optimize(
            copy.deepcopy(plain), mode="recompute", budget=f"{share:.2f}%"
        ),
    }
    peaks = {variant: peak(net, x) for variant, net in variants.items()}
    times = interleave(
        {variant: lambda net=net: step(net, x) for variant, net in variants.items()},  # type: ignore[misc]
        rounds,
        advance,
    )
    for variant in variants:
        if variant != "plain":
            spread = ratios(times[variant], times["plain"])
            note = f"peak {peaks[variant] / peaks['plain']:.2f} of plain's"
            report.results.append(Result(f"{name}: {variant}, step", spread, "x", note=note))
    report.details[name] = {
        "peak_bytes": peaks,
        "seconds": times,
        "dropped_bytes": {
            variant: report_of(net).dropped_bytes
            for variant, net in variants.items()
            if variant.startswith("optimize")
        },
    }


def micro(rounds: int, report: Report, advance: Advance) -> None:
    """Measure the overhead of an op that is observed, and of one that is dropped and rebuilt."""
    from umem.recompute.planner.plan import RecomputePlan

    x = torch.randn(16, requires_grad=True)
    names = ("aten.tanh.default",) * OPS

    def run(plan: Prepared | None) -> Callable[[], float]:
        def timed() -> float:
            begin = time.perf_counter()
            y = x
            if plan is None:
                for _ in range(OPS):
                    y = y.tanh()
            else:
                with dropping(plan):
                    for _ in range(OPS):
                        y = y.tanh()
            y.sum().backward()
            return (time.perf_counter() - begin) / OPS * 1e6

        return timed

    candidates = {
        "plain": run(None),
        "kept": run(Prepared(RecomputePlan(names, ()))),
        "dropped": run(Prepared(RecomputePlan(names, tuple(range(OPS))))),
    }
    for candidate in candidates.values():
        candidate()
    times = interleave(candidates, rounds, advance)
    base = times["plain"]
    report.results += [
        Result("an op, forward and backward: plain", Spread.of(base), "us"),
        Result("more where its result is kept", differences(times["kept"], base), "us"),
        Result("more where it is dropped and rebuilt", differences(times["dropped"], base), "us"),
    ]


def main() -> None:
    """Run all and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_outputs(parser)
    args = parser.parse_args()
    folder = results_folder(parser, args)
    config = SMOKE if args.smoke else Config()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    report = Report("recompute-live", asdict(config))
    with umem.enable(budget=1024 * MIB, device="soft", policy="none"):
        with cases(config.micro_rounds) as advance:
            micro(config.micro_rounds, report, advance)
        made = nets(config)
        with cases(len(made) * config.rounds) as advance:
            while made:
                name = next(iter(made))
                compare(name, made.pop(name), config.rounds, report, advance=advance)
    print(report.markdown())
    if folder is not None:
        print("\n".join(map(str, report.write(folder))))


if __name__ == "__main__":
    main()
