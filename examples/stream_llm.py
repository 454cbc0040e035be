"""Decode with a language model whose weights are four times the device's budget.

    python examples/stream_llm.py --budget 25%

Writes a checkpoint of a small Llama-like model with random weights, decodes with it in memory, in a
process without umem, and then under umem: the model is created on torch's device `meta`, loaded
tensor by tensor, and its weights pass through the budget once per token. Prints whether the tokens
are the same, and a step's time relative to the link's minimum for the bytes beyond the budget.
Without a GPU the device is umem's software device, whose clock counts transfers only: its compute
takes no time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import umem
from umem.analysis import bounds
from umem.base import current_device
from umem.base.device_profiles import DeviceProfile
from umem.base.units import format_bytes, parse_bytes, parse_percent
from umem.trace.step_builder import read_step

VOCABULARY, CONTEXT, BATCH, HEAD = 2048, 128, 2, 64
START_UP = 9  # steps: the prompt, one recorded, those that try plans, and what these leave


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, 1e-5)


def rotate(x: Tensor, start: int) -> Tensor:
    """Rotary positions `start` and on of [batch, heads, length, HEAD]."""
    place = torch.arange(start, start + x.shape[2], device=x.device)
    angle = place[:, None] / 10000.0 ** (torch.arange(0, HEAD, 2, device=x.device) / HEAD)
    cos, sin = angle.cos(), angle.sin()
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


class Block(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(dim), RMSNorm(dim)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor, cache: Tensor, start: int) -> Tensor:
        """`cache`: [keys or values, batch, heads, CONTEXT, HEAD]; new ones start at `start`."""
        end = start + x.shape[1]
        y = self.norm1(x)
        parts = (part(y).unflatten(-1, (-1, HEAD)) for part in (self.q, self.k, self.v))
        q, k, v = (part.transpose(1, 2) for part in parts)  # [batch, heads, length, HEAD]
        cache[0, :, :, start:end] = rotate(k, start)
        cache[1, :, :, start:end] = v
        y = F.scaled_dot_product_attention(
            rotate(q, start), cache[0, :, :, :end], cache[1, :, :, :end], is_causal=start == 0
        )
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, layers: int, dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList(Block(dim, dim * 5 // 2) for _ in range(layers))
        self.norm = RMSNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, caches: list[Tensor], start: int) -> Tensor:
        x = self.embedding(tokens)
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, cache, start)
        scores: Tensor = self.head(self.norm(x[:, -1:]))
        return scores


class Decoder:
    """Greedy decoding: each step adds a token to each text."""

    def __init__(self, net: Llama, dim: int, device: str) -> None:
        self.net = net
        shape = (2, BATCH, dim // HEAD, CONTEXT, HEAD)
        self.caches = [torch.zeros(shape, device=device) for _ in net.blocks]
        self.texts = torch.arange(BATCH * 8, device=device).view(BATCH, 8)  # the prompt
        self.done = 0  # tokens that are in the caches

    @torch.inference_mode()
    def step(self) -> None:
        new = self.texts[:, self.done :]
        scores = self.net(new, self.caches, self.done)
        self.done += new.shape[1]
        self.texts = torch.cat((self.texts, scores.argmax(-1)), 1)


class Step(NamedTuple):
    """Time and traffic of one token of each text."""

    us: float  # on the software device: in virtual time, including waits
    bytes_in: int
    bytes_out: int
    planned: bool  # every operator followed the plan


def in_memory(checkpoint: Path, options: argparse.Namespace) -> list[list[int]]:
    """Generate the tokens without umem."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net = Llama(options.layers, options.dim).to(device)
    net.load_state_dict(torch.load(checkpoint, mmap=True))
    decoder = Decoder(net, options.dim, device)
    for _ in range(options.tokens):
        decoder.step()
    return decoder.texts.tolist()


