"""Train the GPT of gpt.py compiled by torch.compile.

    python examples/compiled_gpt.py
    umem run --budget 40MiB examples/compiled_gpt.py

Plain PyTorch, without umem. Both print the same last line: the last loss as a hex float and the
SHA-256 of the weights. umem sees each generated kernel as an operator, so the steps of the second
run follow a plan. The first step compiles, which takes a minute or two.
"""

from __future__ import annotations

import torch
from gpt import train

THREADS = 1  # sums of several threads in generated code are in no fixed order

if __name__ == "__main__":
    train(THREADS, torch.compile)
