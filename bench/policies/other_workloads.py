"""The steps of other_nets.py, and of several batches before an update: kinds that stress planners.

They use little of the tables they read, have several memory peaks in a step, two optimizers, or
weights that are never written. Sizes are typical of a GPU's use.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from policies.training import Workload, default_dtype, texts, training, updates

if TYPE_CHECKING:
    from torch import Tensor, nn

    from policies.training import Batch, Made

VOCABULARY = 50257


def _dlrm(batch: int, lookups: int) -> Made:
    import torch

    from policies.other_nets import DLRM

    rows = (4_000_000, 2_000_000, 2_000_000, *[1_000_000] * 5, *[200_000] * 8)

    def data() -> list[Batch]:
        features = torch.randint(200_000, (len(rows), batch, lookups))
        return [((torch.randn(batch, 13), features), torch.randint(2, (batch,)))]

    return training(lambda: DLRM(rows, 64, 13), data, "float32", "adagrad")


def _gan(batch: int, levels: int) -> Made:
    """Teach the discriminator with real and made images, then the generator with its verdict."""
    import torch
    from torch.nn.functional import binary_cross_entropy_with_logits as loss

    from policies.other_nets import Discriminator, Generator

    makes, tells = Generator(128, 64, levels), Discriminator(64, levels)
    nets = torch.nn.ModuleList((makes, tells))
    of_makes, of_tells = updates(makes, "adamw"), updates(tells, "adamw")
    size = 4 << levels
    real, noise = torch.randn(batch, 3, size, size), torch.randn(batch, 128, 1, 1)
    yes, no = torch.ones(batch), torch.zeros(batch)

    def step() -> None:
        made = makes(noise)
        loss(tells(real), yes).backward()
        loss(tells(made.detach()), no).backward()
        of_tells.step()
        of_tells.zero_grad(set_to_none=True)
        loss(tells(made), yes).backward()
        of_makes.step()
        for optimizer in (of_makes, of_tells):
            optimizer.zero_grad(set_to_none=True)

    return nets, step


def volumes(batch: int, side: int, width: int = 32, levels: int = 5) -> Made:
    """Build the training of a 3-D U-Net that names one of four classes for each voxel."""
    import torch

    from policies.other_nets import VolumeUNet

    class PerVoxel(VolumeUNet):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).permute(0, 2, 3, 4, 1)

    def data() -> list[Batch]:
        shape = (batch, side, side, side)
        return [(torch.randn(batch, 4, *shape[1:]), torch.randint(4, shape))]

    return training(lambda: PerVoxel(4, width, levels, 4), data, "float32", "sgd")


def _diffusion(batch: int, image: int, width: int) -> Made:
    import torch

    from policies.other_nets import DiffusionUNet

    with default_dtype(torch.bfloat16):
        net = DiffusionUNet(width, (1, 2, 3, 4), (2, 3))
        images, noise = (torch.randn(batch, 3, image, image) for _ in range(2))
        times = torch.rand(batch)
    optimizer = updates(net, "adamw")

    def step() -> None:
        mixed = images * (1 - times[:, None, None, None]) + noise * times[:, None, None, None]
        torch.nn.functional.mse_loss(net(mixed, times).float(), noise.float()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return net, step


def _translation(batch: int, length: int) -> Made:
    import torch

    from policies.other_nets import EncoderDecoder

    def data() -> list[Batch]:
        source, target, labels = (torch.randint(32_000, (batch, length)) for _ in range(3))
        return [((source, target), labels)]

    return training(lambda: EncoderDecoder(32_000, 12, 1024, 16), data, "amp", "adamw")


def _experts(batch: int, length: int) -> Made:
    from policies.other_nets import ExpertBlock, Texts

    def make() -> nn.Module:
        return Texts(VOCABULARY, 768, [ExpertBlock(768, 12, 8) for _ in range(8)])

    return training(make, lambda: texts(VOCABULARY, [(batch, length)]), "amp", "adamw")


def _state_space(batch: int, length: int) -> Made:
    from policies.other_nets import StateSpaceBlock, Texts

    def make() -> nn.Module:
        return Texts(VOCABULARY, 768, [StateSpaceBlock(768) for _ in range(24)])

    return training(make, lambda: texts(VOCABULARY, [(batch, length)]), "bfloat16", "adamw")


def _lora(batch: int, length: int) -> Made:
    from policies.other_nets import AdaptedBlock, Texts

    def make() -> nn.Module:
        blocks = [AdaptedBlock(4096, 32, 11008, 16) for _ in range(32)]
        net = Texts(32_000, 4096, blocks)
        for part in (net.token, net.norm, net.head):
            part.requires_grad_(False)
        return net

    return training(make, lambda: texts(32_000, [(batch, length)]), "bfloat16", "adamw")


def _several(shapes: list[tuple[int, int]]) -> Made:
    """GPT-2 medium, which accumulates gradients over these batches."""
    from umem.demo.nets import GPT

    def make() -> nn.Module:
        return GPT(VOCABULARY, 1024, 24, 1024, 16)

    return training(make, lambda: texts(VOCABULARY, shapes), "amp", "adamw")


def _llama() -> Made:
    """examples/llama.py at its large size: bfloat16 weights, float32 masters and states."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from examples import llama

    net, optimizer, tokens, loss_of = llama.make_step()

    def step() -> None:
        loss_of(net, tokens).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return net, step


OTHERS = (
    Workload("dlrm_b4096", "Recommendation, 16 tables, batch 4096", lambda: _dlrm(4096, 20)),
    Workload("gpt2_medium_4x4", "GPT-2 medium, 4 batches of 4", lambda: _several([(4, 1024)] * 4)),
    Workload(
        "gpt2_medium_lengths",
        "GPT-2 medium, batches of 256 to 1024 tokens",
        lambda: _several([(8, 256), (8, 1024), (8, 512), (8, 768)]),
    ),
    Workload("gan_b512", "DCGAN, 512 x 128 x 128, two optimizers", lambda: _gan(512, 5)),
    Workload("unet3d_b2_128", "3-D U-Net, 2 x 128^3", lambda: volumes(2, 128)),
    Workload("diffusion_b64", "Diffusion U-Net, 64 x 64 x 64", lambda: _diffusion(64, 64, 192)),
    Workload("translation_b32", "Encoder-decoder, 32 x 512", lambda: _translation(32, 512)),
    Workload("experts_b8", "8 blocks of 8 experts, 8 x 1024", lambda: _experts(8, 1024)),
    Workload("state_space_b8", "State space, 24 blocks, 8 x 2048", lambda: _state_space(8, 2048)),
    Workload("llama_1b_b8", "Llama 1.2B, float32 masters, 8 x 2048", _llama),
    Workload("lora7b_b4", "Llama 7B with LoRA, 4 x 1024", lambda: _lora(4, 1024)),
)
