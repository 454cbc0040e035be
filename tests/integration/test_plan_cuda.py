"""Programs for a GPU, planned without one: their autocast, their moves and their calls."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812
from torch.testing._internal.two_tensor import TwoTensor  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from umem import cli  # noqa: E402
from umem.base import device_profiles, nodes  # noqa: E402
from umem.capture import autocast, cuda_calls, program, roofline, script  # noqa: E402
from umem.capture.gpu import Gpu, gpu_of  # noqa: E402
from umem.capture.tracer import Tracer  # noqa: E402
from umem.errors import PlanError  # noqa: E402
from umem.trace.step_builder import last_step  # noqa: E402

HALF = torch.bfloat16
INDEX = torch.long
Call = Callable[..., Any]

# Functions, and the types of their tensors of 4 x 4.
CALLS: dict[str, tuple[Call, tuple[Any, ...]]] = {
    "softmax": (lambda x: torch.softmax(x, -1), (HALF,)),
    "softmax of a type": (lambda x: torch.softmax(x, -1, dtype=HALF), (HALF,)),
    "functional.softmax": (lambda x: F.softmax(x, -1), (HALF,)),
    "log_softmax": (lambda x: F.log_softmax(x, -1), (HALF,)),
    "layer_norm": (lambda x, w: F.layer_norm(x, (4, 4), w, w), (HALF, torch.float32)),
    "group_norm": (lambda x: F.group_norm(x, 2), (HALF,)),
    "sum": (lambda x: x.sum(), (HALF,)),
    "sum of rows": (lambda x: x.sum(1), (HALF,)),
    "mean": (lambda x: x.mean(), (HALF,)),
    "cumsum": (lambda x: x.cumsum(0), (HALF,)),
    "norm": (lambda x: torch.linalg.vector_norm(x), (HALF,)),
    "power": (lambda x: x**2, (HALF,)),
    "exp": (lambda x: x.exp(), (HALF,)),
    "rsqrt": (lambda x: x.rsqrt(), (HALF,)),
    "softplus": (lambda x: F.softplus(x), (HALF,)),
    "logsumexp": (lambda x: x.logsumexp(0), (HALF,)),
    "cross_entropy": (lambda x: F.cross_entropy(x, x), (HALF,)),
    "nearest": (lambda x: F.interpolate(x.unsqueeze(0), scale_factor=2), (HALF,)),
    "gelu": (lambda x: F.gelu(x), (HALF,)),
    "linear": (lambda x, w: F.linear(x, w), (torch.float32, torch.float32)),
    "matmul": (lambda x, w: x @ w, (HALF, torch.float32)),
    "add": (lambda x, w: x + w, (HALF, torch.float32)),
    "dot": (lambda x, w: torch.dot(x.view(16), w.view(16)), (HALF, torch.float32)),
    "index_put": (
        lambda x, w, i: torch.index_put(x, (i.sum(0),), w), (HALF, torch.float32, INDEX),
    ),
    "scatter_add": (
        lambda x, w, i: torch.scatter_add(x, 0, i, w), (HALF, torch.float32, INDEX),
    ),
    "mv": (lambda x, w: torch.mv(x, w.sum(0)), (torch.float32, torch.float32)),
    "avg_pool3d": (lambda x: F.avg_pool3d(x.view(1, 2, 2, 2, 2), 2), (HALF,)),
    "padding": (lambda x: F.pad(x.unsqueeze(0), (1, 1), mode="reflect"), (HALF,)),
    "in double precision": (lambda x: torch.softmax(x, -1), (torch.float64,)),
}  # fmt: skip


def on_a_gpu(call: Call, types: tuple[Any, ...]) -> Any:
    """The type of a result on CUDA tensors, which exist only as fake ones here."""
    made = [torch.empty(4, 4, dtype=dtype, device="meta") for dtype in types]
    before = torch.get_autocast_dtype("cuda")
    # The context would turn itself off, because there is no GPU.
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", HALF)
    try:
        with FakeTensorMode() as mode:
            tensors = [FakeTensor(mode, it, torch.device("cuda:0")) for it in made]
            return call(*tensors).dtype
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)


def planned(call: Call, types: tuple[Any, ...], device: str = "cuda") -> Any:
    """The type of the same result in a planned program."""
    found = []

    def make() -> Callable[[], None]:
        tensors = [torch.empty(4, 4, dtype=dtype) for dtype in types]

        def step() -> None:
            with torch.autocast(device, dtype=HALF):
                found.append(call(*tensors).dtype)

        return step

    program.trace(make)
    return found[-1]


@pytest.mark.parametrize("name", CALLS)
def test_autocast_gives_the_types_of_a_gpu(name: str) -> None:
    assert planned(*CALLS[name]) == on_a_gpu(*CALLS[name])


def test_autocast_of_the_cpu_stays_its_own() -> None:
    call, types = CALLS["softmax"]
    assert planned(call, types, "cpu") == HALF
    assert planned(call, types) == torch.float32
    with torch.autocast("cpu", dtype=HALF):  # and outside of plans
        assert torch.ones(4, dtype=HALF).softmax(0).dtype == HALF
        assert F.avg_pool3d(torch.ones(1, 1, 2, 2, 2, dtype=HALF), 2).dtype == torch.float32
    assert planned(call, types, "cpu") == HALF


@pytest.mark.parametrize(("on_cuda", "expected"), [(True, torch.float32), (False, HALF)])
def test_the_type_of_a_tensors_device_names_the_gpu(on_cuda: bool, expected: Any) -> None:
    found = []

    def make() -> Callable[[], None]:
        x = torch.ones(4, 4, dtype=HALF, device="cuda" if on_cuda else None)

        def step() -> None:
            with torch.autocast("cuda", enabled=False):
                x.softmax(0)
            with torch.autocast(x.device.type, dtype=HALF):
                found.append(x.softmax(0).dtype)

        return step

    program.trace(make)
    assert set(found) == {expected}


# Operators that only one device casts, and whose casts plans leave as on the CPU: they are made of
# others or kernels of a GPU's library, promote without help, or have no half precision on a GPU.
LEFT = re.compile(
    r"_?convolution(\.deprecated)?|_?cudnn_\w+|.*\.dim(name|_DimnameList)|.*\.Dimname|"
    r"_scaled_dot_product_\w+|_thnn_fused_\w+|addcdiv|addcmul|"
    r"atan2|einsum|(frobenius_|nuclear_)?norm(\.\w+)?|.*(fft|linalg|cholesky|lu_|quantile|svd|qr).*|"
    r"_addmm_activation|_grid_sampler\w+|_lu_\w+|_native_multi_head_attention|cat|stack|"
    r"conv\dd\.padding|cross_entropy_loss|ctc_loss\.\w+|fake_quantize\w+|geqrf|grid_sampler_\dd|"
    r"index_copy|inverse|mkldnn_rnn_layer|multilabel_margin_loss_forward|or[gm]qr|pinverse|polar|"
    r"i?stft(\.\w+)?|triangular_solve|view_as_complex"
)


def test_operators_that_one_device_casts_are_listed() -> None:
    """A new version of torch may cast others."""
    cast = {device: operators_cast(f"Autocast{device}") for device in ("CPU", "CUDA")}
    listed = {
        "CUDA": {*autocast.FLOAT32, *autocast.RESULT_FLOAT32, *autocast.WIDEST, *autocast.HALF},
        "CPU": {*autocast.AS_GIVEN},
    }
    assert listed["CUDA"] - {"rms_norm"} <= cast["CUDA"] - cast["CPU"]  # not in torch 2.11
    assert listed["CPU"] <= cast["CPU"] - cast["CUDA"]
    for one in (cast["CUDA"] - cast["CPU"], cast["CPU"] - cast["CUDA"]):
        others = one - listed["CUDA"] - listed["CPU"]
        assert {name for name in others if not LEFT.fullmatch(name)} == set()


def operators_cast(key: str) -> set[str]:
    """Names of ATen's operators that have a kernel for a dispatch key."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    found = set()
    for schema in torch._C._jit_get_all_schemas():
        name = f"{schema.name}.{schema.overload_name}".removesuffix(".")
        with contextlib.suppress(RuntimeError):  # one of TorchScript only
            if name.startswith("aten::") and has(name, key):
                found.add(name.removeprefix("aten::"))
    return found


