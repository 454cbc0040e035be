"""Tracing on fake tensors: every block and op of nets that can be counted by hand."""

from __future__ import annotations

import gc
import resource
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.optim import optimizer as optimizers  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import umem  # noqa: E402
from umem import cli  # noqa: E402
from umem.base.native import core  # noqa: E402
from umem.capture import flops, program, script  # noqa: E402
from umem.capture.recording import OpCost, Recording  # noqa: E402
from umem.errors import ConfigError, PlanError  # noqa: E402
from umem.simulation.simulate import recorded_step  # noqa: E402
from umem.trace import schema  # noqa: E402
from umem.trace.step_builder import StepBuilder  # noqa: E402
from umem.trace.step_trace import Kind, StepTrace  # noqa: E402

Make = Callable[[], Any]


def _step(recording: Recording) -> StepTrace:
    builder = StepBuilder()
    for event in recording.device_events():
        builder.add(event)
    return builder.step()


def _peak(recording: Recording) -> int:
    """The peak of requested bytes, over all steps."""
    live: dict[int, int] = {}
    peak = 0
    for event in recording.device_events():
        if isinstance(event, schema.Alloc):
            live[event.id] = event.bytes
            peak = max(peak, sum(live.values()))
        elif isinstance(event, schema.Free):
            del live[event.id]
    return peak


def _named(recording: Recording, name: str) -> list[tuple[schema.Op, OpCost]]:
    return [(op, cost) for op, cost in recording.last_step() if op.name == f"aten::{name}"]


def _of(make_net: Callable[[], nn.Module], shape: tuple[int, ...], **options: Any) -> Make:
    """Trains a net with plain SGD on the sum of its outputs."""

    def make() -> Any:
        net = make_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, **options)
        return net, optimizer, torch.randn(shape), lambda model, batch: model(batch).sum()

    return make


def test_a_linear_layer_to_the_byte() -> None:
    recording = program.trace(_of(lambda: nn.Linear(300, 200, bias=False), (100, 300)))
    blocks = recording.blocks
    by_tag = Counter(block.tag for block in blocks.values())
    assert by_tag["param"] == 1
    ((product, cost),) = _named(recording, "mm")[:1]
    weight, batch = 300 * 200 * 4, 100 * 300 * 4
    assert sorted(blocks[i].bytes for i in product.reads) == sorted([weight, batch])
    assert [blocks[i].bytes for i in product.writes] == [100 * 200 * 4]
    assert cost.flops == 2 * 100 * 300 * 200
    assert cost.bytes == weight + batch + 100 * 200 * 4
    assert (product.family, cost.module, cost.phase) == ("linear", "Linear", "forward")
    backward = [op for op, cost in recording.last_step() if cost.phase == "backward"]
    assert [op.name for op in backward] == ["aten::mm"]  # the batch wants no gradient
    gradient = blocks[backward[0].writes[0]]
    assert (gradient.tag, gradient.bytes) == ("grad", weight)
    (update,) = [op for op, cost in recording.last_step() if cost.phase == "optimizer"]
    assert update.name == "aten::_foreach_add_"
    assert len(update.reads) == 2
    assert len(update.writes) == 1
    # Backward begins with the loss and its gradient of one, which expands to the outputs' shape.
    assert _peak(recording) == 2 * weight + batch + 2 * 4


def test_the_peak_of_a_chain_to_the_byte() -> None:
    size = 1000 * 4

    def make() -> Callable[[], None]:
        x = torch.zeros(1000)

        def step() -> None:
            a = x + 1  # x, a
            b = a * 2  # x, a, b
            del a
            c = b.exp()  # x, b, c
            d = c + b  # x, b, c, d: the peak
            del b, c
            d.neg()

        return step

    recording = program.trace(make)
    assert _peak(recording) == 4 * size
    step = _step(recording)
    assert step.op_names == ("aten::add", "aten::mul", "aten::exp", "aten::add", "aten::neg")
    assert list(step.live_bytes // step.bytes[0]) == [2, 3, 3, 4, 3]


def test_views_are_neither_blocks_nor_ops() -> None:
    def make() -> Callable[[], None]:
        x = torch.zeros(64, 64)

        def step() -> None:
            y = x.t()[3].view(-1)[10:20].unsqueeze(0).expand(5, 10).detach()
            y.sum()

        return step

    recording = program.trace(make)
    assert [op.name for op, _ in recording.last_step()] == ["aten::sum"]
    assert [block.bytes for block in recording.blocks.values()] == [64 * 64 * 4, 4, 4]


def test_in_place_ops_read_and_write_and_overwriting_ones_only_write() -> None:
    def make() -> Callable[[], None]:
        x, y = torch.zeros(100), torch.ones(100)

        def step() -> None:
            x.add_(y)
            x.copy_(y)
            x[:10].zero_()
            torch.mul(y, 2, out=x)

        return step

    ops = [op for op, _ in program.trace(make).last_step()]
    assert [(op.name, op.reads, op.writes) for op in ops] == [
        ("aten::add_", (0, 1), (0,)),
        ("aten::copy_", (1,), (0,)),
        ("aten::zero_", (0,), (0,)),  # a part: the rest of the block remains
        ("aten::mul", (1,), (0,)),
    ]


def test_relu_in_place_needs_one_block_less() -> None:
    def net_of(inplace: bool) -> Make:
        return _of(
            lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(inplace), nn.Linear(64, 64)),
            (256, 64),
        )

    def outputs(recording: Recording) -> int:
        return sum(
            recording.blocks[i].bytes
            for op, cost in recording.last_step()
            if cost.phase == "forward"
            for i in op.writes
        )

    one, two = (program.trace(net_of(inplace)) for inplace in (True, False))
    assert len(one.blocks) < len(two.blocks)
    assert outputs(one) == outputs(two)  # written to in both, by different names


