"""Random programs of umem's public functions on CUDA tensors, whose work is done late.

python tests/gpu/state_machine_worker.py [--examples N] [--seed N]
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))
from softcuda import load  # noqa: E402

SOFT = load.load()
import torch  # noqa: E402
from hypothesis import HealthCheck, Phase, seed, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from hypothesis.stateful import precondition, rule, run_state_machine_as_test  # noqa: E402
from support.api_machine import ApiMachine, value, which  # noqa: E402


class OnTheSoftwareDriver(ApiMachine):
    """With other streams, and with orders of work that change."""

    device = "cuda"

    def __init__(self) -> None:
        super().__init__()
        self.side = torch.cuda.Stream()

    @rule(order=st.integers(1, 1 << 16))
    def another_order(self, order: int) -> None:
        SOFT.seed(order)

    @precondition(lambda self: self.pairs)
    @rule(index=which, byte=value)
    def on_another_stream(self, index: int, byte: int) -> None:
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            self.fill(index, byte)
        torch.cuda.current_stream().wait_stream(self.side)

    @precondition(lambda self: self.pairs)
    @rule(index=which)
    def freed_while_another_stream_reads_it(self, index: int) -> None:
        pair = self.pick(index)
        if pair.lost:
            return
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            copy = pair.tensor.clone()
        pair.tensor.record_stream(self.side)
        shadow = pair.shadow.copy()
        self.pairs.remove(pair)
        torch.cuda.current_stream().wait_stream(self.side)
        copy.record_stream(torch.cuda.current_stream())
        self.put(copy, shadow)

    def teardown(self) -> None:
        super().teardown()
        torch.cuda.synchronize()
        races = SOFT.races()
        assert not races, races


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--examples", type=int, default=20)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 16))
    options = parser.parse_args()
    # The first session comes before the first use of CUDA.
    import umem

    umem.enable(budget="16MiB", device="cuda")
    load.compute()
    umem.disable()
    torch.set_num_threads(1)
    chosen = settings(
        max_examples=options.examples, stateful_step_count=options.steps, deadline=None,
        database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck),
        print_blob=False,
    )  # fmt: skip
    print(f"seed {options.seed}", flush=True)
    seed(options.seed)(OnTheSoftwareDriver)
    run_state_machine_as_test(OnTheSoftwareDriver, settings=chosen)
    print(f"{options.examples} programs of up to {options.steps} operations: equal bytes, 0 races")


if __name__ == "__main__":
    main()
