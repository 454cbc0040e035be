"""Generate text with a model of the transformers library that is larger than the device's budget.

    pip install transformers
    umem run --device soft:512MiB --budget 25% examples/generate.py

With a checkpoint on a disk, the weights stay there, and are read when a token needs them:

    python examples/generate.py --checkpoint model.pt  # makes it, if it does not exist
    umem run --budget 128MiB --disk . examples/generate.py --checkpoint model.pt

Nothing marks a step: each call of the model without gradients begins one. Weights are random, so
nothing is downloaded. Under umem it prints how many operators followed a plan, and the bytes
fetched per token relative to the minimum: all weights except those that the budget holds. Without
umem it prints only the tokens' checksum, which is the same.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

import torch
import transformers

import umem

START_UP = 4  # tokens that are recorded and tried


def llama(layers: int, dim: int, checkpoint: Path | None) -> transformers.PreTrainedModel:
    config = transformers.LlamaConfig(
        vocab_size=2048, hidden_size=dim, intermediate_size=3 * dim,
        num_hidden_layers=layers, num_attention_heads=dim // 64, max_position_embeddings=512,
    )  # fmt: skip
    if checkpoint is None or not checkpoint.exists():
        model = transformers.LlamaForCausalLM(config).eval()
        if checkpoint is not None:
            torch.save(model.state_dict(), checkpoint)
        return model
    with torch.device("meta"):  # nothing is allocated
        model = transformers.LlamaForCausalLM(config).eval()
    on_disk = umem.is_enabled() and umem.stats().disk_open_us > 0
    rotary = model.model.rotary_emb  # it is computed, and in no checkpoint
    model.model.rotary_emb = type(rotary)(config)
    umem.load_checkpoint(model, checkpoint, keep_in_file=on_disk)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--dim", type=int, default=1024, help="a multiple of 64")
    parser.add_argument("--tokens", type=int, default=24, help=f"more than {START_UP}")
    parser.add_argument("--beams", type=int, default=1)
    parser.add_argument("--cache", default="dynamic", choices=("dynamic", "static"))
    parser.add_argument("--checkpoint", type=Path, help="a file of the weights; made if missing")
    options = parser.parse_args()
    if options.tokens <= START_UP:
        parser.error(f"--tokens: more than {START_UP}")
    torch.set_num_threads(1)  # sums over another number of threads have other last bits
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = llama(options.layers, options.dim, options.checkpoint).to(device)
    stats: list[umem.Stats] = []  # at the end of each token's step

    def count(_tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        stats.append(umem.stats())
        return scores

    tokens = model.generate(
        torch.arange(1, 17, device=device).view(1, -1),
        max_new_tokens=options.tokens, min_new_tokens=options.tokens, do_sample=False,
        num_beams=options.beams, cache_implementation=options.cache, pad_token_id=0,
        logits_processor=[count],
    )  # fmt: skip
    print("tokens", hashlib.sha256(tokens.cpu().numpy().tobytes()).hexdigest()[:16])
    report(model, stats)


def report(model: torch.nn.Module, stats: list[umem.Stats]) -> None:
    first, last = stats[START_UP - 1], stats[-1]
    if not last.budget_bytes:
        return  # without umem
    steps = len(stats) - START_UP
    hits, misses = last.plan_hits - first.plan_hits, last.plan_misses - first.plan_misses
    weights = sum(weight.nbytes for weight in model.parameters())
    least = max(weights - last.budget_bytes, 0)
    moved = (last.bytes_in - first.bytes_in) / steps
    print(f"weights {weights >> 20} MiB, budget {last.budget_bytes >> 20} MiB")
    print(f"{hits} of {hits + misses} operators by plan in the last {steps} tokens")
    if least:
        print(f"{moved / least:.3f} times the least to the device for each token")
    print(
        f"{(last.bytes_out - first.bytes_out) / steps / 2**20:.1f} MiB to the host for each token"
    )
    if last.disk_bytes_in:
        print(f"{last.disk_bytes_out / 2**20:.0f} MiB written to the disk by the whole program")


if __name__ == "__main__":
    main()