@pytest.mark.parametrize("device", ["cuda", None])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_recompute_in_the_same_types(reentrant: bool, device: str | None) -> None:
    found = []

    def block(x: Any) -> Any:
        y = (x @ x).softmax(-1)
        found.append(y.dtype)
        return y * y

    def make() -> Callable[[], None]:
        x = torch.ones(8, 8, requires_grad=True, device=device)

        def step() -> None:
            with torch.autocast("cuda", dtype=HALF):
                y = checkpoint(block, x, use_reentrant=reentrant)
            y.sum().backward()

        return step

    program.trace(make)
    assert len(found) == 2 * program.STEPS
    assert set(found) == {torch.float32}


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Any) -> Any:
        return x * 2

    @staticmethod
    def backward(_ctx: Any, *slopes: Any) -> Any:
        return slopes[0] * 2 + torch.zeros(64, device="cuda") + torch.ones(64).cuda()


CALLED_BACK: dict[str, Callable[[Any], Any]] = {
    "reentrant": lambda x: checkpoint(in_a_checkpoint, x, use_reentrant=True),
    "checkpoint": lambda x: checkpoint(in_a_checkpoint, x, use_reentrant=False),
    "function": Doubled.apply,
}


def in_a_checkpoint(x: Any) -> Any:
    return (x + torch.arange(64, device="cuda")).sigmoid()


