"""The op observers: their observations, harmlessness and use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")

import _core_testing  # noqa: E402
from support import recorded  # noqa: E402

import umem  # noqa: E402
from umem.base.native import core  # noqa: E402
from umem.integrations.torch import cpu  # noqa: E402

MIB = 1 << 20
BOTH = pytest.mark.parametrize("observer", ["native", "python"])


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    umem.disable()
    torch.set_num_threads(threads)


@pytest.fixture
def ext(one_thread: None) -> ModuleType:
    del one_thread
    umem.enable(budget="64MiB", device="soft", observer="native", policy="lru")
    return cpu.extension()


@pytest.mark.usefixtures("ext")
def test_counts_ops_with_inputs() -> None:
    a, b = torch.ones(4), torch.ones(4)
    (op,) = recorded.ops_of(lambda: a + b)
    assert (op.name, len(op.reads)) == ("aten::add", 2)


@pytest.mark.usefixtures("ext")
def test_views_are_not_told() -> None:
    a = torch.ones(4, 4)
    assert recorded.ops_of(lambda: a.t().t().view(16).reshape(2, 8)[0].detach().contiguous()) == []


@pytest.mark.usefixtures("ext")
def test_lists_of_tensors_are_walked() -> None:
    parts = [torch.ones(4) for _ in range(300)]
    (op,) = recorded.ops_of(lambda: torch.cat(parts))
    assert len(op.reads) == 300


@pytest.mark.usefixtures("ext")
def test_user_ranges_may_end_out_of_order() -> None:
    first, second = (torch.profiler.record_function(name) for name in ("first", "second"))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    a = torch.ones(4)
    assert len(recorded.ops_of(lambda: a + a)) == 1


def test_ranges_with_new_names_take_no_room_from_operators(ext: ModuleType, tmp_path: Path) -> None:
    """As those of a profiler, ProfilerStep#1 and so on."""
    del ext
    for i in range(9000):
        with torch.profiler.record_function(f"range {i}"):
            pass
    umem.disable()
    trace = tmp_path / "trace.jsonl"
    umem.enable(budget="64MiB", device="soft", trace=trace)
    torch.ones(4).erfinv()
    umem.disable()
    assert '"aten::erfinv"' in trace.read_text()


@BOTH
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "call",
    [
        torch.zeros_like, torch.ones_like, torch.rand_like, torch.randn_like,
        lambda x: torch.full_like(x, 2), lambda x: torch.randint_like(x, 4),
        lambda x: x.new_zeros(4), lambda x: x.new_ones(4), lambda x: x.new_full((4,), 2),
    ],
)  # fmt: skip
def test_an_op_that_reads_a_shape_fetches_nothing(
    call: Callable[[torch.Tensor], torch.Tensor], observer: str
) -> None:
    umem.enable(budget="64MiB", device="soft", observer=observer, policy="lru")
    x = torch.ones(1 << 22)
    umem.evict(x)
    assert call(x).numel() > 0
    assert umem.stats().bytes_in == 0


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.detach_(), lambda x: x.squeeze_(), lambda x: x.unsqueeze_(0),
        lambda x: x.t_(), lambda x: x.transpose_(0, 1), lambda x: x.swapaxes_(0, 1),
        lambda x: x.swapdims_(0, 1), lambda x: x.as_strided_((4,), (1,)),
        lambda x: torch.ones(1).type_as(x), lambda x: torch.result_type(x, x),
    ],
)  # fmt: skip
def test_an_op_on_shapes_fetches_nothing_and_changes_nothing(
    call: Callable[[torch.Tensor], object], ext: ModuleType
) -> None:
    del ext
    x = torch.ones(1, 1 << 22)
    umem.evict(x)
    umem.prefetch(x)
    came = umem.stats().bytes_in
    umem.evict(x)
    call(x)
    assert umem.stats().bytes_in == came == 16 * MIB
    assert float(x.sum()) == x.numel()


def test_after_removal_nothing_is_seen(ext: ModuleType) -> None:
    assert ext.observing()
    umem.disable()
    assert not ext.observing()
    umem.enable(budget="64MiB", device="soft", observer="off", policy="lru")
    a = torch.ones(4)
    assert recorded.ops_of(lambda: a + a) == []


