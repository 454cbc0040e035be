"""DataLoader workers, forked and spawned, under a budget that is a fraction of the data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

from support.rows import FEATURES, Rows  # noqa: E402

import umem  # noqa: E402


def train(workers: int, context: str | None) -> str:
    """A fingerprint of the weights after two epochs, and of the data."""
    torch.manual_seed(0)
    data = Rows()
    net = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9)
    loader = torch.utils.data.DataLoader(
        data,
        batch_size=16,
        num_workers=workers,
        multiprocessing_context=context,
    )
    for _ in range(2):
        for batch in loader:
            optimizer.zero_grad()
            net(batch).square().mean().backward()
            optimizer.step()
    digest = hashlib.sha256()
    for tensor in (*net.state_dict().values(), data.rows):
        digest.update(tensor.detach().numpy().tobytes())
    return digest.hexdigest()


@pytest.fixture(scope="module")
def plain() -> str:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return train(0, None)
    finally:
        torch.set_num_threads(threads)


def cases() -> Iterator[tuple[int, str | None]]:
    yield 0, None
    yield 2, "fork"
    yield 2, "spawn"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize(("workers", "context"), list(cases()))
@pytest.mark.parametrize("policy", ["none", "lru"])
def test_workers_never_see_or_cause_wrong_data(
    plain: str, workers: int, context: str | None, policy: str
) -> None:
    with umem.enable(budget="16MiB", device="soft", policy=policy):
        assert train(workers, context) == plain
        assert umem.stats().peak_resident_bytes <= 16 << 20