@pytest.mark.parametrize("way", CALLED_BACK)
def test_what_torch_calls_back_makes_is_on_the_device(way: str) -> None:
    def make() -> Any:
        net = nn.Linear(64, 64).cuda()
        x = torch.ones(8, 64, device="cuda")
        return net, lambda: CALLED_BACK[way](net(x)).sum().backward()

    recording = program.trace(make)
    names = [op.name for op, _ in recording.last_step()]
    assert names.count("aten::arange") == (0 if way == "function" else 2)
    adds = [op for op, _ in recording.last_step() if op.name == "aten::add"]
    assert len(adds) == 2
    assert not any(recording.blocks[block].on_host for op in adds for block in op.reads)


def peak_bytes(make: Callable[[], Any]) -> int:
    events = program.trace(make).device_events(roofline.clock(nodes.find_device("a100-pcie4")))
    return last_step(events).peak_bytes


def test_what_is_saved_on_the_host_is_not_on_the_device() -> None:
    def make(keep: Callable[[], Any]) -> Any:
        net = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(6))).cuda()
        x = torch.ones(512, 512, device="cuda")

        def step() -> None:
            with keep():
                y = net(x)
            y.sum().backward()

        return net, step

    plain, saved = (
        peak_bytes(partial(make, keep))
        for keep in (contextlib.nullcontext, torch.autograd.graph.save_on_cpu)
    )
    assert saved < plain


@pytest.mark.parametrize("move", [lambda t, y: t.to(y), lambda t, y: t.type_as(y)])
def test_a_move_to_the_place_of_another_tensor(move: Callable[[Any, Any], Any]) -> None:
    def make(move: Callable[[Any, Any], Any]) -> Any:
        net = nn.Linear(512, 512).cuda()
        x = torch.ones(2048, 512, device="cuda")
        target = torch.ones(2048, 512, dtype=torch.float64)

        def step() -> None:
            y = net(x)
            (y * move(target, y)).square().sum().backward()

        return net, step

    by_name = peak_bytes(partial(make, lambda t, _: t.float().cuda()))
    assert peak_bytes(partial(make, move)) == by_name
    assert peak_bytes(partial(make, lambda t, _: t.float())) < by_name


