"""`umem.load_checkpoint` without umem being on: which tensors it writes, and when it refuses."""

from __future__ import annotations

import zipfile
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


def test_an_expanded_buffer_is_made_and_one_in_memory_is_refused(tmp_path: Path) -> None:
    """Its elements share memory, which nothing can be copied to."""

    def with_buffer(buffer: torch.Tensor) -> nn.Module:
        net = nn.Linear(4, 3)
        net.register_buffer("positions", buffer)
        return net

    source = with_buffer(torch.arange(12.0).reshape(3, 4))
    path = saved(source, tmp_path)
    with torch.device("meta"):
        net = with_buffer(torch.arange(4.0).expand(3, 4))
    umem.load_checkpoint(net, path)
    assert equal(net, source)
    for wrong in (torch.arange(4.0).expand(3, 4), torch.eye(3, 4).to_sparse()):
        net = with_buffer(wrong)
        before = net.weight.detach().clone()
        with pytest.raises(ConfigError, match="positions is a Tensor; allowed: plain tensors"):
            umem.load_checkpoint(net, path)
        assert torch.equal(net.weight, before)


def test_one_name_of_a_shared_tensor_is_enough(tmp_path: Path) -> None:
    source = made()
    state = {name: t for name, t in source.state_dict().items() if name != "embedding.weight"}
    torch.save(state, tmp_path / "net.pt")
    net = on_meta()
    assert umem.load_checkpoint(net, tmp_path / "net.pt").missing_keys == []
    assert equal(net, source)


def test_the_last_of_several_names_wins_as_in_torch(tmp_path: Path) -> None:
    state = made().state_dict()
    first, last = torch.ones(7, 4), torch.full((7, 4), 2.0)
    torch.save(
        {"head.weight": last} | state | {"embedding.weight": first, "head.weight": last},
        tmp_path / "net.pt",
    )
    plain, net = made(), made()
    plain.load_state_dict(torch.load(tmp_path / "net.pt"))
    umem.load_checkpoint(net, tmp_path / "net.pt")
    assert equal(net, plain)
    assert torch.equal(net.embedding.weight, last)


def test_a_compressed_file_is_refused(tmp_path: Path) -> None:
    path = saved(made(), tmp_path)
    packed = tmp_path / "packed.pt"
    with zipfile.ZipFile(path) as one, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as other:
        for name in one.namelist():
            other.writestr(name, one.read(name))
    assert torch.load(packed)
    net = made()
    with pytest.raises(CheckpointError, match="it is compressed; write it again"):
        umem.load_checkpoint(net, packed)
    assert equal(net, made())


class Bits(nn.Module):
    """Views whose bits are not their values."""

    def __init__(self, value: float) -> None:
        super().__init__()
        numbers = torch.full((3,), complex(value, value))
        self.register_buffer("conjugate", numbers.conj())
        self.register_buffer("negative", torch._neg_view(numbers.imag.clone()))


def test_views_that_conjugate_or_negate_have_the_values(tmp_path: Path) -> None:
    torch.save({k: v.resolve_conj().resolve_neg() for k, v in Bits(2).state_dict().items()},
               tmp_path / "bits.pt")  # fmt: skip
    net = Bits(1)
    umem.load_checkpoint(net, tmp_path / "bits.pt")
    assert equal(net, Bits(2))


def test_the_device_holds_values(tmp_path: Path) -> None:
    path = saved(made(), tmp_path)
    with pytest.raises(ConfigError, match="holds no values"):
        umem.load_checkpoint(on_meta(), path, device="meta")
    with pytest.raises(ConfigError, match=r"'gpu'.*allowed: cpu, cuda and the like"):
        umem.load_checkpoint(on_meta(), path, device="gpu")
    net = on_meta()
    with torch.device("meta"):
        umem.load_checkpoint(net, path)
    assert equal(net, made())


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
