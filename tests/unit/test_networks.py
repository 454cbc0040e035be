"""Models that a configuration or a name describes, with data for a step of each.

Those of transformers and diffusers are tiny. torchvision is a stand-in, because the real one has to
be built for the installed torch; tests/integration/test_plan_model.py has one for timm.
"""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from support.frameworks import needs
from torch import nn

from umem.capture.models import networks
from umem.errors import ConfigError, PlanError

pytestmark = needs("transformers", "diffusers")  # imported by the tests, and not at collection

BATCH = 2
TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 16, "vocab_size": 32, "max_position_embeddings": 8}  # fmt: skip
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 32}
UNET = {"sample_size": 8, "block_out_channels": [8], "norm_num_groups": 4, "layers_per_block": 1}
PLAIN = {**UNET, "down_block_types": ["DownBlock2D"], "up_block_types": ["UpBlock2D"]}
CROSS = {"down_block_types": ["CrossAttnDownBlock2D"], "up_block_types": ["CrossAttnUpBlock2D"],
         "cross_attention_dim": 8, "attention_head_dim": 4}  # fmt: skip


def step(source: networks.Source, shape: networks.Shape) -> networks.Network:
    """Run forward and backward passes of a step with the model's own data."""
    network = source.build(shape)
    network.loss(network.forward(network.model, network.batch), network.batch).backward()
    assert any(p.grad is not None for p in network.model.parameters())
    return network


def described(config: dict[str, Any], folder: Path) -> networks.Source:
    (folder / "config.json").write_text(json.dumps(config))
    return networks.find(".", folder)


@pytest.mark.parametrize(
    ("config", "model", "labels"),
    [
        ({"model_type": "bert", **TINY}, "BertForMaskedLM", (BATCH, 8)),
        (
            {"model_type": "bert", **TINY, "architectures": ["BertForSequenceClassification"]},
            "BertForSequenceClassification", (BATCH,),
        ),
        ({"model_type": "bert", **TINY, "architectures": ["BertModel"]}, "BertModel", None),
        ({"model_type": "llama", **TINY}, "LlamaForCausalLM", (BATCH, 8)),
        ({"model_type": "t5", **T5}, "T5ForConditionalGeneration", (BATCH, 8)),
        (
            {"model_type": "vit", **TINY, "image_size": 8, "patch_size": 4},
            "ViTForImageClassification", (BATCH,),
        ),
    ],
)  # fmt: skip
def test_a_config_of_transformers(
    config: dict[str, Any], model: str, labels: tuple[int, ...] | None, tmp_path: Path
) -> None:
    source = described(config, tmp_path)
    assert source.title.startswith(f"{model} of transformers ")
    network = step(source, networks.Shape(BATCH, 8 if "vocab_size" in config else None))
    its = network.batch.get("labels")
    assert labels == (None if its is None else tuple(its.shape))


def test_the_default_sequence_is_the_longest_that_the_model_knows(tmp_path: Path) -> None:
    source = described({"model_type": "llama", **TINY}, tmp_path)
    assert source.sequence == source.positions == 8
    network = source.build(networks.Shape(1, 32))
    config: Any = network.model.config
    assert config.max_position_embeddings == 32
    assert network.batch["input_ids"].shape == (1, 32)
    long = described({"model_type": "llama", **TINY, "max_position_embeddings": 1 << 17}, tmp_path)
    assert long.sequence == networks.SEQUENCE


@pytest.mark.parametrize(
    ("config", "data"),
    [
        ({"_class_name": "UNet2DModel", **PLAIN},
         {"sample": (BATCH, 3, 8, 8), "timestep": (BATCH,)}),
        ({"_class_name": "UNet2DConditionModel", **UNET, **CROSS},
         {"sample": (BATCH, 4, 8, 8), "timestep": (BATCH,),
          "encoder_hidden_states": (BATCH, 77, 8)}),
    ],
)  # fmt: skip
def test_a_config_of_diffusers(
    config: dict[str, Any], data: dict[str, tuple[int, ...]], tmp_path: Path
) -> None:
    source = described(config, tmp_path)
    assert source.title.startswith(f"{config['_class_name']} of diffusers ")
    network = step(source, networks.Shape(BATCH))
    assert {name: tuple(value.shape) for name, value in network.batch.items()} == data
    larger = source.build(networks.Shape(1, image=16)).batch["sample"]
    assert larger.shape[2:] == (16, 16)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"model_type": "no_such"}, "has no 'no_such'"),
        ({"_class_name": "NoSuch"}, "diffusers has no class 'NoSuch'"),
    ],
)
def test_a_config_of_nothing_is_refused(config: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=told):
        described(config, tmp_path)


