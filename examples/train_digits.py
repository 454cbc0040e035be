"""Train a ResNet on scikit-learn's handwritten digits: plain PyTorch, without umem.

    python examples/train_digits.py
    UMEM=1 UMEM_BUDGET=32MiB python examples/train_digits.py
    umem run --budget 32MiB examples/train_digits.py

It needs about 125 MiB of tensors. All three print the same last line: the last loss as a hex float
and the SHA-256 of the weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

THREADS = 2  # the sums depend on it, and so does the least budget: 8 MiB a thread
SEED = 7
WIDTH, BLOCKS, IMAGE, BATCH, EPOCHS = 8, (3, 4, 6, 3), 32, 128, 1


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def make_net() -> nn.Sequential:
    """Build a narrow ResNet with the blocks of ResNet-34."""
    layers: list[nn.Module] = [nn.Conv2d(1, WIDTH, 3, 1, 1, bias=False), nn.BatchNorm2d(WIDTH)]
    channels = WIDTH
    for stage, count in enumerate(BLOCKS):
        for i in range(count):
            outputs = WIDTH << stage
            layers.append(Block(channels, outputs, stride=2 if stage and i == 0 else 1))
            channels = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def load_data() -> tuple[Tensor, Tensor]:
    """Images scaled up to IMAGE x IMAGE, and their digits."""
    bunch = load_digits()
    small = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    images = F.interpolate(small, size=(IMAGE, IMAGE), mode="bilinear", align_corners=False)
    return (images - images.mean()) / images.std(), torch.tensor(bunch.target)


def make_step() -> tuple[nn.Module, Callable[[Tensor, Tensor], tuple[float, float]]]:
    """Return the network, and a function that trains it on a batch: returns loss and accuracy."""
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)

    def step(images: Tensor, labels: Tensor) -> tuple[float, float]:
        optimizer.zero_grad()
        logits = net(images)
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
        return loss.item(), (logits.argmax(1) == labels).float().mean().item()

    return net, step


def weights_sha256(net: nn.Module) -> str:
    """SHA-256 of all weights and buffers, in order."""
    digest = hashlib.sha256()
    for tensor in net.state_dict().values():
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def main() -> None:
    torch.set_num_threads(THREADS)
    torch.manual_seed(SEED)
    images, labels = load_data()
    net, step = make_step()
    loss = float("nan")
    for epoch in range(EPOCHS):
        order = torch.randperm(len(labels))
        batches = order[: len(order) // BATCH * BATCH].split(BATCH)
        for i, chosen in enumerate(batches):
            loss, accuracy = step(images[chosen], labels[chosen])
            if i % 2 == 0 or i == len(batches) - 1:
                print(
                    f"epoch {epoch} batch {i:2}: loss {loss:.4f} accuracy {accuracy:.2f}",
                    flush=True,
                )
    print(f"final loss={loss.hex()} sha256={weights_sha256(net)}")


if __name__ == "__main__":
    main()