def streamed(checkpoint: Path, options: argparse.Namespace) -> tuple[list[list[int]], list[Step]]:
    """Generate the tokens under umem; return them and the steps."""
    with torch.device("meta"):  # nothing is allocated
        net = Llama(options.layers, options.dim)
    loaded = umem.load_checkpoint(net, checkpoint)
    host = umem.stats().peak_host_bytes
    print(f"loaded {format_bytes(loaded.bytes)}, at most {format_bytes(host)} of it on the host")
    decoder = Decoder(net, options.dim, net.head.weight.device.type)
    umem.tag(decoder.caches, "kv_cache")
    steps = []
    for _ in range(options.tokens):
        before, clock = umem.stats(), time.perf_counter()
        decoder.step()
        umem.step()  # so that it ends here, not at the start of the next token
        if net.head.weight.is_cuda:
            torch.cuda.synchronize()
        now = umem.stats()
        us = (time.perf_counter() - clock) * 1e6
        steps.append(
            Step(
                us if net.head.weight.is_cuda else now.stall_us - before.stall_us,
                now.bytes_in - before.bytes_in,
                now.bytes_out - before.bytes_out,
                now.plan_hits > before.plan_hits and now.plan_misses == before.plan_misses,
            )
        )
    return decoder.texts.tolist(), steps


def report(steps: list[Step], trace: Path, budget: int, device: DeviceProfile) -> None:
    """Print the settled steps next to the lower bound of any schedule."""
    settled = steps[START_UP:]
    step = read_step(trace)
    least = bounds.lower_bound_bytes_in(step, budget)
    floor = least / device.bytes_per_us_in
    if torch.cuda.is_available():
        floor = bounds.closed_form_floor(step, device, budget).us
    us = sum(step.us for step in settled) / len(settled)
    count = sum(step.planned for step in settled)
    last = settled[-1]
    print(
        f"{count} of {len(settled)} settled steps by a plan: {format_bytes(last.bytes_in)} in, "
        f"{format_bytes(last.bytes_out)} out; no schedule has less than {format_bytes(least)} in"
    )
    ratio = f": ratio {us / floor:.3f}" if floor else ""  # nothing has to move
    print(f"step {us / 1e3:.2f} ms, floor {floor / 1e3:.2f} ms{ratio}")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", default="25%", help="of the weights, or as 96MiB")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dim", type=int, default=1024, help=f"a multiple of {HEAD}")
    parser.add_argument("--tokens", type=int, default=24, help=f"more than {START_UP}")
    parser.add_argument("--policy", default="auto", help="such as stream_layers, lru")
    parser.add_argument("--in-memory", type=Path, metavar="CHECKPOINT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not START_UP < options.tokens <= CONTEXT - 8 or options.dim % HEAD:
        parser.error(f"--tokens: {START_UP + 1} to {CONTEXT - 8}; --dim: a multiple of {HEAD}")
    return options


def main() -> None:
    options = parsed()
    torch.set_num_threads(1)  # sums over another number of threads have other last bits
    torch.manual_seed(0)
    if options.in_memory:
        print(json.dumps(in_memory(options.in_memory, options)))
        return
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, trace = Path(folder) / "model.pt", Path(folder) / "trace.jsonl"
        net = Llama(options.layers, options.dim)
        weights = sum(weight.nbytes for weight in net.parameters())
        torch.save(net.state_dict(), checkpoint)
        del net
        command = [sys.executable, __file__, *sys.argv[1:], "--in-memory", str(checkpoint)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
        expected = json.loads(done.stdout)

        share = parse_percent(options.budget)
        budget = parse_bytes(options.budget) if share is None else int(weights * share / 100)
        print(f"weights {format_bytes(weights)}, budget {format_bytes(budget)}")
        device = "cuda" if torch.cuda.is_available() else "soft:a100-pcie4"
        with umem.enable(device=device, budget=budget, policy=options.policy, trace=trace):
            tokens, steps = streamed(checkpoint, options)
            profile = current_device.profile()
        print(f"policy {options.policy} on {profile.name}")
        report(steps, trace, budget, profile)
        print(f"tokens identical: {'yes' if tokens == expected else 'NO'}")
    if tokens != expected:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