def test_shared_weights_are_one_block() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(50, 8)
            self.head = nn.Linear(8, 50, bias=False)
            self.head.weight = self.table.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.table(tokens))
            return out

    def make() -> Any:
        net = Tied()
        optimizer = torch.optim.AdamW(net.parameters())
        tokens = torch.randint(50, (4, 6))
        return net, optimizer, tokens, lambda model, batch: model(batch).sum()

    recording = program.trace(make)
    tags = Counter(block.tag for block in recording.blocks.values())
    assert tags["param"] == 1
    assert tags["optimizer"] == 3  # step, exp_avg, exp_avg_sq
    assert all(block.bytes == 50 * 8 * 4 for block in recording.blocks.values()
               if block.tag in ("param", "grad"))  # fmt: skip
    # Rows are read, not the table.
    assert _named(recording, "embedding")[0][1].bytes == 2 * 4 * 6 * 8 * 4


def test_dropout_keeps_a_mask_of_bytes() -> None:
    for make_net in (lambda: nn.Dropout(0.5), lambda: _Functional()):
        recording = program.trace(_of(lambda net=make_net: nn.Sequential(nn.Linear(8, 8), net()),
                                     (128, 8)))  # fmt: skip
        ((drop, _),) = _named(recording, "native_dropout")
        assert [recording.blocks[i].bytes for i in drop.writes] == [128 * 8 * 4, 128 * 8]


class _Functional(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.dropout(x, 0.5, self.training)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("mask", [False, True])
def test_attention_never_writes_its_scores(dropout: float, mask: bool) -> None:
    length = 512

    def make() -> Callable[[], None]:
        q, k, v = (torch.randn(2, 4, length, 32, requires_grad=True) for _ in range(3))
        bias = torch.zeros(length, length) if mask else None

        def step() -> None:
            y = F.scaled_dot_product_attention(q, k, v, bias, dropout_p=dropout)
            y.sum().backward()
            q.grad = k.grad = v.grad = None

        return step

    recording = program.trace(make)
    scores = 2 * 4 * length * length * 4
    assert max(block.bytes for block in recording.blocks.values()) < scores
    assert recording.remarks == []
    forward, backward = [
        cost for op, cost in recording.last_step() if op.family == "attention" and cost.flops
    ]
    assert forward.flops == 4 * 2 * 4 * length * length * 32
    assert backward.flops == 2.5 * forward.flops


def test_rms_norm_says_what_it_cannot_do() -> None:
    recording = program.trace(
        _of(lambda: nn.Sequential(nn.Linear(64, 64), nn.RMSNorm(64)), (8, 64))
    )
    assert ["RMSNorm" in remark for remark in recording.remarks] == [True]


def test_every_op_of_a_net_knows_its_module() -> None:
    make = _of(lambda: nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), (8, 64))
    costs = [cost for _, cost in program.trace(make).last_step()]
    forward = [cost.module for cost in costs if cost.phase == "forward" and cost.module]
    backward = [cost.module for cost in costs if cost.phase == "backward"]
    assert list(dict.fromkeys(forward)) == ["0", "1", "2"]
    assert list(dict.fromkeys(backward)) == ["2", "1", "0"]


def test_attention_inside_of_torchs_own_layers() -> None:
    layer = lambda: nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)  # noqa: E731
    recording = program.trace(_of(layer, (2, 256, 32)))
    assert len(_named(recording, "_scaled_dot_product_flash_attention_for_cpu")) == 1


