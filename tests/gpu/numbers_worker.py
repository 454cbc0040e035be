"""Trains one net repeatedly on the software driver, with kernels that compute.

python tests/gpu/numbers_worker.py NET POLICY [--budgets 1/2 ...] [--seeds 0 1 ...] [--steps N]

With the policy "plain" torch's own allocator serves it. Each line of the output is JSON: budget,
seed, the bytes of the peak, a digest of losses and parameters, the bytes moved, and races.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))
from softcuda import load  # noqa: E402

SOFT = load.load()
import torch  # noqa: E402
from support.cuda_nets import NETS  # noqa: E402

import umem  # noqa: E402

PLAIN = "plain"


def train(net: str, steps: int) -> str:
    """The digest of all losses and of the parameters after `steps` steps."""
    torch.manual_seed(0)
    training = NETS[net]("cuda")
    digest = hashlib.sha256()
    for _ in range(steps):
        digest.update(training.step().detach().cpu().numpy().tobytes())
    for parameter in training.model.parameters():
        digest.update(parameter.detach().float().cpu().numpy().tobytes())
    del training
    gc.collect()
    torch.cuda.synchronize()
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("net", choices=NETS)
    parser.add_argument("policy")
    parser.add_argument("--budgets", nargs="*", type=Fraction, default=[Fraction(1)])
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--backing", default="managed")
    parser.add_argument("--skip", help="a driver call that does nothing: a planted fault")
    parser.add_argument("--peak", type=int, default=0, help="bytes; of what budgets are parts")
    options = parser.parse_args()
    with_umem = options.policy != PLAIN
    if with_umem:
        umem.enable(budget="512MiB", policy=options.policy, device="cuda", backing=options.backing)
    load.compute()
    torch.set_num_threads(1)
    for budget in options.budgets:
        for seed in options.seeds:
            print(json.dumps(run(options, budget, seed, with_umem)), flush=True)


def run(options: argparse.Namespace, budget: Fraction, seed: int, with_umem: bool) -> Any:
    if with_umem:
        umem.set_budget(max(int(options.peak * budget), 16 << 20) // (2 << 20) * (2 << 20))
    before = umem.stats() if with_umem else None
    torch.cuda.reset_peak_memory_stats()
    slow = SOFT.slow_moves()
    SOFT.seed(seed)
    if options.skip:
        SOFT.skip(options.skip)
    digest = train(options.net, options.steps)
    SOFT.reset()
    SOFT.seed(0)
    row: dict[str, Any] = {"budget": str(budget), "seed": seed, "digest": digest}
    row["races"] = SOFT.races()
    row["slow_moves"] = SOFT.slow_moves() - slow
    row["peak_bytes"] = str(torch.cuda.max_memory_allocated())
    if before is not None:
        after = umem.stats()
        row["evictions"] = str(after.evictions - before.evictions)
        row["discarded"] = str(after.bytes_discarded - before.bytes_discarded)
        row["hits"] = str(after.plan_hits - before.plan_hits)
        row["errors"] = str(after.hook_errors - before.hook_errors)
    return row


if __name__ == "__main__":
    main()
