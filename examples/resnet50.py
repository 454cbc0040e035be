"""ResNet-50 on images of 224 x 224, for a plan at full size without a GPU.

    umem plan examples.resnet50:make_step --budget 25% --recompute all
    python examples/resnet50.py

Plain PyTorch, without umem. The first plans a training step with a batch of 128: the cost of
swapping at a quarter of the memory, of recomputing a part of the forward pass, or of both. The
second trains a narrow network on random images for a few steps, which takes seconds on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

CLASSES = 1000


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions and a shortcut, with the stride at 3 x 3."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = F.relu(self.norm2(self.conv2(y)), inplace=True)
        return F.relu(self.norm3(self.conv3(y)) + self.shortcut(x), inplace=True)


class ResNet(nn.Module):
    """A stem, four stages of bottlenecks, and a classifier."""

    def __init__(self, width: int, blocks: Sequence[int], classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.norm = nn.BatchNorm2d(width)
        stages: list[nn.Module] = []
        channels = width
        for stage, count in enumerate(blocks):
            for i in range(count):
                stride = 2 if stage and not i else 1
                stages.append(Bottleneck(channels, width << stage, stride))
                channels = 4 * (width << stage)
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(images)), inplace=True)
        x = self.stages(F.max_pool2d(x, 3, 2, 1))
        scores: Tensor = self.head(x.mean(dim=(2, 3)))
        return scores


def loss_of(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross entropy of the classes."""
    images, classes = batch
    return F.cross_entropy(net(images), classes)


def make_step(
    width: int = 64, blocks: Sequence[int] = (3, 4, 6, 3), batch: int = 128, size: int = 224
) -> tuple[
    nn.Module,
    torch.optim.Optimizer,
    tuple[Tensor, Tensor],
    Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor],
]:
    """Return what `umem plan` needs: network, optimizer, batch and loss function."""
    net = ResNet(width, blocks, CLASSES)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    data = torch.randn(batch, 3, size, size), torch.randint(CLASSES, (batch,))
    return net, optimizer, data, loss_of


def main() -> None:
    torch.manual_seed(0)
    net, optimizer, batch, loss_function = make_step(8, (1, 1, 1, 1), 8, 64)
    for step in range(5):
        optimizer.zero_grad()
        loss = loss_function(net, batch)
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
