"""Recomputation does not touch models whose parameters are freed within the step."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
fsdp = pytest.importorskip("torch.distributed.fsdp")

from torch import nn  # noqa: E402

import umem  # noqa: E402
from umem.errors import NotSupportedError  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture(autouse=True)
def group(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))


def sharded(kind: str) -> nn.Module:
    model = net()
    if kind == "FSDP1":
        made: nn.Module = fsdp.FullyShardedDataParallel(model, device_id=torch.device("cpu"))
        return made
    for layer in model:
        fsdp.fully_shard(layer)
    fsdp.fully_shard(model)
    return model


def losses(model: nn.Module, steps: int = 4) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    found = []
    for seed in range(steps):
        torch.manual_seed(seed)
        loss = model(torch.randn(512, 256)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("kind", ["FSDP1", "FSDP2"])
def test_it_is_refused(kind: str) -> None:
    model = sharded(kind)
    with pytest.raises(NotSupportedError, match="FSDP frees the model's parameters"):
        umem.optimize(model)


def test_partitions_of_zero_3_are_refused() -> None:
    model = net()
    setattr(model[0].weight, "ds_id", 0)  # noqa: B010 - torch has no such attribute
    with pytest.raises(NotSupportedError, match="ZeRO-3 frees the model's parameters"):
        umem.optimize(model)


def test_the_option_leaves_it_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    plain = losses(sharded("FSDP2"))
    with umem.enable(budget="16MiB", device="soft", recompute="memory"):
        assert losses(sharded("FSDP2")) == plain
        dist.destroy_process_group()  # which contains tensors
        gc.collect()
    assert "keeps all activations: FSDP frees" in caplog.text


def test_what_is_sharded_later_is_left_from_then_on(caplog: pytest.LogCaptureFixture) -> None:
    plain = losses(sharded("FSDP2"))
    model = umem.optimize(net(), mode="memory")
    for layer in model:
        fsdp.fully_shard(layer)
    fsdp.fully_shard(model)
    assert losses(model) == plain
    assert "FSDP has sharded the model since" in caplog.text


def test_what_is_wrapped_later_is_left_too(caplog: pytest.LogCaptureFixture) -> None:
    plain = losses(sharded("FSDP1"))
    model = umem.optimize(net(), mode="memory")
    wrapped = fsdp.FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    assert losses(wrapped) == plain
    assert "FSDP has sharded the model since" in caplog.text


def test_layers_that_are_sharded_later_are_seen(caplog: pytest.LogCaptureFixture) -> None:
    plain_model = net()
    for layer in plain_model:
        fsdp.fully_shard(layer)
    plain = losses(plain_model)
    model = umem.optimize(net(), mode="memory")
    for layer in model:
        fsdp.fully_shard(layer)
    assert losses(model) == plain
    assert "FSDP has sharded the model since" in caplog.text
