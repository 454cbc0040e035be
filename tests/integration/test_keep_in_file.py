"""Weights whose home is the checkpoint: read when needed, never written until the program does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")

from support import forkserver

from umem.errors import ConfigError

PREAMBLE = """
import hashlib, os, sys
from pathlib import Path
import torch, umem
torch.set_num_threads(1)
torch.manual_seed(0)
MIB = 1 << 20
folder = Path(sys.argv[1])
def net():
    sizes = [768] * 9 + [1367, 771, 768]  # of 2.25 MiB, and of 4 MiB and some bytes
    layers = [torch.nn.Linear(a, b, bias=False) for a, b in zip(sizes, sizes[1:])]
    return torch.nn.Sequential(*layers).requires_grad_(False)
def enable(budget="16MiB"):
    umem.enable(budget=budget, disk=folder, device="soft")
def loaded(path):
    with torch.device("meta"):
        made = net()
    umem.load_checkpoint(made, path, keep_in_file=True)
    return made
def digest(module):
    sums = [hashlib.sha256(v.detach().numpy().tobytes()) for v in module.state_dict().values()]
    return hashlib.sha256(b"".join(s.digest() for s in sums)).hexdigest()
path = folder / "model.pt"
plain = net()
torch.save(plain.state_dict(), path)
wanted, before = digest(plain), path.read_bytes()
batch = torch.randn(4, 768)
"""


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., tuple[str, str]]:
    def program(code: str, expected: int = 0) -> tuple[str, str]:
        done = forkserver.run(["-c", PREAMBLE + code, str(tmp_path)])
        assert done.returncode == expected, done.stdout + done.stderr
        return done.stdout, done.stderr

    return program


Run = Callable[..., tuple[str, str]]


def test_inference_reads_what_the_budget_lacks_and_writes_nothing(run: Run) -> None:
    run("""
def net():
    layers = [torch.nn.Linear(1024, 1024, bias=False) for _ in range(16)]  # 64 MiB
    return torch.nn.Sequential(*layers).requires_grad_(False)
module, batch = net(), torch.randn(4, 1024)
torch.save(module.state_dict(), path)
wanted, before = digest(module), path.read_bytes()
output = module(batch)
enable("24MiB")
module = loaded(path)
assert umem.stats().disk_bytes_in == 0
passes = []
with torch.inference_mode():
    for _ in range(8):
        assert torch.equal(module(batch), output)
        passes.append(umem.stats().disk_bytes_in)
assert passes[7] - passes[3] <= 4 * 60 * MIB, passes  # the plan keeps what the budget holds
assert umem.stats().disk_bytes_out == 0
assert digest(module) == wanted
assert path.read_bytes() == before
""")


@pytest.mark.parametrize("at", [0, 1, 511, 2048, 4095])
def test_a_tensor_may_begin_anywhere_in_the_file(run: Run, at: int) -> None:
    """The first weight begins at that offset in a block of the file, and the others follow."""
    run(f"""
