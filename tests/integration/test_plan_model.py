"""``umem plan MODEL --train``: with a stand-in for timm, and with real libraries if installed."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import schemas

pytest.importorskip("torch")

import torch
from torch import nn

from umem import cli
from umem.base import device_profiles
from umem.base.units import MIB
from umem.capture.models import networks, nf4, training
from umem.cli import plan_model
from umem.errors import ConfigError, NotSupportedError, PlanError

WIDTH = 1024
# Two layers of 3 * 8 * 8 and WIDTH inputs, and one of 10 outputs.
PARAMETERS = (192 + 1) * WIDTH + (WIDTH + 1) * WIDTH + (WIDTH + 1) * 10
STAND_IN = f"""
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

__version__ = "0"

class Net(nn.Sequential):
    pretrained_cfg = {{"input_size": (3, 8, 8)}}
    parts = 0

    def set_grad_checkpointing(self):
        self.parts = 2

    def forward(self, x):
        if self.parts:
            return checkpoint_sequential(nn.Sequential(*self), self.parts, x, use_reentrant=False)
        return super().forward(x)

def list_models():
    return ["tiny_net", "tiny_normed"]

def is_model(name):
    return name in list_models()

def create_model(name, num_classes=10):
    rate = torch.linspace(0, 0.1, 2)[1].item()  # as networks with stochastic depth read it
    return Net(nn.Flatten(), nn.Linear(192, {WIDTH}), nn.ReLU(), nn.Dropout(rate),
               nn.BatchNorm1d({WIDTH}) if name == "tiny_normed" else nn.Identity(),
               nn.Linear({WIDTH}, {WIDTH}), nn.ReLU(), nn.Linear({WIDTH}, num_classes))
