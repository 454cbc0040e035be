"""`umem.load_checkpoint` without umem being on: which tensors it writes, and when it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import umem  # noqa: E402
from umem.errors import CheckpointError, ConfigError  # noqa: E402
from umem.offload.checkpoint import file_tensor  # noqa: E402


class Net(nn.Module):
    """Tied weights, buffers of both kinds, a frozen parameter, none, and a shared module."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.again = self.layers[1]
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Parameter(torch.randn(3, dtype=torch.float64), requires_grad=False)
        self.register_parameter("nothing", None)
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("table", torch.arange(4.0), persistent=False)


def made() -> Net:
    torch.manual_seed(3)
    return Net()


def on_meta() -> Net:
    with torch.device("meta"):
        net = Net()
    net.table = torch.arange(4.0)  # no checkpoint has it
    return net


def saved(net: nn.Module, folder: Path) -> Path:
    torch.save(net.state_dict(), folder / "net.pt")
    return folder / "net.pt"


def equal(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) and x.dtype == y.dtype for (a, x), (b, y) in pairs)


@pytest.mark.parametrize("chunk", [16, 1 << 20])
def test_a_module_on_meta_is_made_and_filled(
    tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_tensor, "CHUNK_BYTES", chunk)
    net, source = on_meta(), made()
    loaded = umem.load_checkpoint(net, saved(source, tmp_path))
    assert equal(net, source)
    assert loaded[:2] == ([], [])
    assert net.head.weight is net.embedding.weight
    assert net.again.weight is net.layers[1].weight
    assert not net.frozen.requires_grad
    assert net.embedding.weight.requires_grad
    assert isinstance(net.frozen, nn.Parameter)
    assert not isinstance(net.mask, nn.Parameter)
    assert net.norm.running_mean is net.norm._buffers["running_mean"]


def test_a_module_in_memory_is_overwritten_in_place(tmp_path: Path) -> None:
    torch.manual_seed(4)
    net, source = Net(), made()
    before = {name: t.data_ptr() for name, t in net.state_dict().items()}
    umem.load_checkpoint(net, saved(source, tmp_path))
    assert equal(net, source)
    assert {name: t.data_ptr() for name, t in net.state_dict().items()} == before
    net.embedding(torch.tensor([1])).sum().backward()  # and it trains


def test_parts_may_be_on_meta(tmp_path: Path) -> None:
    net, source = made(), made()
    net.layers[0].to("meta")
    net.layers[0].to_empty(device="meta")
    nn.init.zeros_(net.embedding.weight)
    umem.load_checkpoint(net, saved(source, tmp_path))
    assert equal(net, source)


def test_one_name_of_a_shared_tensor_is_enough(tmp_path: Path) -> None:
    source = made()
    state = {name: t for name, t in source.state_dict().items() if name != "embedding.weight"}
    torch.save(state, tmp_path / "net.pt")
    net = on_meta()
    assert umem.load_checkpoint(net, tmp_path / "net.pt").missing_keys == []
    assert equal(net, source)


def test_strides_of_the_module_stay(tmp_path: Path) -> None:
    source = nn.Conv2d(3, 5, 3)
    net = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
    umem.load_checkpoint(net, saved(source, tmp_path))
    assert equal(net, source)
    assert net.weight.is_contiguous(memory_format=torch.channels_last)
    umem.load_checkpoint(source, saved(net, tmp_path))  # and the other way round
    assert equal(net, source)


def changed(**tensors: object) -> dict[str, object]:
    return {**made().state_dict(), **tensors}


def without(*names: str) -> dict[str, object]:
    return {name: t for name, t in made().state_dict().items() if name not in names}


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (without("layers.0.bias", "frozen"), r"frozen, layers\.0\.bias \(missing in the"),
        (changed(more=torch.ones(2)), r"more \(not in the module\)"),
        (changed(frozen=torch.ones(3)), r"frozen: float32\[3\] in .*, float64\[3\] in the module"),
        (changed(mask=torch.ones(3).bool()), r"mask: bool\[3\] in the checkpoint, bool\[2\]"),
        (
            {f"n{i}": torch.ones(1) for i in range(9)},
            r"n0, n1, n2, n3, n4 and 4 more \(not in the module\)",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("meta", [False, True])
def test_what_does_not_fit_changes_nothing(
    tmp_path: Path, state: dict[str, object], reason: str, meta: bool
) -> None:
    torch.save(state, tmp_path / "net.pt")
    torch.manual_seed(4)
    net = on_meta() if meta else Net()
    before = dict(net.state_dict(keep_vars=True))
    values = None if meta else {name: t.clone() for name, t in net.state_dict().items()}
    with pytest.raises(CheckpointError, match=reason):
        umem.load_checkpoint(net, tmp_path / "net.pt")
    assert all(net.state_dict(keep_vars=True)[name] is t for name, t in before.items())
    if values:
        assert all(torch.equal(net.state_dict()[name], t) for name, t in values.items())


def test_not_strict_loads_what_both_have(tmp_path: Path) -> None:
    state = {**without("layers.0.bias"), "more": torch.ones(2)}
    torch.save(state, tmp_path / "net.pt")
    net = on_meta()
    loaded = umem.load_checkpoint(net, tmp_path / "net.pt", strict=False)
    assert (loaded.missing_keys, loaded.unexpected_keys) == (["layers.0.bias"], ["more"])
    assert net.layers[0].bias.is_meta
    assert torch.equal(net.layers[0].weight, made().layers[0].weight)
    torch.save(changed(frozen=torch.ones(3)), tmp_path / "net.pt")
    with pytest.raises(CheckpointError, match="frozen"):
        umem.load_checkpoint(on_meta(), tmp_path / "net.pt", strict=False)


def test_a_buffer_that_no_checkpoint_has_may_not_be_on_meta(tmp_path: Path) -> None:
    with torch.device("meta"):
        net = Net()
    path = saved(made(), tmp_path)
    with pytest.raises(CheckpointError, match=r"not persistent and on meta: table; compute them"):
        umem.load_checkpoint(net, path)
    assert net.frozen.is_meta
    umem.load_checkpoint(net, path, strict=False)
    assert net.table.is_meta
    assert torch.equal(net.frozen, made().frozen)


def test_a_file_that_fails_in_the_middle_leaves_meta_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, path = on_meta(), saved(made(), tmp_path)
    whole = file_tensor.FileTensor.copy_to

    def fails(stored: file_tensor.FileTensor, target: torch.Tensor) -> None:
        if stored.dtype is torch.float64:
            raise CheckpointError("gone")
        whole(stored, target)

    monkeypatch.setattr(file_tensor.FileTensor, "copy_to", fails)
    with pytest.raises(CheckpointError, match="gone"):
        umem.load_checkpoint(net, path)
    assert all(t.is_meta for t in net.state_dict().values())


def test_what_is_no_module() -> None:
    with pytest.raises(ConfigError, match="was given a dict; allowed: a module"):
        umem.load_checkpoint({}, "x")  # type: ignore[arg-type]


def test_parameters_without_a_shape_yet(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"0\.weight is a UninitializedParameter; allowed: plain"):
        umem.load_checkpoint(nn.Sequential(nn.LazyLinear(3)), saved(made(), tmp_path))


def test_the_device_can_be_named(tmp_path: Path) -> None:
    net, path = on_meta(), saved(made(), tmp_path)
    with torch.device("meta"):
        umem.load_checkpoint(net, path, device="cpu")
    assert equal(net, made())
