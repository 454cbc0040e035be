"""The programs: small networks of other libraries with random weights, as single steps.

Each returns a function that does one step and returns a tensor, whose bits are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

Step = Callable[[int], Any]


class Program(NamedTuple):
    """A program, and its requirements in addition to torch."""

    build: Callable[[], Step]
    needs: tuple[str, ...] = ()
    steady: bool = True  # each step does the same
    first: int = 8  # steps before those that count: recorded, tried and planned


def train(
    model: Any, loss_of: Callable[[int], Any], *, accumulate: int = 1, optimizer: Any = None
) -> Step:
    """Return a step of training, by AdamW unless `optimizer` is another one."""
    import torch

    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer or torch.optim.AdamW(trained, lr=1e-3)

    def step(number: int) -> Any:
        optimizer.zero_grad()
        for part in range(accumulate):
            loss = loss_of(number * accumulate + part)
            loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def images(model: Any, batch: int, size: int) -> Step:
    """Return a step that trains a classifier of images."""
    import torch

    x, y = torch.randn(batch, 3, size, size), torch.randint(0, 10, (batch,))
    return train(model, lambda _: torch.nn.functional.cross_entropy(model(x), y))


def resnet18() -> Step:
    """Train ResNet-18: convolutions and batch norm."""
    import timm

    return images(timm.create_model("resnet18", num_classes=10), 8, 64)


def convnext() -> Step:
    """Train ConvNeXt: hundreds of small tensors."""
    import timm

    return images(timm.create_model("convnext_atto", num_classes=10), 4, 96)


def mobilenet() -> Step:
    """Train MobileNet: nearly all of its tensors are small."""
    import timm

    return images(timm.create_model("mobilenetv3_small_100", num_classes=10), 16, 96)


def lraspp() -> Step:
    """Train a network that segments images."""
    import torch
    from torchvision.models.segmentation import lraspp_mobilenet_v3_large

    model = lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=10)
    x, y = torch.randn(2, 3, 128, 128), torch.randint(0, 10, (2, 128, 128))
    return train(model, lambda _: torch.nn.functional.cross_entropy(model(x)["out"], y))


def autocast() -> Step:
    """Train ResNet-18 in bfloat16, with weights of float32."""
    import timm
    import torch

    model = timm.create_model("resnet18", num_classes=10)
    x, y = torch.randn(8, 3, 64, 64), torch.randint(0, 10, (8,))

    def loss(_: int) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.nn.functional.cross_entropy(model(x).float(), y)

    return train(model, loss)


def unet() -> Step:
    """Train a diffusion network."""
    import torch
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=32, in_channels=3, out_channels=3, block_out_channels=(32, 64, 128),
        layers_per_block=1, norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    x, t = torch.randn(4, 3, 32, 32), torch.arange(4)
    return train(model, lambda _: (model(x, t).sample - x).square().mean())


def gpt2() -> Step:
    """Train a language model of four layers."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=8192, n_positions=128, n_embd=256, n_layer=4, n_head=4)
    )
    text = torch.randint(0, 8192, (4, 128))
    return train(model, lambda _: model(text, labels=text).loss)


def _llama(layers: int = 4) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=8192, hidden_size=256, intermediate_size=1024, num_hidden_layers=layers,
            num_attention_heads=4, max_position_embeddings=256,
        )
    )  # fmt: skip


def llama_accumulation() -> Step:
    """Train by four passes and one update."""
    import torch

    model = _llama()
    text = torch.randint(0, 8192, (2, 64))
    return train(model, lambda _: model(text, labels=text).loss, accumulate=4)


