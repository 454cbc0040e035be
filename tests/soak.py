"""Train for a long time in ways that change, with umem and without: flat memory, and equal bits.

python tests/soak.py [--minutes M] [--out FILE]

Two processes train the same network at the same time: one without umem, one with it at a part of
its peak. Batch sizes and lengths change with each step; every few steps there is an evaluation, a
budget that changes, or a checkpoint from which everything is rebuilt. At each checkpoint both write
a digest of losses and parameters, and the resources of the process: resident memory, mappings, open
files. The digests have to be equal, and the resources must not grow.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

MIB = 1 << 20
PLAIN, WITH = "plain", "umem"
BUDGETS_MIB = (24, 32, 48, 64)  # of a peak of about 200
WIDTH, VOCABULARY, LAYERS = 256, 512, 4
BUDGET_EVERY, EVALUATE_EVERY, CHECKPOINT_EVERY = 4, 6, 8
# The allowed growth from beginning to end. If a program leaks a tensor, a mapping or a file with
# each checkpoint, it exceeds this within minutes.
MORE = {"rss_mib": 32.0, "mappings": 64.0, "files": 2.0}
FEW = 6  # with fewer checkpoints than this, growth cannot be judged


def make_net() -> Any:
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
            self.recurrent = torch.nn.LSTM(WIDTH, WIDTH, batch_first=True)
            layer = torch.nn.TransformerEncoderLayer(
                WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True
            )
            self.blocks = torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
            self.head = torch.nn.Linear(WIDTH, VOCABULARY)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            hidden, _ = self.recurrent(self.embed(tokens))
            return self.head(self.blocks(hidden))

    return Net()


def make(state: dict[str, Any] | None) -> tuple[Any, Any]:
    """A network and its optimizer, from the state of earlier ones where there is one."""
    import torch

    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    if state is not None:
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
    return net, optimizer


def loss_of(net: Any, shapes: random.Random) -> Any:
    import torch

    batch, length = shapes.choice((4, 8, 12)), shapes.choice((32, 48, 64))
    tokens = torch.randint(VOCABULARY, (batch, length + 1))
    logits = net(tokens[:, :-1])
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def held() -> dict[str, float]:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "rss_mib": pages * os.sysconf("SC_PAGE_SIZE") / MIB,
        "mappings": float(len(Path("/proc/self/maps").read_text().splitlines())),
        "files": float(len(list(Path("/proc/self/fd").iterdir()))),
    }


def work(kind: str, seconds: float, folder: Path) -> None:
    """Train for so long; at each checkpoint, one line of JSON."""
    import torch

    import umem

    torch.set_num_threads(1)
    if kind == WITH:
        umem.enable(budget=BUDGETS_MIB[-1] * MIB, device="soft")
    torch.manual_seed(0)
    net, optimizer = make(None)
    shapes, budgets = random.Random(1), random.Random(2)
    digest = hashlib.sha256()
    end = time.monotonic() + seconds
    step = 0
    while step == 0 or time.monotonic() < end:
        for _ in range(CHECKPOINT_EVERY):
            step += 1
            if kind == WITH and step % BUDGET_EVERY == 0:
                umem.set_budget(budgets.choice(BUDGETS_MIB) * MIB)
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            loss = loss_of(net, shapes)
            loss.backward()
            optimizer.step()
            digest.update(loss.detach().numpy().tobytes())
            if step % EVALUATE_EVERY == 0:
                net.eval()
                with torch.no_grad():
                    digest.update(loss_of(net, shapes).numpy().tobytes())
                net.train()
        path = folder / f"{kind}.pt"
        state = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state | {"rng": torch.get_rng_state()}, path)
        del net, optimizer, loss, state
        net, optimizer = make(torch.load(path, weights_only=True))
        for parameter in net.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        row = {"step": step, "digest": digest.hexdigest(), **held()}
        if kind == WITH:
            stats = umem.stats()
            row |= {"bytes_in": stats.bytes_in, "hook_errors": stats.hook_errors}
        print(json.dumps(row), flush=True)


def growth(rows: Sequence[dict[str, Any]], name: str) -> float:
    """How much more the last third holds than the one before, by medians; the first is a start."""
    third = max(1, len(rows) // 3)
    middle, last = rows[third : 2 * third] or rows[:1], rows[-third:]
    return statistics.median(r[name] for r in last) - statistics.median(r[name] for r in middle)


def judge(with_umem: Sequence[dict[str, Any]], plain: Sequence[dict[str, Any]]) -> list[str]:
    """Return the differences, in words; empty if there are none."""
    wrong = [
        f"step {ours['step']}: the digests differ"
        for ours, theirs in zip(with_umem, plain, strict=False)
        if ours["digest"] != theirs["digest"]
    ][:1]
    if errors := with_umem[-1]["hook_errors"]:
        wrong.append(f"{errors} errors in hooks")
    if len(with_umem) < FEW:
        return wrong
    wrong.extend(
        f"{name} grew by {more:.0f} between the second third and the last"
        for name, most in MORE.items()
        if (more := growth(with_umem, name)) > most
    )
    return wrong


def soak(minutes: float) -> dict[str, Any]:
    """The lines of both processes, and what is wrong with them.

    Raises:
        RuntimeError: a process failed; with its errors.
    """
    with tempfile.TemporaryDirectory() as folder:

        def lines_of(kind: str) -> list[dict[str, Any]]:
            done = subprocess.run(
                [*command, "--folder", folder, "--worker", kind],
                text=True, env=environ, capture_output=True, check=False,
            )  # fmt: skip
            if done.returncode != 0:
                said = done.stderr[-4000:]
                raise RuntimeError(f"{kind} ended with {done.returncode}:\n{said}")
            return [json.loads(line) for line in done.stdout.splitlines()]

        command = [sys.executable, __file__, "--minutes", str(minutes)]
        environ = {k: v for k, v in os.environ.items() if k.split("_")[0] != "UMEM"}
        with ThreadPoolExecutor() as both:
            rows = dict(zip((WITH, PLAIN), both.map(lines_of, (WITH, PLAIN)), strict=True))
    return {
        "minutes": minutes,
        "steps": {kind: lines[-1]["step"] for kind, lines in rows.items()},
        "compared": min(map(len, rows.values())),
        "gib_in": round(rows[WITH][-1]["bytes_in"] / (1 << 30), 1),
        "first": {name: rows[WITH][0][name] for name in MORE},
        "last": {name: rows[WITH][-1][name] for name in MORE},
        "growth": {name: growth(rows[WITH], name) for name in MORE},
        "wrong": judge(rows[WITH], rows[PLAIN]),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--out", type=Path, help="write the result to this file, as JSON")
    parser.add_argument("--worker", choices=(WITH, PLAIN), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        work(options.worker, 60 * options.minutes, options.folder)
        return 0
    result = soak(options.minutes)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    print("; ".join(result["wrong"]) or "flat and identical")
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
