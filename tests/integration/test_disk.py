"""Programs whose evicted memory is on a disk: the same bits, in the budget's memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from support import control_group, forkserver  # noqa: E402

import umem  # noqa: E402
from umem.base import current_device  # noqa: E402
from umem.base.native import core  # noqa: E402
from umem.errors import ConfigError  # noqa: E402

# 24 MiB of weights, three times that for training, and activations.
TRAIN = """
import hashlib, json, os, sys
import torch, umem
torch.set_num_threads(1)
torch.manual_seed(0)
def memory():
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
budget, disk, policy, *group = sys.argv[1:]
if budget != "plain":
    umem.enable(budget=budget, disk=disk, policy=policy, device="soft")
if group:
    open(group[0] + "/cgroup.procs", "w").write(str(os.getpid()))
before = memory()
net = torch.nn.Sequential(
    *[torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU()) for _ in range(24)]
)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
most = 0
for _ in range(8):
    net(torch.randn(512, 512)).square().mean().backward()
    most = max(most, memory() - before)
    optimizer.step()
    optimizer.zero_grad()
    most = max(most, memory() - before)
digest = hashlib.sha256()
for parameter in net.parameters():
    digest.update(parameter.detach().numpy().tobytes())
found = {"digest": digest.hexdigest(), "memory": most}
if budget != "plain":
    stats = umem.stats()
    for name in "faults disk_bytes_in disk_bytes_out plan_hits hook_errors peak_live_bytes".split():
        found[name] = getattr(stats, name)
print(json.dumps(found))
"""
BUDGET = 48 << 20


def train(*words: str) -> dict[str, Any]:
    done = forkserver.run(["-c", TRAIN, *words])
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return train("plain", "", "")


@pytest.mark.parametrize("policy", ["auto", "lru"])
def test_training_ends_with_the_same_bits_in_the_memory_of_the_budget(
    policy: str, plain: dict[str, Any], tmp_path: Path
) -> None:
    found = train(str(BUDGET), str(tmp_path), policy)
    assert found["digest"] == plain["digest"]
    assert found["peak_live_bytes"] > 2 * BUDGET
    assert found["disk_bytes_out"] > found["peak_live_bytes"]
    assert found["disk_bytes_in"] > 0
    assert found["hook_errors"] == 0
    assert (found["plan_hits"] > 0) == (policy == "auto")
    # Both have the same memory beside the tensors, such as scratch memory of kernels.
    saved = plain["memory"] - found["memory"]
    assert saved > 0.8 * (found["peak_live_bytes"] - BUDGET)
    assert not [*tmp_path.iterdir()]


def test_the_device_has_the_rates_of_a_disk(tmp_path: Path) -> None:
    program = """
import sys, torch, umem
from umem.base import current_device
umem.enable(budget="32MiB", disk=sys.argv[1], device="soft")
assumed = current_device.profile()
assert (assumed.name, assumed.bytes_per_us_in) == ("cpu-disk", 1500.0)
tensors = [torch.full((1 << 20,), float(i)) for i in range(48)]  # 192 MiB
for tensor in tensors:
    assert float(tensor[0]) < 48
measured = current_device.profile()
assert measured.name == "cpu-disk"
assert measured.bytes_per_us_in != 1500.0 != measured.bytes_per_us_out
assert "cpu-disk" in umem.summary()
"""
    done = forkserver.run(["-c", program, str(tmp_path)])
    assert done.returncode == 0, done.stderr


def test_a_limit_of_writes_is_one_of_the_rate(tmp_path: Path) -> None:
    with umem.enable(budget="64MiB", disk=tmp_path, device="soft", disk_writes="864GB/day"):
        real = current_device.profile()
        limited = current_device.for_plans(real)
    assert (real.bytes_per_us_in, real.bytes_per_us_out) == (1500.0, 1500.0)
    assert (limited.bytes_per_us_in, limited.bytes_per_us_out) == (1500.0, 10.0)


def test_tensors_sleep_on_the_disk(tmp_path: Path) -> None:
    program = """