def lora() -> Step:
    """Train adapters on a frozen network, with checkpointing."""
    import torch
    from peft import LoraConfig, get_peft_model

    base = _llama()
    base.gradient_checkpointing_enable()
    base.enable_input_require_grads()
    model = get_peft_model(base, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    text = torch.randint(0, 8192, (4, 64))
    return train(model, lambda _: model(input_ids=text, labels=text).loss)


def _bert_config(hidden: int, layers: int) -> Any:
    from transformers import BertConfig

    return BertConfig(
        vocab_size=8192, hidden_size=hidden, intermediate_size=4 * hidden,
        num_hidden_layers=layers, num_attention_heads=4,
    )  # fmt: skip


def bert_buckets() -> Step:
    """Train a masked language model; three lengths in turn."""
    import torch
    from transformers import BertForMaskedLM

    model = BertForMaskedLM(_bert_config(256, layers=4))
    texts = [torch.randint(0, 8192, (8, length)) for length in (32, 48, 64)]
    return train(model, lambda i: model(texts[i % 3], labels=texts[i % 3]).loss)


def sentence() -> Step:
    """Train two encodings to be similar."""
    import torch
    from transformers import BertModel

    model = BertModel(_bert_config(128, layers=6))
    one, two = torch.randint(0, 8192, (2, 16, 64))

    def loss(_: int) -> Any:
        a, b = (model(text).last_hidden_state.mean(1) for text in (one, two))
        return torch.nn.functional.cross_entropy(a @ b.T, torch.arange(16))

    return train(model, loss)


def conformer() -> Step:
    """Train speech recognition with CTC."""
    import torch
    from transformers import Wav2Vec2ConformerConfig, Wav2Vec2ConformerForCTC

    model = Wav2Vec2ConformerForCTC(
        Wav2Vec2ConformerConfig(
            vocab_size=32, hidden_size=128, num_hidden_layers=6, num_attention_heads=4,
            intermediate_size=512, conv_dim=(64,) * 3, conv_stride=(5, 4, 4),
            conv_kernel=(10, 8, 8),
            num_feat_extract_layers=3, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4,
            apply_spec_augment=False, layerdrop=0.0, pad_token_id=0,
        )
    )  # fmt: skip
    sound, text = torch.randn(4, 8000), torch.randint(1, 32, (4, 12))
    return train(model, lambda _: model(sound, labels=text).loss)


def lstm() -> Step:
    """Train two recurrent layers over a sequence."""
    import torch

    net = torch.nn.LSTM(128, 256, 2, batch_first=True)
    x = torch.randn(32, 64, 128)
    return train(net, lambda _: net(x)[0].square().mean())


def vmap_grad() -> Step:
    """Compute a gradient for each sample; no optimizer marks a step's end."""
    import torch

    net = torch.nn.Sequential(
        *(layer for _ in range(4) for layer in (torch.nn.Linear(256, 256), torch.nn.ReLU()))
    )
    weights = {name: w.detach() for name, w in net.named_parameters()}
    x = torch.randn(32, 256)

    def loss(state: Any, row: Any) -> Any:
        return torch.func.functional_call(net, state, (row,)).square().mean()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))

    def step(_: int) -> Any:
        return torch.stack([g.square().sum() for g in each(weights, x).values()]).sum()

    return step


def generate() -> Step:
    """Generate eight tokens, with a cache; each is a step to umem."""
    import torch

    model = _llama(8).eval()
    text = torch.randint(0, 8192, (2, 16))

    def step(_: int) -> Any:
        return model.generate(text, max_new_tokens=8, do_sample=False, pad_token_id=0)

    return step


NETS = {
    "resnet18": Program(resnet18, ("timm",)),
    "convnext": Program(convnext, ("timm",)),
    "mobilenet": Program(mobilenet, ("timm",)),
    "lraspp": Program(lraspp, ("torchvision",)),
    "autocast": Program(autocast, ("timm",)),
    "unet": Program(unet, ("diffusers",)),
    "gpt2": Program(gpt2, ("transformers",)),
    "llama_accumulation": Program(llama_accumulation, ("transformers",)),
    "lora": Program(lora, ("transformers", "peft")),
    "bert_buckets": Program(bert_buckets, ("transformers",), steady=False, first=56),
    "sentence": Program(sentence, ("transformers",)),
    "conformer": Program(conformer, ("transformers",)),
    "lstm": Program(lstm),
    "vmap_grad": Program(vmap_grad, first=24),
    "generate": Program(generate, ("transformers",), steady=False),
}