@pytest.mark.usefixtures("ext")
def test_other_threads_are_seen() -> None:
    a = torch.ones(4)

    def work() -> None:
        thread = threading.Thread(target=lambda: [a + a for _ in range(10)])
        thread.start()
        thread.join()

    assert len(recorded.ops_of(work)) == 10


@BOTH
@pytest.mark.usefixtures("one_thread")
def test_tensors_without_memory_pass_through(observer: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    umem.enable(budget="64MiB", device="soft", observer=observer)
    meta = torch.ones(3, device="meta") * 2
    assert meta.is_meta
    sparse = torch.eye(3).to_sparse()
    assert torch.equal((sparse + sparse).to_dense(), 2 * torch.eye(3))
    with FakeTensorMode():
        assert (torch.ones(3) @ torch.ones(3)).shape == ()
    ones = torch.ones(1, 2, 3, 3)
    assert torch.nn.functional.conv2d(ones, torch.ones(1, 2, 1, 1), None).sum().item() == 18
    indexed = torch.arange(9).view(3, 3)[:, [0, 2]]  # an optional tensor list
    assert indexed.tolist() == [[0, 2], [3, 5], [6, 8]]


@pytest.mark.filterwarnings("ignore:Sparse")  # torch's, of invariants and of a beta
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("observer", ["native", "off"])
@pytest.mark.usefixtures("one_thread")
def test_the_parts_of_a_sparse_tensor_are_inputs(observer: str, layout: torch.layout) -> None:
    with umem.enable(budget="48MiB", device="soft", policy="lru", observer=observer):
        sparse = torch.ones(1, MIB).to_sparse(layout=layout)  # up to 20 MiB
        others = [torch.ones(MIB) for _ in range(12)]
        before = umem.stats().faults
        double = sparse * 2.0
        assert (umem.stats().faults > before) == (observer == "off")
        del sparse, others, double


class Asks:
    """Victims that run operators of their own."""

    name, asked = "asks", 0

    def __init__(self) -> None:
        self.parts = [torch.ones(16) for _ in range(300)]

    def plan(self, *_: object) -> None:
        return None

    def victims(self, *_: object) -> list[int]:
        self.asked += 1
        torch.stack(self.parts)
        return []


@pytest.mark.usefixtures("one_thread")
def test_ops_of_a_policy_that_is_asked_leave_the_inputs_of_the_op_that_waits() -> None:
    policy = Asks()
    with umem.enable(budget="16MiB", device="soft", policy=policy):
        one, other = torch.ones(MIB), torch.ones(MIB)
        others = [torch.ones(MIB) for _ in range(4)]
        before, asked = umem.stats().faults, policy.asked
        total = one + other
        assert policy.asked > asked
        assert umem.stats().faults == before
        assert bool((total == 2).all())
        del one, other, others, total


@BOTH
@pytest.mark.usefixtures("one_thread")
def test_an_op_that_raises_leaves_nothing_pinned(observer: str) -> None:
    umem.enable(budget="64MiB", device="soft", observer=observer)
    a, b = torch.ones(1024, 1024), torch.ones(512, 1024)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        a @ b
    assert [block["pins"] for block in _core_testing.blocks() if block["pins"]] == []
    assert (a @ a)[0, 0].item() == 1024


@BOTH
@pytest.mark.usefixtures("one_thread")
def test_each_optimizer_step_is_one_step(observer: str) -> None:
    umem.enable(budget="64MiB", device="soft", observer=observer)
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    before = umem.stats().steps
    for _ in range(3):
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()
    assert umem.stats().steps == before + 3


@BOTH
@pytest.mark.usefixtures("one_thread")
def test_a_step_that_raises_does_not_confuse_the_next(observer: str) -> None:
    umem.enable(budget="64MiB", device="soft", observer=observer)
    weight = torch.nn.Parameter(torch.ones(1024, 1024))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def closure() -> float:
        raise KeyError("inside a step")

    with pytest.raises(KeyError):
        optimizer.step(closure)
    hidden = weight * 2
    tags = {b["tag"] for b in _core_testing.blocks() if b["base"] == hidden.data_ptr()}
    assert tags == {"activation"}


def faults_of_training(observer: str) -> tuple[int, int]:
    """Faults and prefetches of steps with tensors of three times the budget."""
    torch.manual_seed(0)
    with umem.enable(budget="24MiB", device="soft", observer=observer):
        net = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8)))
        inputs = torch.randn(512, 1024)
        net(inputs).sum().backward()
        before = umem.stats()
        for _ in range(2):
            net(inputs).sum().backward()
        after = umem.stats()
        del net
    return after.faults - before.faults, after.prefetches - before.prefetches