@pytest.mark.parametrize(
    ("make_optimizer", "states"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1),
        (lambda p: torch.optim.AdamW(p), 2),
        (lambda p: torch.optim.Adam(p, amsgrad=True), 3),
    ],
)
def test_optimizer_states(make_optimizer: Callable[[Any], Any], states: int) -> None:
    weights = 3 * (64 * 64 + 64) * 4

    def make() -> Any:
        net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
        x = torch.randn(4, 64)
        return net, make_optimizer(net.parameters()), x, lambda model, batch: model(batch).sum()

    recording = program.trace(make)
    step = _step(recording)
    held = sum(int(size) for size, tag, kind in zip(step.bytes, step.tags, step.kind, strict=True)
               if tag == "optimizer" and kind == Kind.PERSISTENT)  # fmt: skip
    scalars = 6 * 256 if states > 1 else 0
    assert held == states * weights + scalars
    assert any("_foreach_" in name for name in step.op_names)  # as on a GPU


def test_gradients_accumulate_in_place() -> None:
    def make() -> Any:
        net = nn.Linear(32, 32, bias=False)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def step() -> None:
            for _ in range(3):
                net(torch.randn(8, 32)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return net, step

    recording = program.trace(make)
    assert len(_named(recording, "add_")) == 2  # the first gradient is used directly
    grads = [b for b in recording.blocks.values() if b.tag == "grad"]
    assert len(grads) == recording.steps
    assert {b.bytes for b in grads} == {32 * 32 * 4}


def test_the_second_step_repeats() -> None:
    make = _of(lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), (16, 64),
               momentum=0.9)  # fmt: skip
    two, four = (_step(program.trace(make, steps)) for steps in (2, 4))
    assert two.op_names == four.op_names
    assert list(two.bytes) == list(four.bytes)
    assert list(two.kind) == list(four.kind)
    assert two.tags == four.tags


def test_checkpointing_needs_less_and_computes_again() -> None:
    class Net(nn.Module):
        def __init__(self, again: bool) -> None:
            super().__init__()
            self.again = again
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
            return x

    plain, again = (program.trace(_of(lambda a=a: Net(a), (512, 64))) for a in (False, True))
    assert _peak(again) < 0.6 * _peak(plain)
    flops = [sum(cost.flops for _, cost in r.last_step()) for r in (plain, again)]
    # The last layer of each part need not run again: torch stops once nothing more is needed.
    assert flops[1] == pytest.approx(flops[0] * 7 / 6, rel=0.02)


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return 2 * gradient * ctx.saved_tensors[0]


def test_what_custom_functions_and_reentrant_checkpoints_make_is_an_activation() -> None:
    def bytes_of_activations(run: Callable[[Any, Any], Any]) -> int:
        def make() -> Any:
            net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
            x = torch.ones(256, 64)

            def step() -> None:
                y = net[0](x)
                for layer in net[1:]:
                    y = run(layer, y)
                y.sum().backward()

            return net, step

        step = _step(program.trace(make))
        return max(step.live_bytes_of(np.array([tag == "activation" for tag in step.tags])))

    kept, again = (
        bytes_of_activations(lambda layer, y, way=way: checkpoint(layer, y, use_reentrant=way))
        for way in (False, True)
    )
    assert 8 * 256 * 64 * 4 <= kept <= again <= 9 * 256 * 64 * 4 + 512  # it computes one more
    plain = bytes_of_activations(lambda layer, y: layer(y).square())
    assert bytes_of_activations(lambda layer, y: Squared.apply(layer(y))) == plain


