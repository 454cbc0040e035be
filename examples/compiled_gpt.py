"""Train the GPT of gpt.py as torch.compile makes it.

    python examples/compiled_gpt.py
    umem run --budget 40MiB examples/compiled_gpt.py

Plain PyTorch, nothing of umem in it. Both print the same last line: the last loss as a hex float
and the SHA-256 of the weights. umem sees each generated kernel as an operator, so that the steps of
the second run follow a plan. The first step compiles, which takes a minute or two.
"""

from __future__ import annotations

import torch
from gpt import BATCH, SEED, SMALL, STEPS, load_text, loss_of, make_step, weights_sha256


def main() -> None:
    torch.set_num_threads(1)  # sums of several threads in generated code are in no fixed order
    torch.manual_seed(SEED)
    text = load_text(100_000)
    net, optimizer, _, _ = make_step(SMALL)
    compiled = torch.compile(net)
    loss = torch.tensor(float("nan"))
    for step in range(STEPS):
        starts = torch.randint(len(text) - SMALL.context - 1, (BATCH,)).tolist()
        tokens = torch.stack([text[start : start + SMALL.context + 1] for start in starts])
        optimizer.zero_grad()
        loss = loss_of(compiled, tokens)
        loss.backward()
        optimizer.step()
        print(f"step {step:2}: loss {loss.item():.4f}", flush=True)
    print(f"final loss={float(loss.item()).hex()} sha256={weights_sha256(net)}")


if __name__ == "__main__":
    main()
