"""Accuracy of `umem estimate` against traced steps: batches, and the formulas.

``python bench/policies/estimate.py [--smoke]`` writes estimate_fake-tensors_<date>.{json,md} to
bench/results. All figures are of tensors without data: they depend on no machine.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
if __name__ == "__main__":
    sys.path[0] = str(HERE.parent)  # not this folder: its modules are a package's

from facts import version_facts  # noqa: E402
from harness import add_outputs, cases, note, results_folder, table, write  # noqa: E402

from policies import workloads as nets  # noqa: E402
from umem.analysis import batch_size  # noqa: E402
from umem.analysis.batch_size import tensor_lines  # noqa: E402
from umem.analysis.formulas import PRECISIONS, Config, estimate  # noqa: E402
from umem.base import device_profiles  # noqa: E402
from umem.base.progress import over  # noqa: E402
from umem.base.units import GIB  # noqa: E402
from umem.capture import program  # noqa: E402
from umem.cli.estimate_program import Seen, look  # noqa: E402
from umem.simulation import replay  # noqa: E402

PAIR = (8, 16)


@dataclass(frozen=True)
class Net:
    """A step by its batch, and the batch that predictions are checked at."""

    make: Callable[[int], Any]
    third: int


NETS = {
    "ResNet-50": Net(partial(nets._resnet, blocks=(3, 4, 6, 3)), 128),
    "ResNet-152": Net(partial(nets._resnet, blocks=(3, 8, 36, 3)), 64),
    "VGG-16": Net(nets._vgg16, 128),
    "DenseNet-121": Net(nets._densenet121, 96),
    "Inception-v3": Net(nets._inception, 128),
    "SE-ResNet-101": Net(nets._se_resnet, 64),
    "U-Net, 512 x 512": Net(partial(nets.unet, image=512), 40),
    "BERT base, 512": Net(nets._bert, 64),
    "GPT-2 small, 1024": Net(partial(nets._gpt2, layers=12, dim=768, heads=12), 64),
    "GPT-2 medium, 1024": Net(partial(nets._gpt2, layers=24, dim=1024, heads=16), 64),
    "GPT-2 XL, 1024": Net(partial(nets._gpt2, layers=48, dim=1600, heads=25), 48),
    "ViT-L/16": Net(partial(nets._vit, layers=24, dim=1024, heads=16), 64),
    "LSTM, 4 x 1024, 60": Net(partial(nets._lstm, length=60), 128),
    "Llama 7B, a token": Net(partial(nets._llama7b_decode, length=1024), 64),
    "Llama 13B, inference": Net(partial(nets._llama13b_stream, length=512), 64),
}
SMOKE = {"ResNet, 4 blocks": Net(partial(nets._resnet, blocks=(1, 1, 1, 1), image=64), 64)}
# Networks of the formulas, whose `params` are the network's own, and the logits of a token.
GPT2 = Config(1, "adamw", "amp", batch=8, layers=24, hidden=1024, sequence=1024)
VIT = Config(1, "adamw", "bf16", batch=64, layers=24, hidden=1024, sequence=197)
FORMULAS = {"GPT-2 medium, 1024": (GPT2, 50257), "ViT-L/16": (VIT, 0)}


def seen(net: Net, batch: int) -> Seen:
    """Return the step at this batch."""
    return look(program.trace(partial(net.make, batch)), 0)


def predicted(name: str, net: Net) -> dict[str, Any]:
    """Return a row: the errors of predicting a third batch from two, and its true bytes."""
    note(name)
    device = device_profiles.find(device_profiles.DEFAULT)
    known = {batch: seen(net, batch) for batch in PAIR}
    truth = seen(net, net.third).found.total
    line = batch_size.line(*((batch, each.found.total) for batch, each in known.items()))
    tensors = tensor_lines(
        known.__getitem__, PAIR, lambda step: replay.resident_budget(step, device)
    )
    if tensors is None:
        raise SystemExit(f"{name}: the steps of two batches differ in more than sizes")
    return {
        "net": name,
        "third": net.third,
        "traced_bytes": truth,
        "line_error": line.at(net.third) / truth - 1,
        "tensors_error": tensors.at(net.third) / truth - 1,
    }


def compared(name: str, config: Config, logits: int) -> dict[str, Any]:
    """Compare the kinds by formula and traced, and give the exact activation factor."""
    traced = seen(NETS[name], config.batch).found
    count = traced.params // PRECISIONS[config.precision].weight
    formula = estimate(replace(config, params=count))
    assert config.layers is not None
    assert config.hidden is not None
    assert config.sequence is not None
    tokens, size = config.sequence * config.batch, PRECISIONS[config.precision].activation
    # The logits, and their log-softmax in float32, which backward needs.
    kept = traced.activations - logits * tokens * (size + 4)
    factor = kept / (config.layers * config.hidden * tokens * size)
    return {"net": name, "batch": config.batch, "formula": asdict(formula),
            "traced": asdict(traced), "factor": factor}  # fmt: skip


def report(
    rows: list[dict[str, Any]], formulas: list[dict[str, Any]], facts: dict[str, str]
) -> str:
    """Format the report."""
    lines = [
        "# Predictions of `umem estimate` against traced steps",
        "",
        f"umem at commit {facts['commit']}, torch {facts['torch']}. Tensors without data: no "
        "figure depends on the machine. `python bench/policies/estimate.py`",
        "",
        f"Batches of {PAIR[0]} and {PAIR[1]} are traced, by which the memory of a third is "
        "predicted: by the line through the two totals, and by a line for each tensor.",
        "",
        *table(
            ("network", "third batch", "traced", "line", "tensor by tensor"),
            [
                (row["net"], str(row["third"]), f"{row['traced_bytes'] / GIB:.2f} GiB",
                 f"{row['line_error']:+.2%}", f"{row['tensors_error']:+.2%}")
                for row in rows
            ],
        ),
    ]  # fmt: skip
    for row in formulas:
        lines += [
            f"{row['net']}, batch {row['batch']}: formulas with 12 elements a token, layer and "
            f"hidden unit, and traced at the peak; {row['factor']:.1f} elements would be right.",
            "",
            *table(
                ("kind", "formula", "traced"),
                [
                    (kind, f"{row['formula'][kind] / GIB:.2f} GiB", f"{size / GIB:.2f} GiB")
                    for kind, size in row["traced"].items()
                ],
            ),
        ]
    return "\n".join(lines)


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_outputs(parser)
    args = parser.parse_args()
    folder = results_folder(parser, args)
    facts = version_facts()
    nets, configs = (SMOKE, {}) if args.smoke else (NETS, FORMULAS)
    with cases(len(nets) + len(configs)) as advance:
        rows = [predicted(name, net) for name, net in over(nets.items(), advance)]
        formulas = [compared(name, *given) for name, given in over(configs.items(), advance)]
    text = report(rows, formulas, facts)
    print(text)
    if folder is not None:
        known = {"versions": facts, "batches": rows, "formulas": formulas}
        stem = f"estimate_fake-tensors_{datetime.date.today().isoformat()}"
        print("\n".join(map(str, write(folder, stem, known, text))))


if __name__ == "__main__":
    main()