def test_loaded_states_of_an_optimizer_are_on_the_device() -> None:
    def make() -> Any:
        nets = [nn.Linear(256, 256, bias=False) for _ in range(2)]
        first, other = (torch.optim.Adam(net.parameters()) for net in nets)
        nets[0](torch.ones(4, 256)).sum().backward()
        first.step()
        nets[1].cuda()
        other.load_state_dict(first.state_dict())
        x = torch.ones(4, 256, device="cuda")
        return nets[1], other, x, lambda model, batch: model(batch).sum()

    blocks = program.trace(make).blocks.values()
    states = [b.on_host for b in blocks if b.tag == "optimizer" and b.bytes == 256 * 256 * 4]
    assert states == [False, False]


def test_loaded_states_of_parameters_on_the_host_stay_there() -> None:
    def make() -> Any:
        net, x = nn.Linear(256, 256, bias=False), torch.ones(4, 256)
        first, other = (torch.optim.Adam(net.parameters()) for _ in range(2))
        net(x).sum().backward()
        first.step()
        other.load_state_dict(first.state_dict())
        other_place = torch.ones(8, device="cuda")
        return net, lambda: (net(x).sum().backward(), other.step(), other_place)

    blocks = program.trace(make).blocks.values()
    assert all(block.on_host for block in blocks if block.bytes == 256 * 256 * 4)


def test_the_device_of_a_tensor_that_vmap_or_grad_wraps() -> None:
    def make() -> Any:
        net = nn.Linear(16, 16).cuda()
        x = torch.ones(8, 16, device="cuda")

        def loss(row: Any) -> Any:
            return (row * 2).to(x.device).sum()

        def step() -> None:
            (torch.vmap(loss)(net(x)) + torch.func.grad(loss)(x)[:, 0]).sum().backward()

        return net, step

    assert program.trace(make).steps == program.STEPS


def test_hooks_of_saved_tensors_have_names() -> None:
    packed = []

    def pack(x: Any) -> Any:
        packed.append(x.cpu())
        return packed[-1]

    def make() -> Any:
        net, x = nn.Linear(16, 16).cuda(), torch.ones(8, 16, device="cuda")

        def step() -> None:
            names = torch.autograd.graph.saved_tensors_hooks
            with names(pack_hook=pack, unpack_hook=lambda x: x.cuda()):
                y = net(x).sigmoid()
            y.sum().backward()

        return net, step

    program.trace(make)
    assert packed


def test_a_sparse_matrix_may_be_moved() -> None:
    def make() -> Any:
        net = nn.Linear(16, 16).cuda()
        places, values = torch.tensor([[0, 1], [1, 0]]), torch.ones(2)
        edges = torch.sparse_coo_tensor(places, values, (64, 64), check_invariants=False).cuda()
        x = torch.ones(64, 16, device="cuda")
        return net, lambda: torch.sparse.mm(edges, net(x)).sum().backward()

    recording = program.trace(make)
    of_step = {block for op, _ in recording.last_step() for block in (*op.reads, *op.writes)}
    assert not any(recording.blocks[block].on_host for block in of_step)


def attention(explicit: bool) -> Callable[[], Any]:
    def make() -> Any:
        net = nn.Linear(64, 192, bias=False).cuda()
        x = torch.randn(2, 128, 64, device="cuda")

        def step() -> None:
            with torch.autocast("cuda", dtype=HALF):
                q, k, v = net(x).chunk(3, -1)
                scores = q @ k.transpose(-1, -2)
                weights = (scores.float() if explicit else scores).softmax(-1)
                loss = (weights @ v).float().mean()
            loss.backward()
            net.weight.grad = None

        return net, step

    return make


def bytes_of_results(make: Callable[[], Any]) -> list[int]:
    recording = program.trace(make)
    written = (op.writes for op, _ in recording.last_step())
    return [recording.blocks[block].bytes for blocks in written for block in blocks]


def test_a_cast_by_autocast_takes_as_much_as_one_of_the_program() -> None:
    implicit, explicit = (bytes_of_results(attention(it)) for it in (False, True))
    assert sum(implicit) == sum(explicit)
    assert max(implicit) == 2 * 128 * 128 * 4  # the scores, in float32


