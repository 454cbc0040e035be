"""Models larger than the budget on CUDA tensors: created, loaded, and used."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from support.cuda_tensors import holds  # noqa: E402
from torch import nn  # noqa: E402

import umem  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("umem_on")]
MIB = 1 << 20
LAYERS = 64  # of 4 MiB: four budgets


def stack(**options: object) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(1024, 1024, bias=False, **options) for _ in range(LAYERS)))


def filled(net: nn.Module) -> bool:
    """Return whether each weight has the value from `fill` throughout."""
    return all(holds(weight, float(i)) for i, weight in enumerate(net.parameters()))


def fill(net: nn.Module) -> nn.Module:
    with torch.no_grad():
        for i, weight in enumerate(net.parameters()):
            weight.fill_(float(i))
    return net


def check(net: nn.Module) -> None:
    rows = umem.tensors(net)
    assert len(rows) == LAYERS
    assert all(row.held and row.bytes == 4 * MIB for row in rows)
    assert all(weight.is_cuda for weight in net.parameters())
    stats = umem.stats()
    assert stats.peak_resident_bytes <= stats.budget_bytes == 64 * MIB


@pytest.mark.parametrize("way", ["context", "argument", "meta"])
def test_a_model_of_four_budgets_is_made(way: str) -> None:
    if way == "context":
        with torch.device("cuda"):
            net = stack()
    elif way == "argument":
        net = stack(device="cuda")
    else:
        net = stack(device="meta").to_empty(device="cuda")
    assert filled(fill(net))
    check(net)


@pytest.mark.parametrize("way", ["meta", "in place", "torch"])
def test_a_checkpoint_of_four_budgets_is_loaded(tmp_path: Path, way: str) -> None:
    torch.save(fill(stack()).state_dict(), tmp_path / "net.pt")
    net = stack(device="meta")
    if way == "in place":
        net.to_empty(device="cuda")
    if way == "torch":
        state = torch.load(tmp_path / "net.pt", map_location="cuda", mmap=True)
        net.load_state_dict(state, assign=True)
        del state
    else:
        umem.load_checkpoint(net, tmp_path / "net.pt")
    assert {row.tag for row in umem.tensors(net)} == {"param"}
    check(net)
    assert filled(net)
    check(net)


def test_the_tag_of_a_cache() -> None:
    cache, other = (torch.zeros(2 * MIB, device="cuda") for _ in range(2))
    assert umem.tag(cache, "kv_cache")
    cache.fill_(1.0)
    with umem.sleep(["kv_cache"]):
        assert umem.where(cache).resident_bytes == 0
        assert umem.where(other).resident_bytes == other.nbytes
    assert umem.where(cache).tag == "kv_cache"
    assert holds(cache, 1.0)