def test_a_model_with_other_inputs_is_refused_when_its_step_is_built(tmp_path: Path) -> None:
    sounds = {"model_type": "whisper", "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
              "encoder_attention_heads": 2, "decoder_attention_heads": 2,
              "architectures": ["WhisperForConditionalGeneration"]}  # fmt: skip
    with pytest.raises(PlanError, match="takes input_features; allowed: models of input_ids"):
        described(sounds, tmp_path).build(networks.Shape(1))
    control = {"_class_name": "ControlNetModel", "cross_attention_dim": 8, **UNET,
               "attention_head_dim": 4, "down_block_types": ["CrossAttnDownBlock2D"]}  # fmt: skip
    with pytest.raises(PlanError, match="takes controlnet_cond, for which there is no data"):
        described(control, tmp_path).build(networks.Shape(1))


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("GPT2Config", "GPT2LMHeadModel of transformers"),
        ("transformers.GPT2Model", "GPT2Model of transformers"),
        ("UNet2DModel", "UNet2DModel of diffusers"),
        ("diffusers.AutoencoderKL", "AutoencoderKL of diffusers"),
    ],
)
def test_the_name_of_a_class_is_a_model(name: str, title: str, tmp_path: Path) -> None:
    assert networks.find(name, tmp_path).title.startswith(f"{title} ")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("transformers.GPT2Confg", "transformers has no such model (did you mean GPT2Config?)"),
        ("transformers.GPT2Tokenizer", "transformers has no such model"),
        ("diffusers.DDPMScheduler", "diffusers has no such model"),
        ("UNet2DModell", "did you mean UNet2DModel?"),
    ],
)
def test_other_names_are_refused(name: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        networks.find(name, tmp_path)
    assert told in str(caught.value)


@pytest.fixture
def torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    def plain() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def with_backbone(*, weights: object = None, weights_backbone: object = "v1") -> nn.Module:
        assert weights is weights_backbone is None, "these are downloaded"
        return plain()

    made = {"tiny_net": plain, "tiny_maps": with_backbone}
    library: Any = types.ModuleType("torchvision")
    library.__version__ = "0"
    library.models = types.SimpleNamespace(
        list_models=lambda: list(made), get_model_builder=made.__getitem__
    )
    monkeypatch.setitem(sys.modules, "torchvision", library)


@pytest.mark.usefixtures("torchvision")
def test_a_name_of_torchvision(tmp_path: Path) -> None:
    for name in ("tiny_net", "tiny_maps"):
        source = networks.find(f"torchvision.{name}", tmp_path)
        assert source.title == f"{name} of torchvision 0"
        assert step(source, networks.Shape(BATCH, image=32)).batch["x"].shape == (BATCH, 3, 32, 32)
    with pytest.raises(ConfigError, match="did you mean tiny_net"):
        networks.find("torchvision.tiny_ned", tmp_path)


def test_what_a_library_raises_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ({"hidden_size": "wide"}, {"vocab_size": "32000"}):
        with pytest.raises(ConfigError, match=r"config\.json: transformers: .*Error: "):
            described({"model_type": "llama", **TINY, **wrong}, tmp_path)

    def no_defaults(*_: object) -> None:
        raise ValueError("it has no defaults")

    monkeypatch.setattr("transformers.GPT2Config.__init__", no_defaults)
    with pytest.raises(ConfigError, match="GPT2Config of transformers with its defaults: ValueErr"):
        networks.find("GPT2Config", tmp_path)

    class Broken:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "torchvision":
                raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(ConfigError, match=r"mean LlamaConfig.*nms does not exist; pip install"):
        networks.find("LlamaConfg", tmp_path)


def test_the_loss_is_made_of_scores_or_of_the_first_output() -> None:
    labels = {"labels": torch.zeros(BATCH, dtype=torch.long)}
    scores = torch.randn(BATCH, 5)
    entropy = nn.functional.cross_entropy(scores, labels["labels"])
    for out in (scores, (scores, None), {"out": scores, "aux": None}):
        assert networks._loss_of_classes(out, labels) == entropy
    maps = torch.randn(BATCH, 5, 2, 2)
    assert networks._loss_of_classes({"out": maps}, labels) == maps.square().mean()