MOVES: dict[str, Callable[[nn.Module], object]] = {
    "cuda": lambda net: net.cuda(),
    "cuda of a device": lambda net: net.cuda(device=0),
    "to": lambda net: net.to("cuda"),
    "bfloat16": lambda net: net.bfloat16(),
    "both": lambda net: net.to("cuda", torch.half),
    "number": lambda net: net.to(0),
    "current": lambda net: net.to(torch.cuda.current_device()),
}


@pytest.mark.parametrize("move", MOVES)
def test_an_optimizer_made_before_a_move_updates_the_moved_parameters(move: str) -> None:
    held = []

    def make(first: bool) -> Any:
        net = nn.Linear(128, 64, bias=False)
        weight = net.weight
        if first:
            optimizer = torch.optim.Adam(net.parameters())
        MOVES[move](net)
        if not first:
            optimizer = torch.optim.Adam(net.parameters())
        held.append(net.weight is weight)
        x = torch.randn(16, 128, dtype=weight.dtype, device="cuda")
        return net, optimizer, x, lambda model, batch: model(batch).sum()

    before, after = (bytes_of_results(partial(make, first)) for first in (True, False))
    assert before == after
    assert all(held)  # whoever has the parameter has the moved one


@pytest.mark.parametrize("fake", [True, False])
def test_a_parameter_of_parts_exists_where_they_do(fake: bool) -> None:
    def weight() -> Any:
        return nn.Parameter(TwoTensor(torch.ones(8, 8), torch.ones(8, 8)))

    outside = weight()

    def make() -> Any:
        net = nn.Linear(8, 8)
        net.weight = weight() if fake else outside
        return net, lambda: net(torch.ones(4, 8)).sum().backward()

    refused = pytest.raises(PlanError, match="exists already")
    with contextlib.nullcontext() if fake else refused:
        program.trace(make, apart=True)


def test_a_module_may_be_moved_to_meta() -> None:
    found = []

    def make() -> Any:
        net = nn.Linear(16, 16)
        other = nn.Linear(8, 8).to("meta")
        found.append(other.weight.device.type)
        return net, lambda: net(torch.ones(8, 16)).sum().backward()

    program.trace(make)
    assert found == ["meta"]


@pytest.mark.parametrize(
    "back",
    [lambda net: net.cpu(), lambda net: net.to("cpu"), lambda net: net.to("cpu", torch.float32)],
)
def test_a_module_that_moves_back_leaves_the_device(back: Callable[[nn.Module], object]) -> None:
    def make() -> Any:
        net = nn.Linear(256, 256, bias=False).cuda()
        back(net)
        x = torch.ones(8, 8, device="cuda")
        return net, lambda: (net, x * 2)

    (weight,) = (b for b in program.trace(make).blocks.values() if b.bytes == 256 * 256 * 4)
    assert weight.on_host


def test_deferred_weights_are_made_where_they_are_needed() -> None:
    def make() -> Any:
        with torch.device("meta"):
            net = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False))
        net[1].weight = net[0].weight
        net.to_empty(device="cuda")
        assert net[1].weight is net[0].weight
        x = torch.ones(8, 256, device="cuda")
        return net, lambda: net(x).sum().backward()

    weights = [b.bytes for b in program.trace(make).blocks.values() if b.tag == "param"]
    assert weights == [256 * 256 * 4]


def test_a_wrapper_of_tensors_is_cast_inside_too() -> None:
    found = []

    def make() -> Any:
        net: Any = nn.Linear(64, 64, bias=False)
        net.weight = nn.Parameter(TwoTensor(torch.ones(64, 64), torch.ones(64, 64)))
        net.half()
        found.append((net.weight.dtype, net.weight.a.dtype, net.weight.b.dtype))
        return net, lambda: net.weight * 1

    program.trace(make)
    assert found == [(torch.half,) * 3]


def test_a_module_may_move_in_its_own_way() -> None:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.ones(64, 64)

        def _apply(self, fn: Any, recurse: bool = True) -> Any:
            self.table = fn(self.table)
            return super()._apply(fn, recurse)

    found = []

    def make() -> Any:
        net = nn.Sequential(Cached()).half()
        found.append(net[0].table.dtype)
        return net, lambda: None

    program.trace(make)
    assert found == [torch.half]


