"""The steps that policies are compared on, at the sizes that a GPU is bought for.

Each is a function without arguments that returns (model, step), as `umem plan` takes it; called
under fake tensors it takes no memory. Trainings clear their gradients at the end of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from policies.other_workloads import OTHERS
from policies.training import Workload, default_dtype, texts, training

if TYPE_CHECKING:
    from torch import Tensor, nn

    from policies.training import Batch, Made, Precision

CLASSES = 1000
VOCABULARY = 50257


def images(
    make: Callable[[], nn.Module],
    batch: int,
    image: int,
    *,
    precision: Precision = "float32",
    classes: int = CLASSES,
) -> Made:
    """Build the training of a network that names one class for each image."""
    import torch

    def data() -> list[Batch]:
        return [(torch.randn(batch, 3, image, image), torch.randint(classes, (batch,)))]

    return training(make, data, precision, "sgd" if precision == "float32" else "adamw")


def _resnet(batch: int, blocks: tuple[int, ...], image: int = 224) -> Made:
    import nets

    return images(lambda: nets.ResNet50(64, blocks, CLASSES), batch, image)


def _se_resnet(batch: int) -> Made:
    import nets

    from policies.nets import SEBottleneck

    def make() -> nn.Module:
        return nets.ResNet50(64, (3, 4, 23, 3), CLASSES, SEBottleneck)

    return images(make, batch, 224)


def _vgg16(batch: int) -> Made:
    import nets

    return images(lambda: nets.VGG16(64, 224, CLASSES), batch, 224)


def _densenet121(batch: int) -> Made:
    from policies import nets

    return images(lambda: nets.DenseNet(32, (6, 12, 24, 16), CLASSES), batch, 224)


def _inception(batch: int) -> Made:
    from policies import nets

    return images(lambda: nets.InceptionV3(CLASSES), batch, 299)


def unet(batch: int, image: int, width: int = 64) -> Made:
    """Build the training of a U-Net that names one of two classes for each pixel."""
    import nets
    import torch

    class PerPixel(nets.UNet):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).permute(0, 2, 3, 1)

    def data() -> list[Batch]:
        return [(torch.randn(batch, 3, image, image), torch.randint(2, (batch, image, image)))]

    return training(lambda: PerPixel(width, 4, 2), data, "float32", "sgd")


def _vit(batch: int, layers: int, dim: int, heads: int) -> Made:
    from policies import nets

    def make() -> nn.Module:
        return nets.ViT(224, layers, dim, heads, CLASSES)

    return images(make, batch, 224, precision="bfloat16")


def _bert(batch: int, context: int = 512) -> Made:
    from policies import nets

    def make() -> nn.Module:
        return nets.Bert(30522, context, 12, 768, 12)

    return training(make, lambda: texts(30522, [(batch, context)]), "float32", "adamw")


def _gpt2(batch: int, layers: int, dim: int, heads: int, context: int = 1024) -> Made:
    from umem.demo import nets

    def make() -> nn.Module:
        return nets.GPT(VOCABULARY, context, layers, dim, heads)

    return training(make, lambda: texts(VOCABULARY, [(batch, context)]), "amp", "adamw")


def _lstm(batch: int, length: int) -> Made:
    from policies import nets

    def data() -> list[Batch]:
        return texts(256, [(batch, length)], last=True)

    return training(lambda: nets.LSTM(256, 1024, 4), data, "float32", "sgd")


def _llama(layers: int, dim: int, heads: int, hidden: int) -> nn.Module:
    import torch

    from policies import nets

    with default_dtype(torch.bfloat16):
        return nets.Llama(32000, layers, dim, heads, hidden)


def _llama7b_decode(batch: int, length: int) -> Made:
    """Decode one token per text of the batch; all steps attend to the whole cache, masked."""
    import torch

    net = _llama(32, 4096, 32, 11008)
    caches = [torch.zeros(2, batch, 32, length, 128, dtype=torch.bfloat16) for _ in range(32)]
    tokens = torch.zeros(batch, 1, dtype=torch.int64)
    place = torch.zeros(1, dtype=torch.int64)

    def step() -> None:
        with torch.no_grad():
            tokens.copy_(net(tokens, caches, place).argmax(-1))
            place.add_(1)

    return net, step


def _llama13b_stream(batch: int, length: int) -> Made:
    """Inference on whole texts: the weights pass by once a step, in order."""
    import torch

    net = _llama(40, 5120, 40, 13824)
    tokens = torch.zeros(batch, length, dtype=torch.int64)

    def step() -> None:
        with torch.no_grad():
            net(tokens)

    return net, step


_ALL = (
    Workload("resnet50_b128", "ResNet-50, batch 128", lambda: _resnet(128, (3, 4, 6, 3)), 10.5),
    Workload("resnet152_b64", "ResNet-152, batch 64", lambda: _resnet(64, (3, 8, 36, 3))),
    Workload("vgg16_b128", "VGG-16, batch 128", lambda: _vgg16(128), 10.3),
    Workload("densenet121_b96", "DenseNet-121, batch 96", lambda: _densenet121(96), 11.8),
    Workload("inception3_b128", "Inception-v3, batch 128", lambda: _inception(128)),
    Workload("se_resnet101_b64", "SE-ResNet-101, batch 64", lambda: _se_resnet(64)),
    Workload("unet_b8_512", "U-Net, 8 x 512 x 512", lambda: unet(8, 512), 11.5),
    Workload("bert_base_b64", "BERT base, 64 x 512", lambda: _bert(64), 33.2),
    Workload("gpt2_small_b8", "GPT-2 small, 8 x 1024", lambda: _gpt2(8, 12, 768, 12)),
    Workload("gpt2_medium_b8", "GPT-2 medium, 8 x 1024", lambda: _gpt2(8, 24, 1024, 16), 18.3),
    Workload("gpt2_xl_b2", "GPT-2 XL, 2 x 1024", lambda: _gpt2(2, 48, 1600, 25)),
    Workload("vit_l_b64", "ViT-L/16, batch 64", lambda: _vit(64, 24, 1024, 16), 11.1),
    Workload("lstm_4x1024_b128", "LSTM, 4 x 1024, 128 x 300", lambda: _lstm(128, 300), 4.2),
    Workload(
        "llama7b_decode",
        "Llama 7B, a token, 8 x 1024 cached",
        lambda: _llama7b_decode(8, 1024),
        16.6,
    ),
    Workload("llama13b_stream", "Llama 13B inference, 16 x 512", lambda: _llama13b_stream(16, 512)),
    *OTHERS,
    Workload(
        "resnet_smoke", "ResNet-50, 4 x 64 x 64", lambda: _resnet(4, (1, 1, 1, 1), 64), smoke=True
    ),
    Workload("gpt_smoke", "GPT, 2 layers, 2 x 128", lambda: _gpt2(2, 2, 256, 4, 128), smoke=True),
)
WORKLOADS: dict[str, Workload] = {workload.name: workload for workload in _ALL}
# G10 (MICRO 2023) ranks its policies on these.
G10 = (
    "bert_base_b64",
    "vit_l_b64",
    "inception3_b128",
    "resnet152_b64",
    "se_resnet101_b64",
)
CONVOLUTIONAL = (
    "resnet50_b128",
    "resnet152_b64",
    "vgg16_b128",
    "densenet121_b96",
    "inception3_b128",
    "se_resnet101_b64",
    "unet_b8_512",
)