def test_a_program_that_says_cuda_has_its_host_tensors_left_out() -> None:
    def make() -> Any:
        net = nn.Linear(128, 128).to(torch.bfloat16).cuda()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        loaded = torch.randn(64, 128, dtype=torch.bfloat16)

        def step() -> None:
            optimizer.zero_grad()
            x = loaded.to("cuda", non_blocking=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                noise = torch.zeros(64, 128, device=x.device, dtype=x.dtype)
                loss = net(x + noise).float().sum()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            loss.detach().cpu()

        return net, step

    recording = program.trace(make)
    step = _step(recording)
    persistent = [int(size) for size, kind in zip(step.bytes, step.kind, strict=True)
                  if kind == Kind.PERSISTENT]  # fmt: skip
    assert sorted(persistent) == [256, 128 * 128 * 2]  # bias and weight, and no batch
    assert "aten::zeros" in step.op_names
    assert step.op_names[0] == "aten::clone"  # the transfer writes the batch's copy


def test_no_memory_is_used(tmp_path: Path) -> None:
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    recording = program.trace(_of(lambda: nn.Linear(40_000, 40_000), (64, 40_000)))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # KiB
    assert _peak(recording) > 12e9  # the weights alone are 6 GiB
    assert grown < 512 * 1024


def test_torch_is_as_before_afterwards() -> None:
    def watched() -> tuple[object, ...]:
        return (
            torch.compile, nn.Module._apply, F.scaled_dot_product_attention, torch._VF.dropout,
            optimizers._foreach_supported_types, torch.autocast.__init__, torch.cuda.Event,
            torch.set_default_device,
        )  # fmt: skip

    before = watched()
    program.trace(_of(lambda: nn.Linear(4, 4), (2, 4)))
    with pytest.raises(PlanError):
        program.trace(lambda: 1 / 0)
    assert watched() == before
    assert gc.isenabled()
    assert nn.Linear(4, 4)(torch.ones(2, 4)).sum().item() != 0.123


def _read(make: Callable[[torch.Tensor], object]) -> Make:
    def program() -> Callable[[], object]:
        x = torch.randn(4)
        return lambda: make(x)

    return program


@pytest.mark.parametrize(
    ("reader", "words"),
    [
        (lambda x: x.sum().item(), r"tensor\.item\(\)"),
        (lambda x: 1 if x.sum() > 0 else 2, "a branch on a tensor"),
        (lambda x: x.nonzero(), "whose result's size is its data"),
        (lambda x: x[x > 0], "whose result's size is its data"),
        (lambda x: x.numpy(), r"tensor\.numpy\(\)"),
        (lambda x: x.tolist(), r"tensor\.item\(\)"),
    ],
)
def test_reading_data_names_the_line(reader: Callable[[Any], object], words: str) -> None:
    with pytest.raises(PlanError, match=words) as caught:
        program.trace(_read(reader))
    assert str(caught.value).startswith(f"{__file__}:")
    assert "leave it out" in str(caught.value)


def test_what_the_program_raises_names_the_line() -> None:
    def make() -> Any:
        return lambda: torch.zeros(3) @ torch.zeros(4)

    with pytest.raises(PlanError, match=rf"{__file__}:\d+: a step raised RuntimeError"):
        program.trace(make)
    with pytest.raises(PlanError, match="setting the program up raised ZeroDivisionError"):
        program.trace(lambda: 1 / 0)
    for made in (7, None, (1, 2), (nn.Linear(1, 1), 3), nn.Linear(1, 1)):
        with pytest.raises(PlanError, match="allowed: a step"):
            program.trace(lambda made=made: made)


def test_entries(tmp_path: Path) -> None:
    (tmp_path / "progs_a.py").write_text("def make_step():\n    return 3\nVALUE = 4\n")
    (tmp_path / "progs_b.py").write_text("import nowhere_to_be_found\n")
    (tmp_path / "progs_c.py").write_text("\nraise ValueError('no')\n")
    (tmp_path / "email").mkdir()
    (tmp_path / "email" / "mine.py").write_text(
        "def f():\n    import beside\n    return beside.VALUE\n"
    )
    (tmp_path / "email" / "beside.py").write_text("VALUE = 5\n")
    assert program.find("progs_a:make_step", tmp_path)() == 3
    assert program.find("email/mine.py:f", tmp_path)() == 5
    assert program.find(f"{tmp_path}/email/mine.py:f", Path("elsewhere"))() == 5
    for text, words in [
        ("progs_a", r"allowed: FILE\.py:function or pkg\.mod:function"),
        ("progs_a:", r"allowed: FILE\.py:function or pkg\.mod:function"),
        ("progs_a:make_stop", r"did you mean make_step\?"),
        ("progs_a:VALUE", "is an int; allowed: a function"),
        ("progs_none:f", "there is no module 'progs_none'"),
        ("folder/progs_a:f", r"a path without \.py; allowed: folder/progs_a\.py:f"),
        ("folder/progs_none.py:f", r"there is no file .*folder/progs_none\.py"),
        ("email.message_of_mine:f", "there is no module 'email.message_of_mine' in .*[^.]$"),
        ("email.mine:f", r"an installed package has the name 'email'; allowed: email/mine\.py"),
    ]:
        with pytest.raises(ConfigError, match=words):
            program.find(text, tmp_path)
    with pytest.raises(PlanError, match="needs 'nowhere_to_be_found'"):
        program.find("progs_b:f", tmp_path)
    with pytest.raises(PlanError, match=r"progs_c\.py:2: importing progs_c raised ValueError: no"):
        program.find("progs_c:f", tmp_path)


SCRIPT = """
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset, default_collate

def collate(rows):
    return dict(zip("xy", default_collate(rows)))

device = "cuda" if torch.cuda.is_available() else "cpu"
net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
net = torch.compile(net.to(device))
data = DataLoader(TensorDataset(torch.randn(256, 64), torch.randn(256, 1)), 32, True, None, None,
                  2, collate, True)
optimizer = torch.optim.AdamW(net.parameters(), lr=float(sys.argv[1]))
for epoch in range(100):
    for batch in data:
        x, y = batch["x"], batch["y"]
        loss = ((net(x.to(device)) - y.to(device)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss.item() > 1e9 or loss > 1e9:
            raise SystemExit("diverged")
        print(f"{loss.item():.3f}")
"""


def test_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    recording = script.trace(path, ["0.001"])
    assert recording.steps == 3
    assert any("made up" in remark for remark in recording.remarks)
    step = _step(recording)
    products = [name for name in step.op_names if name in ("aten::addmm", "aten::mm")]
    assert len(products) == 5  # 2 forward; 2 of weights and 1 of activations backward
    weights = (64 * 256 + 256 + 256 + 1) * 4
    held = sum(int(b) for b, t in zip(step.bytes, step.tags, strict=True) if t == "param")
    assert weights <= held < weights + 4 * 256
    assert "0.000" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("steps", "recorded", "products", "remarks"),
    [("01", 3, 4, 1), ("010", 3, 2, 2), ("0", 2, 2, 2)],
)
def test_a_script_of_several_optimizers(
    steps: str, recorded: int, products: int, remarks: int, tmp_path: Path
) -> None:
    """A step is one of all of them, or if they do not take turns, of any."""
    path = tmp_path / "gan.py"
    path.write_text(
        "import sys, torch\n"
        "nets = [torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)]\n"
        "optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]\n"
        "for _ in range(int(sys.argv[2])):\n"
        "    for which in map(int, sys.argv[1]):\n"
        "        nets[which](torch.randn(8, 64)).sum().backward()\n"
        "        optimizers[which].step()\n"
        "        optimizers[which].zero_grad()\n"
    )
    recording = script.trace(path, [steps, "3"])
    assert recording.steps == recorded
    found = [name for name in _step(recording).op_names if name in ("aten::addmm", "aten::mm")]
    assert len(found) == products  # of a net forward, and of its weights backward
    assert len(recording.remarks) == remarks