def test_gradients_move_with_their_parameters() -> None:
    found = []

    def make() -> Any:
        net: Any = nn.Linear(8, 8)
        net(torch.ones(2, 8)).sum().backward()
        net.half()
        found.append(net.weight.grad.dtype)
        return net, lambda: net.weight.grad.zero_()

    program.trace(make)
    assert found == [torch.half]


# A script as people write them, which asks much of its device.
CALLING = """
import torch
cuda = torch.cuda
assert cuda.is_available()
cuda.set_device(cuda.current_device())
torch.set_default_device("cuda")
assert cuda.get_device_properties(0).total_memory > 0
print(cuda.get_device_name(0), cuda.get_device_capability(), cuda.is_bf16_supported())
torch.manual_seed(0)
cuda.manual_seed_all(0)
generators: "list[torch.Generator | None]" = [
    torch.Generator(*device) for device in (["cuda"], [cuda.current_device()], ["cpu"], [])
]
for generator in generators:
    assert isinstance(generator.manual_seed(0), torch.Generator)
    torch.rand(8, device="cuda" if generator is generators[0] else "cpu", generator=generator)
def seeded(generator: torch.Generator | None = None): pass
net = torch.nn.Linear(256, 256)
x = torch.randn(8, 256, device=0)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
for _ in range(3):
    begin.record()
    cuda.nvtx.range_push("step")
    with cuda.device(0), cuda.Stream(), cuda.stream(cuda.Stream()):
        assert cuda.current_stream() == cuda.default_stream()
        x.record_stream(cuda.current_stream())
        net(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    cuda.nvtx.range_pop()
    end.record()
    cuda.synchronize(device="cuda")
    print(begin.elapsed_time(end), cuda.max_memory_allocated(), cuda.mem_get_info())
    cuda.reset_peak_memory_stats()
"""


def test_calls_of_cuda_have_answers(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(CALLING)
    before = torch.set_default_device, torch.Generator
    recording = script.trace(path, [])
    assert recording.steps == 3
    assert (torch.set_default_device, torch.Generator) == before
    assert torch.zeros(1).device.type == "cpu"
    weights = [b.bytes for b in recording.blocks.values() if b.tag == "param" and not b.on_host]
    assert sorted(weights) == [256 * 4, 256 * 256 * 4]


def ends() -> object:
    raise SystemExit(0)


def ends_in_a_step() -> object:
    return ends


async def not_yet() -> None:
    pass


def gives_what_is_not_yet() -> object:
    return not_yet


def gives_a_generator() -> object:
    def step() -> Iterator[None]:
        yield

    return step


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (ends, "setting the program up raised SystemExit: 0"),
        (ends_in_a_step, "a step raised SystemExit: 0"),
        (not_yet, "the function returned a coroutine; allowed: a step"),
        (gives_what_is_not_yet, "the step returned a coroutine, which has not run"),
        (gives_a_generator, "the step returned a generator, which has not run"),
    ],
)
def test_a_program_that_ends_or_waits_is_an_error(make: Callable[[], object], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        program.trace(make)


def test_umems_arguments_are_not_the_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["umem", "plan", "parses.py:make"])
    path = tmp_path / "parses.py"
    parsed = "argparse.ArgumentParser().parse_args()"
    path.write_text(f"import argparse\n{parsed}\ndef make():\n    {parsed}\n    return print\n")
    assert program.trace(program.find("parses.py:make", tmp_path)).steps == program.STEPS
    (tmp_path / "ends.py").write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(PlanError, match=r"ends.py:2: importing ends.py raised SystemExit: 3"):
        program.find("ends.py:make", tmp_path)