import sys, torch, umem
def memory():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) >> 10
before = memory()
umem.enable(budget="160MiB", disk=sys.argv[1], device="soft")
tensors = [torch.full((1 << 20,), float(i)) for i in range(32)]  # 128 MiB
assert memory() - before > 120
for _ in range(2):
    with umem.sleep() as asleep:
        assert asleep.bytes >= 128 << 20
        assert memory() - before < 24, memory() - before
    assert all(bool(t.eq(float(i)).all()) for i, t in enumerate(tensors))
"""
    done = forkserver.run(["-c", program, str(tmp_path)])
    assert done.returncode == 0, done.stderr


def test_workers_read_tensors_that_are_on_the_disk(tmp_path: Path) -> None:
    program = """
import sys, torch, umem
from torch.utils.data import DataLoader
umem.enable(budget="32MiB", disk=sys.argv[1], device="soft")
torch.set_num_threads(1)
data = [torch.full((1 << 20,), float(i)) for i in range(20)]  # 80 MiB
for epoch in range(3):
    for i, batch in enumerate(DataLoader(data, num_workers=2)):
        assert bool(batch.eq(float(i + 100 * epoch)).all()), (epoch, i)
    for tensor in data:
        tensor.add_(100)
print(umem.stats().disk_bytes_in > 0)
"""
    done = forkserver.run(["-c", program, str(tmp_path)])
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_a_limit_is_an_error_at_the_allocation_that_exceeds_it(tmp_path: Path) -> None:
    program = """
import torch, umem
tensors = []
try:
    while True:
        tensors.append(torch.full((1 << 20,), float(len(tensors))))
except torch.OutOfMemoryError as error:
    assert "the limit of its file is reached" in str(error) and "cuMem" not in str(error), error
    tensors.pop()  # room for the results of the comparisons
print(50 <= 4 * len(tensors) <= 64, all(bool(t.eq(i).all()) for i, t in enumerate(tensors)))
"""
    environ = os.environ | {
        "UMEM": "1", "UMEM_DEVICE": "soft", "UMEM_BUDGET": "24MiB",
        "UMEM_DISK": f"{tmp_path}:64MiB", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    done = forkserver.run(["-c", program], environ, fresh=True)
    assert (done.returncode, done.stdout) == (0, "True True\n"), done.stderr


@pytest.mark.nightly
def test_a_full_disk_is_an_error_at_the_allocation(tmp_path: Path) -> None:
    """A file system of 300 MiB, which needs root."""
    image, folder = tmp_path / "image", tmp_path / "mounted"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(300 << 20)
    for words in (
        ["mkfs.ext4", "-q", str(image)],
        ["mount", "-o", "loop", str(image), str(folder)],
    ):
        try:
            subprocess.run(words, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"{words[0]} cannot be used here: {error}")
    program = """
import sys, torch, umem
umem.enable(budget="24MiB", disk=sys.argv[1], device="soft")
tensors = []
try:
    while True:
        tensors.append(torch.full((1 << 20,), float(len(tensors))))
except torch.OutOfMemoryError as error:
    assert f"the disk of '{sys.argv[1]}' takes no more" in str(error), error
assert 200 < 4 * len(tensors) < 300
tensors.pop()  # room for the results of the comparisons
assert all(bool(t.eq(float(i)).all()) for i, t in enumerate(tensors))
del tensors[::2]
more = [torch.full((1 << 20,), 7.0) for _ in range(len(tensors) - 4)]
assert all(bool(t.eq(7).all()) for t in more)
assert all(bool(t.eq(2.0 * i + 1).all()) for i, t in enumerate(tensors))
"""
    try:
        done = forkserver.run(["-c", program, str(folder)])
    finally:
        subprocess.run(["umount", str(folder)], check=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("disk", "words"),
    [
        ("/dev/shm", "tmpfs"),
        ("/no/such/folder", "No such file or directory"),
        ("/tmp:8parsecs", "UMEM_DISK"),
    ],
)
def test_a_bad_folder_is_an_error_at_the_start(disk: str, words: str) -> None:
    program = (
        "import umem\ntry: umem.enable(budget='64MiB', device='soft')\n"
        "except umem.ConfigError as error: print(error)"
    )
    done = forkserver.run(["-c", program], os.environ | {"UMEM_DISK": disk})
    assert done.returncode == 0, done.stderr
    assert words in done.stdout


def test_training_lives_in_a_control_group_that_plain_torch_exceeds(
    plain: dict[str, Any], tmp_path: Path
) -> None:
    limit = 160 << 20
    with control_group.limited(limit) as group:
        # No fork: a forked child's copies of its parent's pages would count.
        done = subprocess.run(
            [sys.executable, "-c", TRAIN, str(BUDGET), str(tmp_path), "auto", str(group)],
            capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["digest"] == plain["digest"]
    # Plain torch has the same memory beside its tensors.
    assert found["memory"] - BUDGET + found["peak_live_bytes"] > limit


def test_files_of_the_program_that_take_closed_descriptors_are_left_alone(tmp_path: Path) -> None:
    """Daemons close all descriptors that they find."""
    program = """
