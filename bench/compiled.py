"""Training steps compiled by torch.compile against eager ones: ``python bench/compiled.py``.

Each network is trained eagerly and compiled, at half of its own peak on the software device, with
one thread. Writes compiled_<hardware>_<date>.{json,md} to bench/results: the bytes that a step
moves, its page faults, and the share of its ops that followed a plan.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from typing import Any

import torch
from harness import (
    Report,
    Result,
    Spread,
    add_outputs,
    cases,
    note,
    output_of,
    quotient,
    results_folder,
    table,
)
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import umem
from umem.base.progress import over
from umem.base.stats import plan_hit_share
from umem.base.units import format_bytes
from umem.config.settings import child_environment

Row = dict[str, Any]

NETS = ("resnet", "gpt")
STEPS, LEARNING = 8, 2  # the first of them, before a plan
MOST = 1.1  # relative to the eager step's moved bytes


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms[0](self.first(x)))
        return F.relu(x + self.norms[1](self.second(y)))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.blocks = nn.Sequential(*(Residual(32) for _ in range(4)))
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.blocks(self.stem(images)).mean((2, 3))), labels)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.qkv(self.norms[0](x)).view(rows, length, 3, 4, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).reshape(rows, length, width))
        y: Tensor = self.down(F.gelu(self.up(self.norms[1](x))))
        return x + y


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(1024, 192)
        self.blocks = nn.ModuleList(Block(192) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(192), nn.Linear(192, 1024, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.tokens(x)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), y.flatten())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench/compiled.py", description=__doc__)
    parser.add_argument("--measure", choices=NETS, help="print the rows of one network as JSON")
    add_outputs(parser)
    args = parser.parse_args(argv)
    if args.measure:
        for row in measured(args.measure):
            print(json.dumps(row))
        return 0
    folder = results_folder(parser, args)
    nets = NETS[: 1 if args.smoke else None]
    with cases(len(nets)) as advance:
        page = report([row for net in over(nets, advance) for row in _apart(net)])
    print(page.markdown())
    if folder is not None:
        print("\n".join(map(str, page.write(folder))))
    return 0


def _apart(net: str) -> list[Row]:
    """Measure in a new process, which has compiled nothing."""
    note(net)
    command = [sys.executable, __file__, "--measure", net]
    found = output_of(command, env=child_environment())
    return [json.loads(line) for line in found.splitlines()]


def measured(net: str) -> list[Row]:
    """Train eagerly and compiled, each with all memory and then with half of its peak."""
    torch.set_num_threads(1)
    rows = []
    for compiles in (False, True):
        half = _train(net, compiles, "1GiB", LEARNING)["peak"] // 2
        rows.append({"net": net, "compiled": compiles, **_train(net, compiles, half, STEPS)})
    return rows


def _made(net: str) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    if net == "resnet":
        return ResNet(), (torch.randn(16, 3, 64, 64), torch.randint(0, 10, (16,)))
    return GPT(), (torch.randint(0, 1024, (32, 64)), torch.randint(0, 1024, (32, 64)))


def _train(net: str, compiles: bool, budget: str | int, steps: int) -> Row:
    torch.compiler.reset()
    umem.enable(budget=budget, device="soft", policy="auto")
    umem.reset_peak_stats()
    made, batch = _made(net)
    run = torch.compile(made) if compiles else made
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-3)
    loss = torch.zeros(())
    before = umem.stats()
    for i in range(steps):
        if i == LEARNING:
            before = umem.stats()
        loss = run(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    last = loss.item()
    now = umem.stats()
    hits, misses = (getattr(now, n) - getattr(before, n) for n in ("plan_hits", "plan_misses"))
    moved = now.bytes_in + now.bytes_out - before.bytes_in - before.bytes_out
    count = max(steps - LEARNING, 1)
    del made, run, optimizer, batch, loss
    torch.compiler.reset()
    gc.collect()
    umem.disable()
    return {
        "peak": now.peak_live_bytes,
        "budget": now.budget_bytes,
        "loss": last,
        "moved": moved / count,
        "hits": plan_hit_share(hits, misses) or 0.0,
        "faults": (now.faults - before.faults) / count,
    }


def report(rows: list[Row]) -> Report:
    """Return the table, and the moved bytes of compiled steps over those of eager ones."""
    page = Report("compiled", {"device": "soft", "steps": STEPS - LEARNING, "threads": 1})
    cells = (
        (
            row["net"],
            "compiled" if row["compiled"] else "eager",
            format_bytes(row["peak"]),
            format_bytes(round(row["moved"])),
            f"{row['faults']:.1f}",
            f"{100 * row['hits']:.1f} %",
        )
        for row in rows
    )
    head = ("network", "step", "peak", "moved in a step", "page faults", "ops as planned")
    page.sections = ["## Steps at half of the peak", "", *table(head, cells)]
    for eager, compiled in zip(rows[::2], rows[1::2], strict=True):
        ratio = quotient(compiled["moved"], eager["moved"])
        name = f"{eager['net']}: moved bytes, compiled / eager"
        page.results.append(Result(name, Spread.of([ratio]), "x", MOST))
    page.details = {"rows": rows}
    return page


if __name__ == "__main__":
    raise SystemExit(main())