import json
state = plain.state_dict()
rows, end = {{}}, 0
for name, value in state.items():
    shape, begin = list(value.shape), end
    end += value.nbytes
    rows[name] = {{"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}}
header = json.dumps(rows).encode()
header += b" " * ((-(8 + len(header)) + {at}) % 4096)
with open(folder / "model.safetensors", "wb") as file:
    file.write(len(header).to_bytes(8, "little") + header)
    for value in state.values():
        file.write(value.numpy().tobytes())
enable()
module = loaded(folder / "model.safetensors")
for _ in range(2):
    assert digest(module) == wanted
    for layer in module:
        umem.evict(layer.weight)
assert umem.stats().disk_bytes_out == 0
""")


def test_what_is_written_belongs_to_the_program_and_not_to_the_file(run: Run) -> None:
    run("""
enable()
module = loaded(path)
for _ in range(3):
    for a, b in zip(module.parameters(), plain.parameters()):
        a.add_(1)
        b.add_(1)
    assert digest(module) == digest(plain)
with torch.no_grad():
    module[3].weight[5, 7] = plain[3].weight[5, 7] = 3.0  # one of its two pages
for a, b in zip(module.parameters(), plain.parameters()):
    assert torch.equal(a, b)
assert umem.stats().disk_bytes_out > 0
assert path.read_bytes() == before
""")


def test_training_from_the_file_has_the_bits_of_plain(run: Run) -> None:
    run("""
def train(module):
    optimizer = torch.optim.SGD(module.requires_grad_().parameters(), lr=0.1, momentum=0.9)
    for _ in range(4):
        module(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return digest(module)
wanted = train(plain)
enable("24MiB")
assert train(loaded(path)) == wanted
assert path.read_bytes() == before
""")


def test_memory_that_was_in_use_takes_its_values_from_the_file(run: Run) -> None:
    run("""
enable()
module = net()  # some of it on the disk, some on its way there
assert digest(module) != wanted
for _ in range(3):
    umem.load_checkpoint(module, path, keep_in_file=True)
    assert digest(module) == wanted
    for parameter in module.parameters():
        parameter.zero_()
""")


def test_a_load_between_forward_and_backward_is_the_error_of_torch(run: Run) -> None:
    out, err = run("""
enable()
module = torch.nn.Module()
module.w = torch.nn.Parameter(torch.ones(3 << 19))
torch.save(module.state_dict(), path)
loss = (module.w * module.w).sum()
umem.load_checkpoint(module, path, keep_in_file=True)
try:
    loss.backward()
except RuntimeError as error:
    print("modified by an inplace operation" in str(error))
""")
    assert out == "True\n", err


def test_the_file_is_let_go_with_the_module(run: Run) -> None:
    """Then the program may write it, and memory that is used again has nothing to do with it."""
    for policy in ("auto", "lru", "none"):
        run(f"""
umem.enable(budget="24MiB", disk=folder, device="soft", policy={policy!r})
del plain
before = len(os.listdir("/proc/self/fd"))
for number in range(3):
    module = loaded(path)
    if number != 1:
        assert digest(module) == wanted
    if number == 2:
        for parameter in module.parameters():
            parameter.zero_()
        del parameter
    assert len(os.listdir("/proc/self/fd")) == before + (number < 2)
    del module
    assert len(os.listdir("/proc/self/fd")) == before
path.write_bytes(b"")
again = net()
for value in again.parameters():
    value.fill_(2.5)
large = torch.full((12 << 20,), 3.5)  # more than the budget
assert all(bool(value.eq(2.5).all()) for value in again.parameters())
assert bool(large.eq(3.5).all())
""")


def test_what_cannot_stay_in_the_file_is_read(run: Run) -> None:
    run("""
other = net()
before = torch.zeros(3)
torch.save({"w": other[0].weight, "early": torch.ones(3), "early_large": other[1].weight}, path)
early_large = torch.zeros(768, 768)
enable()
module = torch.nn.Module()
module.w = torch.nn.Parameter(torch.zeros(768, 768), requires_grad=False)
module.register_buffer("early", before)
module.register_buffer("early_large", early_large)
with umem.pin(module.w):
    umem.load_checkpoint(module, path, keep_in_file=True)
assert torch.equal(module.w, other[0].weight)
assert torch.equal(module.early, torch.ones(3))
assert torch.equal(module.early_large, other[1].weight)
""")


def test_discarded_memory_takes_the_files_values(run: Run) -> None:
    run("""
enable()
module = loaded(path)
for parameter in module.parameters():
    umem.discard(parameter)
umem.load_checkpoint(module, path, keep_in_file=True)
assert umem.where(module[0].weight).evicted_bytes == module[0].weight.nbytes
assert digest(module) == wanted
""")


def test_threads_that_read_the_same_page_leave_it_in_the_file(run: Run) -> None:
    run("""
torch.set_num_threads(2)
umem.enable(budget="24MiB", disk=folder, device="soft", policy="none")  # all by page faults
module = loaded(path)
for _ in range(8):
    sums = [float(layer.weight.sum()) for layer in module]
assert sums == [float(layer.weight.sum()) for layer in plain]
assert umem.stats().faults > 100
assert umem.stats().disk_bytes_out <= 80 * MIB  # of 400: the page of the sums, each time
""")


def test_a_system_call_on_weights_of_a_changed_file_fails(run: Run) -> None:
    out, err = run("""
enable()
module = loaded(path)
path.write_bytes(bytes(len(before)))
with open(folder / "copy", "wb", buffering=0) as file:
    try:
        file.write(module[0].weight.numpy())
    except OSError as error:
        print("refused", error.errno)
""")
    assert out.startswith("refused ")
    assert "it was changed after it was loaded" in err


def test_a_forked_child_reads_and_writes_its_own(run: Run) -> None:
    run("""
enable()
module = loaded(path)
def in_a_child(act):
    child = os.fork()
    if child == 0:
        os._exit(0 if act() else 1)
    return os.waitpid(child, 0)[1] == 0
def writes():
    for parameter in module.parameters():
        parameter.zero_()
    return all(float(p.abs().max()) == 0 for p in module.parameters())
assert in_a_child(lambda: digest(module) == wanted)
assert in_a_child(writes)
assert digest(module) == wanted
""")


@pytest.mark.parametrize(
    "harm", ["os.truncate(path, 8 * MIB)", "path.write_bytes(bytes(len(before)))"]
)
def test_a_file_that_is_changed_ends_the_program_with_its_name(run: Run, harm: str) -> None:
    _, err = run(
        f"""
enable()
module = loaded(path)
{harm}
digest(module)
print("went on")
""",
        expected=-11,
    )
    assert "model.pt' at offset " in err
    assert "it was changed after it was loaded" in err


def test_a_file_that_is_replaced_is_still_read(run: Run) -> None:
    run("""
enable()
module = loaded(path)
other = folder / "other"
other.write_bytes(b"of another length")
other.replace(path)  # as editors and careful savers do
assert digest(module) == wanted
""")


def test_it_needs_a_disk(tmp_path: Path) -> None:
    import torch

    import umem

    module = torch.nn.Linear(1024, 1024)
    torch.save(module.state_dict(), tmp_path / "model.pt")
    with pytest.raises(ConfigError, match="needs the option disk"):
        umem.load_checkpoint(module, tmp_path / "model.pt", keep_in_file=True)