def test_sparse_gradients_are_planned() -> None:
    def make() -> Any:
        net = nn.Sequential(nn.EmbeddingBag(64, 32, sparse=True), nn.Linear(32, 1))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        return net, optimizer, torch.zeros(8, 4, dtype=torch.long), lambda m, x: m(x).sum()

    assert "aten::addmm" in _step(program.trace(make)).op_names


def test_products_of_experts_are_counted() -> None:
    rows, matrices = torch.zeros(96, 32), torch.zeros(4, 32, 16)
    ends = torch.tensor([24, 48, 72, 96], dtype=torch.int32)
    turned = (torch.zeros(4, 16, 32), torch.zeros(32, 96), ends)  # by columns
    out = torch.zeros(96, 16)
    args = (rows, matrices, ends)
    assert flops.flops_of(torch.ops.aten._grouped_mm.default, args, {}, out) == 2 * 96 * 32 * 16
    found = flops.flops_of(torch.ops.aten._grouped_mm.default, turned, {}, torch.zeros(16, 96))
    assert found == 2 * 96 * 32 * 16
    assert core.family_of("aten::_grouped_mm") == "linear"


LOOP = """
import numpy
import sys
import torch
from torch.utils.data import DataLoader, Dataset, random_split

class Digits(Dataset):
    def __init__(self):
        self.images, self.targets = torch.randn(512, 64), torch.arange(512) % 10

    def __len__(self):
        return 512

    def __getitem__(self, index):
        return self.images[index], int(self.targets[index])

def main(rank, path):
    net = torch.nn.Linear(64, 10)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    train, _ = random_split(Digits(), [256, 256])
    losses = []
    for x, y in DataLoader(train, 32, num_workers=2, timeout=60):
        loss = torch.nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        print(f"rank {rank}: {loss:.4f}, mean {numpy.mean(losses):.4f}")
        torch.save(net.state_dict(), path)

if __name__ == "__main__":
    torch.multiprocessing.spawn(main, (sys.argv[1],), nprocs=torch.cuda.device_count())
"""


