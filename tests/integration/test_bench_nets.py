"""The networks that only benches have: they run on data, and learn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.benches import imports

torch = pytest.importorskip("torch")


@pytest.fixture
def nets(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """bench/policies/other_nets.py, as bench scripts import it."""
    for bench in imports(monkeypatch, "policies"):
        yield bench("policies.other_nets")


def _images(*shape: int) -> Any:
    return torch.randn(*shape)


def _tokens(*shape: int) -> Any:
    return torch.randint(20, shape)


SMALL: dict[str, Callable[[Any], tuple[Any, tuple[Any, ...]]]] = {
    "recommendation": lambda n: (n.DLRM((30, 20), 8, 13), (_images(4, 13), _tokens(2, 4, 3))),
    "generator": lambda n: (n.Generator(8, 4, 3), (_images(2, 8, 1, 1),)),
    "discriminator": lambda n: (n.Discriminator(4, 3), (_images(2, 3, 32, 32),)),
    "volumes": lambda n: (n.VolumeUNet(1, 4, 2, 3), (_images(1, 1, 8, 8, 8),)),
    "diffusion": lambda n: (n.DiffusionUNet(32, (1, 2), (1,)), (_images(2, 3, 8, 8), _images(2))),
    "translation": lambda n: (n.EncoderDecoder(20, 2, 16, 2), (_tokens(2, 6), _tokens(2, 5))),
    "experts": lambda n: (n.Texts(20, 16, [n.ExpertBlock(16, 2, 4)]), (_tokens(2, 8),)),
    "state space": lambda n: (n.Texts(20, 64, [n.StateSpaceBlock(64)]), (_tokens(2, 128),)),
}


@pytest.mark.parametrize("kind", SMALL)
def test_every_weight_of_a_network_learns(nets: Any, kind: str) -> None:
    torch.manual_seed(0)
    net, inputs = SMALL[kind](nets)
    net(*inputs).square().sum().backward()
    for name, weight in net.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.isfinite().all(), name


def test_a_network_with_low_rank_corrections_learns_these_only(nets: Any) -> None:
    block = nets.AdaptedBlock(32, 2, 48, 4)
    block(torch.randn(2, 5, 32)).square().sum().backward()
    learns = {name for name, weight in block.named_parameters() if weight.grad is not None}
    assert learns == {f"{part}.{side}.weight" for part in ("q", "v") for side in ("down", "up")}


def test_the_scan_by_chunks_is_the_recurrence(nets: Any) -> None:
    torch.manual_seed(0)
    block = nets.StateSpaceBlock(64).double()
    block.decay.data.uniform_(-1, 1)
    u, rate = torch.randn(2, 128, 2, 64).double(), torch.rand(2, 128, 2).double()
    write, read = torch.randn(2, 2, 128, 64).double().unbind()
    state, made = torch.zeros(2, 2, 64, 64).double(), []
    for t in range(128):
        fade = torch.exp(-block.decay.exp() * rate[:, t])
        new = torch.einsum("bhp,bn->bhpn", u[:, t] * rate[:, t, :, None], write[:, t])
        state = state * fade[..., None, None] + new
        made.append(torch.einsum("bhpn,bn->bhp", state, read[:, t]))
    torch.testing.assert_close(block._scan(u, rate, write, read), torch.stack(made, 1))