"""
Plan = Callable[..., dict[str, Any]]


@pytest.fixture
def plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Plan]:
    """Yield the command, which returns its object; `timm.tiny_net` is its model."""
    (tmp_path / "timm").mkdir()
    (tmp_path / "timm" / "__init__.py").write_text(STAND_IN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "timm"]:
        monkeypatch.delitem(sys.modules, name)

    def run(*words: str, model: str = "timm.tiny_net") -> dict[str, Any]:
        assert cli.main(["plan", model, "--policy", "lru", "--json", *words]) == 0
        found: dict[str, Any] = schemas.read("plan", capsys.readouterr().out)["model"]
        return found

    yield run
    sys.modules.pop("timm", None)


def test_a_full_training_has_all_states(plan: Plan) -> None:
    found = plan("--train", "full", "--batch", "32")
    assert found["parameters"] == found["trained"] == PARAMETERS
    assert found["precision"] == "amp"
    assert found["states"]["weights"] == found["states"]["gradients"] == 4 * PARAMETERS
    assert found["states"]["optimizer"] == pytest.approx(8 * PARAMETERS, rel=1e-3)
    assert found["fits"]
    assert found["sequence"] is found["max_sequence"] is None
    assert found["others"] == {}


def test_the_training_decides_what_is_held(plan: Plan) -> None:
    half = plan("--train", "full", "--precision", "bf16", "--torch-optimizer", "sgd")
    assert half["states"]["weights"] == half["states"]["gradients"] == 2 * PARAMETERS
    assert half["states"]["optimizer"] == 0
    forward = plan("--train", "none")
    assert forward["trained"] == forward["states"]["gradients"] == 0
    assert forward["precision"] == "bf16"
    assert forward["states"]["weights"] == 2 * PARAMETERS


def test_the_largest_batch_fits_and_little_more_does_not(plan: Plan) -> None:
    words = ["--train", "full", "--precision", "fp32", "--budget", "48MiB"]
    found = plan(*words)
    largest = found["max_batch"]
    assert largest > 100
    assert found["twice"]["step_us"] >= found["twice"]["compute_us"] > 0
    assert plan(*words, "--batch", str(largest))["fits"]
    more = largest + 1 + largest // 256
    assert not plan(*words, "--batch", str(more))["fits"]


def test_what_does_not_fit_is_told_what_needs_less(
    plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--train", "full", "--batch", "16384", "--budget", "96MiB"]
    found = plan(*words)
    assert not found["fits"]
    others = found["others"]
    assert others["--precision bf16"]["total_bytes"] < found["total_bytes"]
    assert others["--checkpointing"]["compute_us"] > 1.1 * others["--precision bf16"]["compute_us"]
    assert cli.main(["plan", "timm.tiny_net", "--policy", "lru", *words]) == 0
    text = capsys.readouterr().out
    assert "plain torch    does not fit" in text
    assert "or with      --checkpointing" in text
    assert "umem run" in text


def test_what_one_op_alone_exceeds_is_not_said_to_run(
    gpt2: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((tmp_path / gpt2).read_text())
    (tmp_path / gpt2).write_text(json.dumps({**config, "vocab_size": 50257}))
    words = ["plan", gpt2, "--policy", "lru", "--train", "none", "--budget", "64MiB"]
    assert cli.main([*words, "--batch", "1", "--sequence", "128", "--json"]) == 0
    found = schemas.read("plan", capsys.readouterr().out)["model"]
    assert found["max_batch"] > 0
    assert found["twice"] is None
    assert cli.main([*words, "--batch", "64", "--sequence", "128"]) == 0
    text = capsys.readouterr().out
    assert "plain torch    does not fit" in text
    assert re.search(r"^umem run +aten::mm .* alone needs more memory$", text, re.MULTILINE), text


def test_a_text_in_one_piece_has_no_mask_of_pairs_of_tokens(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
    config = {"model_type": "llama", "num_hidden_layers": 2, "vocab_size": 128, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    source, length = networks.find(".", tmp_path), 2048
    shape = networks.Shape(1, length)
    made = training.record(source, shape, training.Setup("full"), whole_lists=True)
    assert max(block.bytes for block in made.recording.blocks.values()) < length * length


def test_not_even_one_sample_fits(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--train", "full", "--budget", "4MiB"]
    assert plan(*words)["max_batch"] == 0
    assert cli.main(["plan", "timm.tiny_net", "--policy", "lru", *words]) == 0
    assert "none: 1 is too much" in capsys.readouterr().out


def test_a_size_that_does_not_run_does_not_fit(plan: Plan) -> None:
    """Batch normalization refuses a batch of 1, which the search tries."""
    words = ["--train", "full", "--batch", "2"]
    assert plan(*words, "--budget", "4MiB", model="timm.tiny_normed")["max_batch"] == 0
    assert plan(*words, "--budget", "48MiB", model="timm.tiny_normed")["max_batch"] > 100
    assert cli.main(["plan", "timm.tiny_normed", "--train", "full", "--policy", "lru"]) == 2


def test_the_default_budget_leaves_room_for_the_context(plan: Plan) -> None:
    memory = device_profiles.find("rtx4090-pcie4").memory_bytes
    found = plan("--train", "full", "--device", "rtx4090-pcie4")
    assert memory - 1024 * MIB < found["budget"] < memory


def test_the_report_has_the_answer(plan: Plan, tmp_path: Path) -> None:
    plan("--train", "full", "--report", "page.html")
    assert "plain torch: fits" in (tmp_path / "page.html").read_text("utf-8")


def test_a_file_names_the_model(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "tiny_net"}))
    found = plan("--train", "none", model=".")
    assert found["parameters"] == PARAMETERS
    assert plan("--train", "none", model="config.json")["model"] == found["model"]


def test_lists_are_whole_for_plain_torch_and_in_parts_for_umem() -> None:
    def build(shape: networks.Shape) -> networks.Network:
        net = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4)))  # of 16 MiB each
        batch = {"x": torch.zeros(shape.batch, 2048)}
        return networks.Network(net, batch, lambda net, b: net(b["x"]), lambda out, _: out.sum())

    def ops(whole: bool) -> int:
        how = training.Setup("full", "fp32", "adamw-foreach")
        source = networks.Source("four layers", build)
        run = training.record(source, networks.Shape(1), how, whole_lists=whole)
        return sum(op.name == "aten::_foreach_sqrt" for op, _ in run.recording.last_step())

    assert ops(whole=True) == 1
    assert ops(whole=False) > 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["x.py:f", "--batch", "4"], "--batch needs --train: full, lora, qlora, none"),
        (["--train", "full"], "--train needs a model"),
        (["timm.tiny_net", "--train", "full", "--batch", "0"], "--batch 0; allowed: 1 and more"),
        (["timm.tiny_net", "--train", "full", "--sequence", "9"], "takes no tokens"),
        (["timm.tiny_net", "--train", "full", "--precision", "bf61"], "did you mean bf16?"),
        (["timm.tiny_net", "--train", "full", "--lora-rank", "4"], "needs --train lora or qlora"),
        (["timm.tiny_net", "--train", "none", "--checkpointing"], "needs --train full or lora or"),
        (["GPT2Config", "--train", "full", "--image", "64"], "takes no pictures"),
        (["timm.tiny_net", "--train", "full", "--torch-optimizer", "adam2"], "allowed: adamw"),
        (["timm.tiny_ned", "--train", "full"], "did you mean tiny_net?"),
        (["no_such_net", "--train", "full"], "is not a config.json, a folder with one, or a model"),
        (["absent.json", "--train", "full"], "cannot be read as a configuration"),
        (["odd.json", "--train", "full"], "describes no model; allowed: a file with model_type"),
    ],
)
def test_errors(
    plan: Plan, words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan is not None
    (tmp_path / "odd.json").write_text("{}")
    assert cli.main(["plan", *words]) == 2
    assert told in capsys.readouterr().err


def test_a_missing_library_is_named_with_its_installation(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert plan is not None
    for name in ("transformers", "peft"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match="not installed: pip install"):
        networks.find("GPT2Config", Path.cwd())
    with pytest.raises(NotSupportedError, match="pip install peft"):
        training.check(training.Setup("lora"))


def test_a_model_without_linear_layers_has_no_adapters() -> None:
    with pytest.raises(PlanError, match="no linear layer"):
        training._linear(nn.Sequential(nn.Conv2d(3, 8, 3)))


def test_an_nf4_layer_has_half_a_byte_a_number_and_gradients_for_its_input() -> None:
    net = nn.Sequential(nn.Linear(256, 128), nn.Linear(128, 64, bias=False))
    nf4.quantize(net, "0")
    layer = net[0]
    assert isinstance(layer, nf4.NF4Linear)
    scales = 256 * 128 // 64
    assert layer.weight.numel() == 256 * 128 // 2 + scales + 4 * scales // 256
    assert layer.bias is not None
    layer.weight.zero_()
    x = torch.ones(3, 256, requires_grad=True)
    out = net(x)
    assert out.dtype == torch.float32
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert layer.weight.grad is None


def test_smaller_trainings_are_offered_by_what_is_asked() -> None:
    def options(how: training.Setup) -> list[str]:
        return [option for option, _ in plan_model._smaller(how)]

    assert options(training.Setup("none")) == []
    assert options(training.Setup("qlora", "bf16", checkpointing=True)) == []
    assert options(training.Setup("lora")) == [
        "--checkpointing", "--train qlora", "--train qlora --checkpointing",
    ]  # fmt: skip
    assert "--precision bf16" in options(training.Setup("full"))
    # A label names what differs, so all else is as the program has it.
    offered = dict(plan_model._smaller(training.Setup("full", "fp32")))
    assert {option for option, how in offered.items() if how.precision != "fp32"} == {
        "--precision bf16"
    }


@pytest.fixture
def gpt2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    pytest.importorskip("transformers")
    config = {"model_type": "gpt2", "n_layer": 1, "n_embd": 64, "n_head": 2, "vocab_size": 128}
    (tmp_path / "config.json").write_text(json.dumps({**config, "n_positions": 128}))
    monkeypatch.chdir(tmp_path)
    return "config.json"


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gpt2", "architectures": ["GPT2ForSequenceClassification"], "n_layer": 1,
         "n_embd": 64, "n_head": 2, "vocab_size": 128},  # has no token for padding
        {"model_type": "xlnet", "n_layer": 1, "d_model": 64, "n_head": 2, "d_inner": 64,
         "vocab_size": 128, "architectures": ["XLNetLMHeadModel"]},  # -1 positions
        {"model_type": "yolos", "image_size": [32, 48], "hidden_size": 32, "num_hidden_layers": 1,
         "num_attention_heads": 2, "intermediate_size": 32, "num_detection_tokens": 4,
         "architectures": ["YolosModel"]},
    ],
    ids=lambda config: config["model_type"],
)  # fmt: skip
def test_unusual_configurations(config: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = networks.find(".", tmp_path)
    assert (source.sequence or 1) > 0
    shape = networks.Shape(2, source.sequence and 64)
    made = training.record(source, shape, training.Setup("none"), whole_lists=True)
    assert made.recording.steps > 1


def test_weights_that_do_not_run_are_told() -> None:
    def build(shape: networks.Shape) -> networks.Network:
        net = nn.ModuleDict({"text": nn.Linear(8, 8), "picture": nn.Linear(8, 8)})
        data = {"x": torch.randn(shape.batch, 8)}
        return networks.Network(
            net,
            data,
            lambda model, given: model.get_submodule("text")(given["x"]),
            lambda out, _: out.sum(),
        )

    source, how = networks.Source("both", build), training.Setup("full")
    made = training.record(source, networks.Shape(2), how, whole_lists=True)
    (remark,) = made.recording.remarks
    assert remark.startswith("0.0 M trained weights got no gradient")


def test_the_largest_size_is_known_if_its_double_does_not_run() -> None:
    """As of a table of positions that no option makes longer."""

    class Positions(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + torch.zeros(8, 8)[: len(x)]

    def build(shape: networks.Shape) -> networks.Network:
        data = {"x": torch.randn(shape.batch, 8)}
        return networks.Network(
            Positions(8, 8), data, lambda model, given: model(given["x"]), lambda out, _: out.sum()
        )

    def run(batch: int) -> training.Recorded:
        how = training.Setup("full")
        return training.record(
            networks.Source("positions", build), networks.Shape(batch), how, whole_lists=True
        )

    sizes = plan_model.Sizes(run, device_profiles.find("a100-pcie4"), 1 << 40)
    assert [sizes.largest(start).batch for start in (2, 8)] == [8, 8]


def test_weights_that_are_not_quantized_are_told(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = {"model_type": "gpt2", "quantization_config": {"quant_method": "gptq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert networks.find(".", tmp_path).title.endswith(", its weights not quantized")


@pytest.mark.usefixtures("plan")
def test_a_configuration_of_timm_has_its_classes(tmp_path: Path) -> None:
    config = {"architecture": "tiny_net", "num_classes": 30}
    (tmp_path / "config.json").write_text(json.dumps(config))
    net = networks.find("config.json", tmp_path).build(networks.Shape(2)).model
    assert [*net.parameters()][-1].shape == (30,)


def test_a_longer_sequence_gets_more_positions(
    gpt2: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", gpt2, "--train", "none", "--policy", "lru", "--budget", "8MiB"]
    assert cli.main([*words, "--json"]) == 0
    short = schemas.read("plan", capsys.readouterr().out)["model"]
    assert short["sequence"] == short["positions"] == 128
    assert short["max_sequence"] > 128
    assert cli.main([*words, "--sequence", str(short["max_sequence"]), "--json"]) == 0
    long = schemas.read("plan", capsys.readouterr().out)["model"]
    assert long["fits"]
    assert long["parameters"] == short["parameters"] + (short["max_sequence"] - 128) * 64


def test_layers_for_adapters_are_known(gpt2: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("peft")
    words = [gpt2, "--train", "lora", "--policy", "lru", "--lora-target"]
    assert cli.main(["plan", *words, "c_attn, c_pro"]) == 2
    told = capsys.readouterr().err
    assert "--lora-target 'c_pro': " in told
    assert "did you mean c_proj?" in told


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, for calls that peft makes
@pytest.mark.filterwarnings("ignore::UserWarning")  # of peft, which sets an option itself
@pytest.mark.parametrize("train", ["lora", pytest.param("qlora", marks=pytest.mark.nightly)])
def test_adapters_of_peft(gpt2: str, train: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("peft")
    words = ["--train", train, "--lora-rank", "4", "--lora-target", " c_attn", "--policy", "lru"]
    assert cli.main(["plan", gpt2, *words, "--budget", "8MiB", "--json"]) == 0
    found = schemas.read("plan", capsys.readouterr().out)["model"]
    assert found["trained"] == 4 * (64 + 3 * 64)
    per_weight = {"lora": 2, "qlora": 4}[train]  # embeddings and norms of qlora are in float32
    assert found["states"]["gradients"] == 4 * found["trained"]
    assert found["states"]["weights"] < (per_weight + 2) * found["parameters"]


@pytest.mark.parametrize(
    ("switch", "given"),
    [
        ("activation_checkpointing_enable", ({"use_reentrant": False},)),
        ("gradient_checkpointing_enable", ({"use_reentrant": False},)),
        ("enable_gradient_checkpointing", ()),
        ("set_grad_checkpointing", ()),
    ],
)
def test_checkpoints_are_switched_on_by_the_models_own_library(
    switch: str, given: tuple[object, ...]
) -> None:
    model, calls = nn.Linear(2, 2), list[tuple[object, ...]]()
    with pytest.raises(PlanError, match="Linear has no switch for checkpoints; --recompute all"):
        training._checkpoint(model)
    setattr(model, switch, lambda *args: calls.append(args))
    training._checkpoint(model)
    assert calls == [given]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, for calls that peft makes
def test_layers_that_transformers_never_quantizes_stay_whole() -> None:
    """T5 casts the input of `wo` to the type of its weight."""
    pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    model = transformers.T5ForConditionalGeneration(config)
    adapted = training._with_adapters(model, training.Setup("qlora", targets=("q",)))
    kinds = {name.rpartition(".")[2]: type(part) for name, part in adapted.named_modules()}
    assert kinds["wo"] is nn.Linear
    assert kinds["wi"] is nf4.NF4Linear


def test_a_layer_of_transformers_has_its_weight_transposed() -> None:
    class Conv1D(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(256, 128))
            self.bias = nn.Parameter(torch.zeros(128))

    net = nn.Sequential(Conv1D())
    nf4.quantize(net, "0")
    layer: Any = net[0]
    assert (layer.in_features, layer.out_features) == (256, 128)
    assert net(torch.ones(3, 256)).shape == (3, 128)