def test_a_script_may_print_save_and_spawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It prints zeros, saves nothing, and is the only process."""
    best = tmp_path / "best.pt"
    best.write_bytes(b"of another day")
    (tmp_path / "train.py").write_text(LOOP)
    recording = script.trace(tmp_path / "train.py", [str(best)])
    assert recording.steps == 3
    assert best.read_bytes() == b"of another day"
    assert any("torch.save wrote nothing" in remark for remark in recording.remarks)
    assert "rank 0: 0.0000, mean 0.0000\n" in capsys.readouterr().out


def test_a_step_that_formats_a_number_reads_data() -> None:
    def make() -> Any:
        x = torch.ones(4)
        return lambda: f"{x} {x.sum():.3f}"

    with pytest.raises(PlanError, match=r"format needs the data|format\(\)"):
        program.trace(make)


def test_a_script_that_exits_says_how(tmp_path: Path) -> None:
    path = tmp_path / "exits.py"
    path.write_text("import sys\nsys.exit('no data in /data')\n")
    with pytest.raises(PlanError, match="exited with 'no data in /data' after 0 steps"):
        script.trace(path, [])
    path.write_text("import torch\ntorch.multiprocessing.spawn(print, nprocs=4)\n")
    with pytest.raises(PlanError, match="spawns 4 processes"):
        script.trace(path, [])


def _flops(make: Callable[[], Any]) -> float:
    return sum(cost.flops for _, cost in program.trace(make).last_step())


def test_groups_of_a_convolution_divide_both_passes() -> None:
    def net(groups: int) -> Callable[[], Any]:
        def make() -> Any:
            layer = nn.Conv2d(64, 64, 3, padding=1, groups=groups)
            x = torch.randn(2, 64, 16, 16, requires_grad=True)
            return layer, lambda: layer(x).sum().backward()

        return make

    forward = 2 * (2 * 16 * 16) * 64 * 64 * 9
    assert _flops(net(1)) == 3 * forward
    assert _flops(net(64)) == 3 * forward / 64


def test_inference_mode_has_the_operators_of_no_grad() -> None:
    def net(mode: Callable[[], Any]) -> Callable[[], Any]:
        def make() -> Any:
            layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 14 * 14, 64))
            x, q = torch.randn(2, 3, 16, 16), torch.randn(2, 4, 8, 16)

            def step() -> None:
                with mode():
                    layers(x)
                    nn.functional.scaled_dot_product_attention(q, q, q)

            return layers, step

        return make

    names = [_step(program.trace(net(m))).op_names for m in (torch.no_grad, torch.inference_mode)]
    assert names[0] == names[1]
    assert _flops(net(torch.no_grad)) == _flops(net(torch.inference_mode)) > 5e5


def test_a_bag_reads_its_rows_only() -> None:
    def make() -> Any:
        bag, rows = nn.EmbeddingBag(100_000, 64, mode="sum"), torch.zeros(32, 4, dtype=torch.long)
        return bag, lambda: bag(rows)

    (moved,) = (c.bytes for op, c in program.trace(make).last_step() if "bag" in op.name)
    rows, out = 32 * 4 * 64 * 4, 32 * 64 * 4
    assert rows + out < moved < 2 * rows


@pytest.mark.parametrize("kernel", ["EFFICIENT_ATTENTION", "CUDNN_ATTENTION"])
def test_attention_by_a_kernel_of_gpus_writes_no_scores(kernel: str) -> None:
    def make() -> Any:
        layer, q = nn.Linear(64, 64), torch.randn(2, 4, 128, 64)

        def step() -> None:
            with sdpa_kernel(getattr(SDPBackend, kernel)):
                at = layer(q)
                nn.functional.scaled_dot_product_attention(at, at, at).sum().backward()

        return layer, step

    before = torch.backends.cuda.flash_sdp_enabled()
    scores = 2 * 4 * 128 * 128 * 4
    assert scores not in _step(program.trace(make)).bytes
    assert torch.backends.cuda.flash_sdp_enabled() == before


def test_a_trained_bias_of_attention_has_its_gradient() -> None:
    shape, scores = (1, 4, 128, 128), 3 * 4 * 128 * 128 * 4

    def make() -> Any:
        net = nn.Linear(16, 16)
        net.bias_of_scores = nn.Parameter(torch.zeros(shape))
        q = torch.randn(3, 4, 128, 16)

        def step() -> None:
            at = net(q)
            mask = net.bias_of_scores.expand(3, -1, -1, -1)
            nn.functional.scaled_dot_product_attention(at, at, at, mask).sum().backward()
            assert net.bias_of_scores.grad is not None
            net.zero_grad()

        return net, step

    step = _step(program.trace(make))
    assert sum(int(size) == scores for size in step.bytes) == 1  # of the scores, for a moment


@pytest.mark.parametrize("new", [False, True])
def test_the_programs_precision_of_products_counts(
    new: bool,
) -> None:
    """torch's older queries raise after the newer settings."""
    tensors = [torch.zeros(2, 2)]

    def found() -> list[str]:
        return [flops.precision_of(family, tensors) for family in ("linear", "conv", "norm")]

    assert found() == ["fp32", "tf32", "fp32"]
    try:
        if new:
            torch.backends.cuda.matmul.fp32_precision = "tf32"
            torch.backends.cudnn.conv.fp32_precision = "ieee"
        else:
            torch.set_float32_matmul_precision("high")
            torch.backends.cudnn.allow_tf32 = False
        assert found() == ["tf32", "fp32", "fp32"]
    finally:
        if new:
            torch.backends.cuda.matmul.fp32_precision = "none"
            torch.backends.cudnn.conv.fp32_precision = "tf32"
        else:
            torch.set_float32_matmul_precision("highest")
            torch.backends.cudnn.allow_tf32 = True
    assert found() == ["fp32", "tf32", "fp32"]