import os, sys, torch, umem
umem.enable(budget="48MiB", disk=sys.argv[1], device="soft", policy="lru")
kept = torch.ones(1 << 20)
os.closerange(3, 256)
files = [open(f"{sys.argv[1]}/{i}", "w+b") for i in range(8)]
for file in files:
    file.write(b"precious")
    file.flush()
tensors = [torch.full((1 << 20,), float(i)) for i in range(24)]
umem.sleep()
umem.wake()
print(all(os.fstat(file.fileno()).st_size == 8 for file in files))
print(all(bool(t.eq(float(i)).all()) for i, t in enumerate(tensors)))
"""
    done = forkserver.run(["-c", program, str(tmp_path)])
    assert done.stdout.split() == ["True", "True"], done.stderr


def test_the_folder_is_that_of_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with umem.enable(budget="64MiB", disk=".", device="soft") as session:
        monkeypatch.chdir("/")
        assert session.settings.disk is not None
        assert session.settings.disk.folder == tmp_path


def test_a_limit_of_writes_needs_a_disk() -> None:
    with pytest.raises(umem.ConfigError, match="no evicted memory is written to a disk"):
        umem.enable(budget="64MiB", device="soft", disk_writes="5TB/day")


def test_the_summary_names_what_was_written(tmp_path: Path) -> None:
    program = """
import sys, torch, umem
with umem.enable(budget="24MiB", disk=sys.argv[1], device="soft", summary=True):
    torch.set_num_threads(1)
    tensors = [torch.ones(1 << 20) for _ in range(12)]
    print(umem.summary())
    umem.step()
"""
    done = forkserver.run(["-c", program, str(tmp_path)])
    assert done.returncode == 0, done.stderr
    assert "on disk" in done.stdout
    assert "(virtual)" not in done.stdout
    assert "a step written to the disk" in done.stderr


@pytest.mark.nightly
def test_the_bench_of_a_training_beyond_memory_runs(tmp_path: Path) -> None:
    bench = Path(__file__).resolve().parents[2] / "bench" / "disk_beyond.py"
    command = [sys.executable, str(bench), "--smoke", "--disk", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert "The losses at both budgets are equal, to the last bit." in done.stdout


def test_a_budget_has_room_beside_the_pages_on_their_way(tmp_path: Path) -> None:
    with umem.enable(device="soft", budget="4GiB", disk=str(tmp_path)):
        budget = umem.stats().budget_bytes
        words = r"pages on their way to and from the disk take 128 MiB of it; allowed: at least"
        for least in ("64MiB", "130MiB"):
            with pytest.raises(ConfigError, match=words):
                umem.set_budget(least)
        assert umem.stats().budget_bytes == budget
        umem.set_budget("2GiB")
        assert umem.stats().budget_bytes == budget - (2 << 30)


def test_live_tensors_take_another_budget_of_the_same_disk(tmp_path: Path) -> None:
    with umem.enable(device="soft", budget="64MiB", disk=str(tmp_path)):
        kept = torch.arange(1 << 20)
    with umem.enable(device="soft", budget="128MiB", disk=str(tmp_path), disk_writes="1TB/day"):
        options = core.current_options()
        assert options.budget_bytes + options.staging_bytes == 128 << 20
        assert torch.equal(kept, torch.arange(1 << 20))
    del kept


def test_the_guard_is_not_taken_for_a_full_disk(tmp_path: Path) -> None:
    with (
        umem.enable(device="soft:64MiB", budget="64MiB", disk=str(tmp_path), guard=True),
        pytest.raises(RuntimeError, match="UMEM_GUARD"),
    ):
        torch.empty(64 << 20)
