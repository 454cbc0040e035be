"""Programs of several models that run in turn, as pipelines of diffusion do, and merged weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict

import pytest

torch = pytest.importorskip("torch")

import umem  # noqa: E402
from umem.base.native import core  # noqa: E402

WIDTH = 1024  # 4 MiB a weight


@pytest.fixture(autouse=True)
def _memory() -> Iterator[None]:
    with umem.enable(budget="48MiB", device="soft", policy="auto"), torch.no_grad():
        torch.manual_seed(0)
        yield


def layers(count: int) -> torch.nn.Module:
    made = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)]
    return torch.nn.Sequential(*made).eval()


def counted(run: Callable[[], object]) -> dict[str, int]:
    """Return what the statistics count while it runs."""
    before = asdict(umem.stats())
    run()
    return {name: count - before[name] for name, count in asdict(umem.stats()).items()}


def test_weights_of_models_in_turn_leave_without_a_copy() -> None:
    """An encoder, a network that runs eight times, and a decoder, for each of some images."""
    encoder, network, decoder = layers(6), layers(10), layers(6)

    def image() -> None:
        x = encoder(torch.randn(32, WIDTH))
        for _ in range(8):
            x = network(x)
        decoder(x)

    images = [counted(image) for _ in range(8)]
    assert images[0]["bytes_out"] > 0
    assert [each["bytes_out"] for each in images[2:]] == [0] * 6
    assert all(each["bytes_in"] > 0 for each in images)
    # The encoder and the decoder run once an image: they are planned as well.
    assert [each["plan_misses"] for each in images[5:]] == [0] * 3
    assert images[-1]["faults"] == 0


def test_weights_that_were_merged_are_clean_again() -> None:
    network = layers(16)
    x = torch.randn(32, WIDTH)
    forward = lambda: network(x)  # noqa: E731
    # A plan that was made with other times of operators may copy one or two of the weights.
    few = 2 * network[0].weight.nbytes
    for _ in range(8):
        forward()
    assert counted(forward)["bytes_out"] <= few
    deltas = [torch.full((WIDTH, 1), 1e-3), torch.ones(1, WIDTH)]
    for sign in (1.0, -1.0):
        for layer in network:
            layer.weight.addmm_(*deltas, alpha=sign)
        after = [counted(forward) for _ in range(4)]
        assert after[0]["bytes_out"] > few  # what was written
        assert max(each["bytes_out"] for each in after[2:]) <= few
        assert sum(each["faults"] for each in after) == 0
    assert core.stats()["hook_errors"] == 0