def test_a_script_with_data_parallel_has_one_gpu(tmp_path: Path) -> None:
    peaks = []
    for net in ("nn.DataParallel(net).cuda()", "net.cuda()"):
        path = tmp_path / "train.py"
        path.write_text(
            "import torch\nfrom torch import nn\nnet = nn.Linear(256, 256)\n"
            f"net = {net}\noptimizer = torch.optim.SGD(net.parameters())\n"
            "x = torch.ones(64, 256, device='cuda')\nfor _ in range(5):\n"
            "    optimizer.zero_grad()\n    net(x).sum().backward()\n    optimizer.step()\n"
        )
        recording = script.trace(path, [])
        peaks.append(_step(recording).peak_bytes)
    assert peaks[0] == peaks[1] > 0


def test_what_a_script_imports_is_replaced_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for transformers; FlexAttention's backward pass is refused on a CPU."""
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text("")
    (tmp_path / "transformers" / "masking_utils.py").write_text(
        "def find_packed_sequence_indices(ids):\n    return ids[:, None] != ids[None]\n"
    )
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(
        "import torch\nfrom torch import nn\n"
        "from torch.nn.attention.flex_attention import flex_attention\n"
        "from transformers import masking_utils\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.qkv = nn.Linear(64, 192)\n"
        "    def forward(self, x):\n"
        "        assert masking_utils.find_packed_sequence_indices(x) is None\n"
        "        return torch.compile(flex_attention)(*self.qkv(x).chunk(3, -1))\n"
        "net = Net().cuda()\noptimizer = torch.optim.SGD(net.parameters())\n"
        "x = torch.ones(2, 4, 256, 64, device='cuda')\n"
        "for _ in range(5):\n"
        "    optimizer.zero_grad()\n    net(x).sum().backward()\n    optimizer.step()\n"
    )
    try:
        assert script.trace(path, []).steps > 1
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
            del sys.modules[name]


def test_a_script_that_ends_early(tmp_path: Path) -> None:
    path = tmp_path / "short.py"
    path.write_text("import torch\ntorch.zeros(3)\n")
    with pytest.raises(PlanError, match="ended after 0 steps"):
        script.trace(path, [])
    path.write_text("import torch\n\n1 / 0\n")
    with pytest.raises(PlanError, match=rf"{path}:3: the script raised ZeroDivisionError"):
        script.trace(path, [])
    with pytest.raises(ConfigError, match="there is no script"):
        script.trace(tmp_path / "absent.py", [])


