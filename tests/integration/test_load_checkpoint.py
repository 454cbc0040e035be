"""Models larger than the budget: created, loaded, and used, on the software device."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import umem  # noqa: E402
from umem.errors import CheckpointError, OutOfMemoryError  # noqa: E402

MIB = 1 << 20
LAYERS, WIDTH = 16, 1024  # 4 MiB each
BUDGET = "16MiB"


def stack(layers: int = LAYERS, **options: Any) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, **options) for _ in range(layers)))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("checkpoint") / "net.pt"
    torch.save(stack().state_dict(), path)
    return path


def on() -> None:
    umem.enable(device="soft", budget=BUDGET, policy="lru")


def answers(net: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return net(torch.linspace(-1, 1, WIDTH).expand(2, -1))


def is_loaded(net: nn.Module, checkpoint: Path) -> bool:
    """Compares with the file, a tensor at a time."""
    wanted = torch.load(checkpoint, mmap=True)
    return all(torch.equal(t, wanted[name]) for name, t in net.state_dict().items())


def check(net: nn.Module, held: bool = True) -> None:
    rows = umem.tensors(net)
    assert len(rows) == 2 * LAYERS
    assert all(row.held for row in rows) == held
    stats = umem.stats()
    assert stats.live_bytes >= LAYERS * 4 * MIB
    assert stats.peak_resident_bytes <= stats.budget_bytes == 16 * MIB


def made_by_context() -> nn.Module:
    with torch.device("cpu"):  # the software device's tensors
        return stack()


def made_by_argument() -> nn.Module:
    return stack(device="cpu")


def made_on_meta() -> nn.Module:
    with torch.device("meta"):
        net = stack()
    assert umem.stats().live_bytes == 0
    return net.to_empty(device="cpu")


@pytest.mark.parametrize("make", [made_by_context, made_by_argument, made_on_meta])
def test_a_model_of_four_budgets_is_made(make: Any, checkpoint: Path) -> None:
    torch.manual_seed(0)
    plain = answers(stack())
    on()
    torch.manual_seed(0)
    net = make()
    check(net)
    if make is made_on_meta:
        net.load_state_dict(torch.load(checkpoint, mmap=True))
    assert torch.equal(answers(net), plain)
    assert is_loaded(net, checkpoint)
    check(net)


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("assign", [False, True])
def test_torchs_own_ways_to_load(checkpoint: Path, mmap: bool, assign: bool) -> None:
    """They work; a mapped file that is assigned remains its own memory."""
    on()
    with torch.device("meta"):
        net = stack()
    if not assign:
        net.to_empty(device="cpu")
    net.load_state_dict(torch.load(checkpoint, mmap=mmap, map_location="cpu"), assign=assign)
    assert is_loaded(net, checkpoint)
    if assign and mmap:
        assert not any(row.held for row in umem.tensors(net))
        return
    check(net)


def test_a_checkpoint_of_four_budgets_is_streamed(checkpoint: Path) -> None:
    on()
    with torch.device("meta"):
        net = stack()
    loaded = umem.load_checkpoint(net, checkpoint)
    stats = umem.stats()
    assert loaded.bytes == sum(p.nbytes for p in net.parameters())
    assert stats.bytes_in <= 4 * MIB  # pages of small tensors may be fetched again
    # All of it, a page of small ones, and no more.
    assert stats.peak_host_bytes + stats.peak_resident_bytes <= 1.1 * loaded.bytes
    check(net)
    assert {row.tag for row in umem.tensors(net)} == {"param", "pool"}
    assert is_loaded(net, checkpoint)


def test_into_weights_that_are_there_and_partly_away(checkpoint: Path) -> None:
    on()
    net = made_on_meta()
    places = [p.data_ptr() for p in net.parameters()]
    umem.evict(net)
    umem.load_checkpoint(net, checkpoint)
    assert [p.data_ptr() for p in net.parameters()] == places
    assert {row.tag for row in umem.tensors(net)} == {"param", "pool"}
    assert is_loaded(net, checkpoint)
    check(net)


def test_it_trains_after_loading(checkpoint: Path) -> None:
    def trained(net: nn.Module) -> list[float]:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        losses = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = net(torch.ones(2, WIDTH)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    plain = stack()
    plain.load_state_dict(torch.load(checkpoint))
    expected = trained(plain)
    umem.enable(device="soft", budget=BUDGET)
    with torch.device("meta"):
        net = stack()
    umem.load_checkpoint(net, checkpoint)
    assert trained(net) == expected


def test_no_room_on_the_host_leaves_the_module_on_meta(checkpoint: Path) -> None:
    umem.enable(device="soft", budget=BUDGET, host_budget="8MiB", policy="lru")
    with torch.device("meta"):
        net = stack()
    with pytest.raises((OutOfMemoryError, torch.OutOfMemoryError)):
        umem.load_checkpoint(net, checkpoint)
    assert all(p.is_meta for p in net.parameters())
    assert umem.stats().live_bytes == 0


def test_what_does_not_fit_moves_nothing(checkpoint: Path) -> None:
    on()
    with torch.device("meta"):
        net = stack(LAYERS + 1)
    with pytest.raises(CheckpointError, match=r"16\.weight, 16\.bias \(missing"):
        umem.load_checkpoint(net, checkpoint)
    assert umem.stats().live_bytes == umem.stats().bytes_in == umem.stats().bytes_out == 0


_MEASURED = """
import json, sys
import torch, umem, umem.offload.checkpoint.load
torch.set_num_threads(1)
kind, path, layers, width = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
def status(name):
    line = next(l for l in open("/proc/self/status") if l.startswith(name + ":"))
    return int(line.split()[1]) << 10
umem.enable(device="soft", budget="32MiB", policy="lru")
with torch.device("meta"):
    net = torch.nn.Sequential(
        *(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
open("/proc/self/clear_refs", "w").write("5")  # proc(5): VmHWM starts over
before = status("VmRSS")
if kind == "stream":
    umem.load_checkpoint(net, path)
else:
    net.to_empty(device="cpu").load_state_dict(torch.load(path))
stats = umem.stats()
print(json.dumps({"rss": status("VmHWM") - before,
                  "umem": stats.peak_host_bytes + stats.peak_resident_bytes}))
"""


def measured(kind: str, path: Path) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED, kind, str(path), "32", str(WIDTH)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("kind", ["pt", "safetensors"])
def test_no_more_memory_than_the_checkpoint(tmp_path: Path, kind: str) -> None:
    """All memory of the process, with the device's, which is the process's own here."""
    net = stack(32, bias=False)
    path, total = tmp_path / f"net.{kind}", 32 * 4 * MIB
    if kind == "pt":
        torch.save(net.state_dict(), path)
    else:
        header, at = {}, 0
        for name, p in net.state_dict().items():
            header[name] = {
                "dtype": "F32", "shape": list(p.shape), "data_offsets": [at, at + p.nbytes],
            }  # fmt: skip
            at += p.nbytes
        text = json.dumps(header).encode()
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for p in net.state_dict().values():
                file.write(p.numpy().tobytes())
    found = measured("stream", path)
    assert total <= found["rss"] <= math.ceil(1.1 * total)
    assert found["umem"] == total
    if kind == "pt":  # for comparison: torch's way needs it twice
        assert measured("torch", path)["umem"] > 1.5 * total