ASKING = """
import torch
def make_step():
    print("told", torch.cuda.mem_get_info()[0] >> 30, "GiB")
    net = torch.nn.Linear(8, 8).cuda()
    return net, torch.optim.SGD(net.parameters()), torch.ones(1, 8), lambda net, x: net(x).sum()
if __name__ == "__main__":
    net, optimizer, x, loss = make_step()
    while True:
        loss(net, x).backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("device", "told"),
    [
        (None, ["CUDA", [8, 0], 80]),
        ("a100-pcie4", ["NVIDIA A100-PCIE-40GB", [8, 0], 40]),
        ("rtx4090-pcie4", ["NVIDIA GeForce RTX 4090", [8, 9], 24]),
        ("h200-pcie5", ["NVIDIA H200", [9, 0], 139]),
        ("gh200-c2c", ["NVIDIA GH200 480GB", [9, 0], 96]),
        ("cpu-disk", ["CUDA", [8, 0], 80]),
    ],
)
def test_a_program_is_told_about_the_device_that_is_planned(
    device: str | None, told: list[Any]
) -> None:
    found = []

    def make() -> Callable[[], object]:
        at: Any = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info()
        assert free == total == at.total_memory
        assert torch.cuda.get_device_name() == at.name
        assert torch.cuda.get_device_capability() == (at.major, at.minor)
        found.append([at.name, [at.major, at.minor], at.total_memory >> 30])
        return lambda: torch.ones(8, device="cuda")

    program.trace(make, device=None if device is None else device_profiles.find(device))
    assert found == [told]


@pytest.mark.parametrize("as_script", [False, True])
def test_the_device_of_the_command_is_told(
    as_script: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "asks.py"
    path.write_text(ASKING)
    words = ["--script", str(path)] if as_script else [f"{path}:make_step"]
    assert cli.main(["plan", "--policy", "lru", "--device", "rtx4090-pcie4", *words]) == 0
    assert "told 24 GiB" in capsys.readouterr().out


def test_an_own_profile_gives_its_name_and_memory() -> None:
    own = dataclasses.replace(
        device_profiles.find("a100-pcie4"), name="mine", memory_bytes=12 << 30
    )
    assert gpu_of(own)[::3] == ("mine", 12 << 30)


def test_another_link_and_a_node_have_the_same_gpu() -> None:
    for name in device_profiles.names():
        profile = device_profiles.find(name)
        assert gpu_of(device_profiles.with_link(profile, 12)) == gpu_of(profile)
    for name in nodes.NAMES:
        node = nodes.find(name)
        assert gpu_of(node.profile(node.devices)) == gpu_of(node.profile(1)) != Gpu()
        assert gpu_of(node.device).name.startswith("NVIDIA ")


def test_distributions_do_not_ask_for_values() -> None:
    distributions = torch.distributions
    validates = distributions.Distribution._validate_args

    def make() -> Any:
        net, x = nn.Linear(8, 8), torch.ones(4, 8)

        def step() -> None:
            out = net(x)
            chosen = distributions.Categorical(logits=out)
            gained = chosen.log_prob(chosen.sample())
            (gained + distributions.Normal(out, 1.0).log_prob(x).sum(1)).sum().backward()

        return net, step

    names = {op.name for op, _ in program.trace(make).last_step()}
    assert "aten::multinomial" in names  # of the sample
    assert distributions.Distribution._validate_args is validates


def test_flex_attention_is_one_kernel(recwarn: pytest.WarningsRecorder) -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")

    def make() -> Any:
        net = nn.Linear(64, 192).cuda()
        x = torch.randn(2, 4, 256, 64, device="cuda")
        compiled = torch.compile(flex.flex_attention)
        return net, lambda: compiled(*net(x).chunk(3, -1)).mean().backward()

    recording = program.trace(make)
    assert any("flex_attention_backward" in op.name for op, _ in recording.last_step())
    assert max(block.bytes for block in recording.blocks.values()) < 2 * 4 * 256 * 256 * 4
    assert [str(each.message) for each in recwarn if "flex" in str(each.message)] == []


def test_what_is_replaced_exists() -> None:
    for owner, name, _ in (*cuda_calls.replacements(Tracer().scope), *cuda_calls.present()):
        assert callable(inspect.getattr_static(owner, name)), name