class Buffered(nn.Module):
    """A layer with a buffer, and one that is not there."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.register_buffer("scale", torch.ones(64))
        self.register_buffer("absent", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x) * self.scale
        return out


def _buffered() -> Any:
    net = Buffered().double()
    assert net.scale.dtype == net.layer.weight.dtype == torch.float64
    assert net.absent is None
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    batch = torch.randn(16, 64, dtype=torch.float64)
    return net, optimizer, batch, lambda model, x: model(x).sum()


def test_buffers_change_with_their_module() -> None:
    step = _step(program.trace(_buffered))
    assert "aten::mul" in step.op_names
    sizes = Counter(int(size) for size in step.bytes)
    assert sizes[64 * 8] >= 2  # the buffer and the bias


def test_a_program_can_be_simulated_without_its_trace_in_a_file() -> None:
    found = recorded_step(_buffered, "a100-pcie4")
    assert found.op_names == _step(program.trace(_buffered)).op_names
    assert found.compute_us > 0
    result = umem.simulate(_buffered, "lru", budget="100%")
    assert result.stall_us == 0


@pytest.mark.parametrize("known", [True, False])
def test_a_simulation_leaves_a_living_model_alone(known: bool) -> None:
    net, x = nn.Linear(8, 8), torch.ones(4, 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        net(x).sum().backward()
        optimizer.step()

    made = (net, optimizer, x, lambda model, batch: model(batch).sum()) if known else step
    with pytest.raises(PlanError, match="make the model and the optimizer inside of the function"):
        umem.simulate(lambda: made, budget="100%")
    assert optimizer.state == {}
    assert net.weight.grad is None
    assert not net.weight._post_accumulate_grad_hooks


def test_a_simulation_may_use_what_exists_and_does_not_change() -> None:
    teacher, mask = nn.Linear(8, 8).requires_grad_(False), torch.ones(8)

    def make() -> Any:
        net = nn.Linear(8, 8)
        net.register_buffer("mask", mask)

        def loss(model: Any, batch: Any) -> Any:
            return ((model(batch) - teacher(batch)) * model.mask).sum()

        return net, torch.optim.SGD(net.parameters(), lr=0.1), torch.ones(4, 8), loss

    assert umem.simulate(make, budget="100%").stall_us == 0


def test_a_program_may_import_late_and_change_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "late_width.py").write_text("WIDTH = 64\n")
    (tmp_path / "late.py").write_text(
        "import sys, torch\n"
        "folder = sys.path.pop(0)\n"
        "def make():\n"
        "    sys.path.insert(0, folder)\n"
        "    from late_width import WIDTH\n"
        "    net = torch.nn.Linear(WIDTH, WIDTH)\n"
        "    return net, lambda: net(torch.ones(8, WIDTH)).sum().backward()\n"
    )
    before = sys.path[:]
    assert cli.main(["plan", "late.py:make", "--policy", "lru", "--budget", "100%"]) == 0
    assert sys.path == before


def _nested(path: Path, *inner: str) -> Recording:
    """A program with an optimizer whose step has these lines, and then its own update."""
    path.write_text(
        "import torch\n"
        "net = torch.nn.Linear(8, 8)\n"
        "inner = torch.optim.SGD([net.bias], lr=0.1)\n"
        "def fail():\n"
        "    raise ValueError\n"
        "class Outer(torch.optim.SGD):\n"
        "    def step(self, closure=None):\n"
        + "".join(f"        {line}\n" for line in inner)
        + "        super().step(closure)\n"
        "outer = Outer([net.weight], lr=0.1)\n"
        "for _ in range(5):\n"
        "    net(torch.randn(4, 8)).sum().backward()\n"
        "    outer.step()\n"
    )
    return script.trace(path, [])


def test_an_optimizer_within_another_ends_no_step(tmp_path: Path) -> None:
    recording = _nested(tmp_path / "nested.py", "inner.step()")
    assert recording.steps == 3
    assert len(_named(recording, "addmm")) == 1  # in the last of them
    assert len(_named(recording, "add_")) == 2  # the updates of both


def test_a_step_that_raised_inside_of_another_is_over(tmp_path: Path) -> None:
    lines = ("try:", "    inner.step(fail)", "except ValueError:", "    pass")
    recording = _nested(tmp_path / "raising.py", *lines)
    assert recording.steps == 2  # the first has two of outer: inner might have stepped
    ((_, cost),) = _named(recording, "addmm")
    assert cost.phase == "forward"


def test_a_tensor_that_grows_is_another_block() -> None:
    def make() -> Any:
        def step() -> None:
            grown = torch.ones(1024)
            grown.resize_(4096).zero_()

        return step

    step = _step(program.trace(make))
    assert sorted(step.bytes.tolist()) == [4 * 1024, 4 * 4096]
    assert step.peak_bytes < 4 * (1024 + 4096)


def test_a_program_without_a_file_that_it_reads_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "progs_f.py").write_text("DATA = open('/nowhere/data.txt').read()\n")
    for name in ("progs_f:f", "progs_f.py:f"):
        with pytest.raises(PlanError, match=r"needs a file: .*/nowhere/data\.txt"):
            program.find(name, tmp_path)


def test_copies_of_layers_warn_of_nothing() -> None:
    """torch's deepcopy asks a tensor for its address, which a fake one warns about."""

    def encoder() -> nn.Module:
        layer = nn.TransformerEncoderLayer(64, 4, batch_first=True)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert program.trace(_of(encoder, (4, 16, 64))).steps == program.STEPS