@pytest.mark.usefixtures("one_thread")
def test_inputs_are_there_before_the_op_needs_them() -> None:
    """Uses that the observer misses show as page faults."""
    blind, _ = faults_of_training("off")
    seeing, prefetches = faults_of_training("native")
    assert blind > 50
    assert prefetches > 0
    assert seeing < blind / 10


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("aten::conv2d", "conv"),
        ("aten::mkldnn_convolution", "conv"),
        ("ConvolutionBackward0", "conv"),
        ("autograd::engine::evaluate_function: ConvolutionBackward0", "conv"),
        ("aten::addmm", "linear"),
        ("AddmmBackward0", "linear"),
        ("aten::linear", "linear"),
        ("aten::native_batch_norm_backward", "norm"),
        ("NativeLayerNormBackward0", "norm"),
        ("aten::native_layer_norm", "norm"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("ScaledDotProductFlashAttentionForCpuBackward0", "attention"),
        ("aten::max_pool2d_with_indices", "pooling"),
        ("MaxPool2DWithIndicesBackward0", "pooling"),
        ("aten::embedding_dense_backward", "embedding"),
        ("aten::nll_loss_forward", "loss"),
        ("aten::add_", "elementwise"),
        ("aten::_foreach_addcdiv_", "elementwise"),
        ("ReluBackward0", "elementwise"),
        ("aten::threshold_backward", "elementwise"),
        ("aten::sort", "other"),
        ("aten::upsample_bilinear2d", "other"),
        ("UpsampleLinear1DBackward0", "other"),
        ("aten::mkldnn_rnn_layer", "linear"),
        ("MkldnnRnnLayerBackward0", "linear"),
        ("aten::address_book", "other"),
        ("torch::autograd::AccumulateGrad", "none"),
        ("Optimizer.step#SGD.step", "none"),
    ],
)
def test_families(name: str, family: str) -> None:
    assert core.family_of(name) == family


def test_memory_that_umem_does_not_manage_is_counted_by_step(one_thread: None) -> None:
    del one_thread
    early, small = torch.ones(MIB), torch.ones(MIB // 4)  # of 4 MiB, and of 1
    array = torch.frombuffer(bytearray(8 * MIB), dtype=torch.float32)
    with umem.enable(budget="64MiB", device="soft"):  # another session has its own figures
        umem.step()
        array.sum()
        assert umem.stats().peak_unmanaged_bytes == 8 * MIB
    umem.enable(budget="64MiB", device="soft")
    net = torch.nn.Linear(1024, 1024)
    array.sum()  # before the first step, such as while weights are loaded
    umem.step()
    net(torch.ones(2, 1024)).sum().backward()
    small.add_(1)
    assert umem.stats().peak_unmanaged_bytes == 0
    for _ in range(3):
        (early + early[1:2]).sum()
        umem.step()
        array.add_(1)
        umem.step()
    assert umem.stats().peak_unmanaged_bytes == 8 * MIB
    (array[:MIB] + early).sum()  # as far as it is used
    assert umem.stats().peak_unmanaged_bytes == 8 * MIB
    (array[MIB:] + early).sum()
    (array + 1).sum()
    assert umem.stats().peak_unmanaged_bytes == 12 * MIB
    assert "made before umem.enable()" in umem.summary()
    umem.reset_peak_stats()
    assert umem.stats().peak_unmanaged_bytes == 0
