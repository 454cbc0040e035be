"""umem as torch's CPU allocator on the software device."""

from __future__ import annotations

import hashlib
import io
import os
import threading

import pytest

torch = pytest.importorskip("torch")

import umem  # noqa: E402
from umem.base.native import core  # noqa: E402
from umem.integrations.torch import cpu  # noqa: E402

MIB = 1 << 20


def train(steps: int = 4) -> str:
    """A fingerprint of a small network after some steps: loss and weights, bit by bit."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, padding=1),
        torch.nn.BatchNorm2d(16),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(4),
        torch.nn.Flatten(),
        torch.nn.Linear(256, 10),
    )
    optimizer = torch.optim.AdamW(net.parameters())
    loss = torch.zeros(())
    for _ in range(steps):
        images, labels = torch.randn(32, 3, 64, 64), torch.randint(10, (32,))
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(images), labels)
        loss.backward()
        optimizer.step()
    digest = hashlib.sha256()
    for tensor in net.state_dict().values():
        digest.update(tensor.detach().numpy().tobytes())
    return f"{loss.item().hex()} {digest.hexdigest()}"


@pytest.mark.parametrize("observer", ["native", "python", "off"])
def test_training_out_of_core_is_bit_identical(observer: str) -> None:
    plain = train()
    with umem.enable(budget="12MiB", device="soft", observer=observer):
        umem.reset_peak_stats()
        managed = train()
        stats = umem.stats()
    assert managed == plain
    assert stats.peak_live_bytes > stats.budget_bytes
    assert stats.peak_resident_bytes <= stats.budget_bytes
    assert stats.bytes_out > 0


def test_memory_is_umems_while_on_and_stays_valid_after() -> None:
    before = torch.full((MIB,), 1.0)
    umem.enable(budget="64MiB", device="soft")
    during = torch.full((MIB,), 2.0)
    assert core.owns(during.data_ptr())
    assert not core.owns(before.data_ptr())
    del before  # plain memory freed while umem is on
    umem.disable()
    after = torch.full((MIB,), 3.0)
    assert not core.owns(after.data_ptr())
    assert during.sum().item() == 2.0 * MIB
    live = umem.stats().live_bytes
    del during  # umem's memory freed while umem is off
    assert umem.stats().live_bytes <= live - 4 * MIB


def test_zero_size_tensors_take_nothing() -> None:
    umem.enable(budget="64MiB", device="soft")
    allocs = umem.stats().allocs
    empty = torch.empty(0, 5)
    assert empty.data_ptr() == 0
    assert empty.clone().sum(1).shape == (0,)
    assert umem.stats().allocs == allocs


def test_many_tiny_tensors() -> None:
    umem.enable(budget="64MiB", device="soft")
    live = umem.stats().live_bytes
    tensors = [torch.full((2,), float(i)) for i in range(20_000)]
    assert sum(t[1].item() for t in tensors[::1000]) == sum(range(0, 20_000, 1000))
    tensors.clear()
    assert umem.stats().live_bytes <= live + MIB


def test_out_of_memory_is_torchs_error_with_figures() -> None:
    umem.enable(budget="16MiB", host_budget="16MiB", device="soft")
    kept = torch.ones(MIB)
    # torch's own words come first: batch size finders search for them.
    words = r"^DefaultCPUAllocator: can't allocate memory: you tried to allocate 268435456 bytes\. "
    with pytest.raises(
        torch.OutOfMemoryError, match=words + r".*asked for 256.*budget.*Largest holders"
    ):
        torch.empty(64 * MIB)
    assert kept.sum().item() == MIB
    assert umem.stats().ooms >= 1
    torch.ones(MIB)  # and it continues


def test_a_refusal_that_the_program_catches_is_logged_once(
    capfd: pytest.CaptureFixture[str],
) -> None:
    umem.enable(budget="16MiB", host_budget="16MiB", device="soft")
    for _ in range(3):  # as a search for a batch size
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(64 * MIB)
    said = capfd.readouterr().err
    assert said.count("umem: warning: ") == 1
    assert "256.0 MiB was refused with a budget of 16.0 MiB and a host budget of 16.0 MiB" in said


def test_storage_resize_clone_and_save() -> None:
    umem.enable(budget="8MiB", device="soft")
    tensors = [torch.full((MIB,), float(i)) for i in range(8)]
    tensors[0].resize_(2 * MIB)
    assert tensors[0][:MIB].eq(0).all()
    file = io.BytesIO()
    torch.save(tensors, file)
    file.seek(0)
    for i, loaded in enumerate(torch.load(file)):
        assert loaded[:MIB].eq(float(i)).all()
    storage = tensors[3].untyped_storage().clone()
    assert storage.nbytes() == 4 * MIB


def test_threads_allocate_and_free_each_others_memory() -> None:
    umem.enable(budget="32MiB", device="soft")
    boxes: list[list[torch.Tensor]] = [[] for _ in range(4)]

    def work(box: list[torch.Tensor], number: int) -> None:
        for i in range(20):
            box.append(torch.full((MIB // 4,), float(number * 100 + i)))

    threads = [threading.Thread(target=work, args=(box, i)) for i, box in enumerate(boxes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, box in enumerate(boxes):
        assert [t[-1].item() for t in box] == [float(number * 100 + i) for i in range(20)]
    live = umem.stats().live_bytes
    boxes.clear()
    assert umem.stats().live_bytes < live


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_a_device_of_its_own() -> None:
    umem.enable(budget="8MiB", device="soft")
    tensors = [torch.full((MIB,), float(i)) for i in range(6)]
    child = os.fork()
    if child == 0:
        own = torch.full((MIB,), 7.0)
        for tensor in tensors[:3]:
            tensor.fill_(9.0)  # the parent must not see it
        tensors[:3] = [torch.full((MIB,), float(i)) for i in range(3)]
        good = core.owns(own.data_ptr()) and all(
            t.eq(float(i)).all() for i, t in enumerate(tensors)
        )
        os._exit(0 if good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert all(t.eq(float(i)).all() for i, t in enumerate(tensors))


def test_profiler_sees_the_memory() -> None:
    umem.enable(budget="64MiB", device="soft", observer="off")
    with torch.profiler.profile(profile_memory=True) as profile:
        torch.empty(MIB)
    total = sum(max(0, event.cpu_memory_usage) for event in profile.events())
    assert total >= 4 * MIB


def test_attach_twice_changes_the_observer_and_detach_twice_does_nothing() -> None:
    umem.enable(budget="64MiB", device="soft", observer="off")
    ext = cpu.extension()
    assert ext.allocator_installed()
    assert not ext.observing()
    cpu.attach(observer="native")
    assert ext.allocator_installed()
    assert ext.observing()
    cpu.detach()
    cpu.detach()
    assert not ext.allocator_installed()
    assert not ext.observing()


@pytest.mark.parametrize("nbytes", [256, 4 * MIB])
def test_bench_measures_the_present_allocator(nbytes: int) -> None:
    umem.enable(budget="64MiB", device="soft", observer="off")
    allocs = umem.stats().allocs
    assert cpu.extension().bench_cpu_alloc(nbytes, 1000) > 0
    assert umem.stats().allocs >= allocs + 1000
    with pytest.raises(ValueError, match="at least 1"):
        cpu.extension().bench_cpu_alloc(nbytes, 0)
