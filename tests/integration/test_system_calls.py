"""Evicted tensors through everything that hands their memory to the kernel."""

from __future__ import annotations

import copy
import ctypes
import io
import os
import pickle
import socket
import subprocess
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

import umem  # noqa: E402

MIB = 1 << 20


def evicted(mib: int = 24, budget: str = "8MiB") -> torch.Tensor:
    """A tensor of random floats, most or all of it on the host."""
    umem.enable(budget=budget, device="soft")
    tensor = torch.randn(mib * MIB // 4, generator=torch.Generator().manual_seed(5))
    torch.full((8 * MIB // 4,), 1.0)  # pushes it out
    umem.evict(tensor)
    return tensor


def expected(mib: int = 24) -> bytes:
    with_plain_torch = torch.randn(mib * MIB // 4, generator=torch.Generator().manual_seed(5))
    return with_plain_torch.numpy().tobytes()


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("where", ["path", "buffer"])
def test_save_and_load(tmp_path: Path, legacy: bool, where: str) -> None:
    want = expected()
    tensor = evicted()
    target = tmp_path / "tensor.pt" if where == "path" else io.BytesIO()
    torch.save({"t": tensor}, target, _use_new_zipfile_serialization=not legacy)
    del tensor
    if isinstance(target, io.BytesIO):
        target.seek(0)
    loaded = torch.load(target)["t"]
    assert loaded.numpy().tobytes() == want


def test_load_by_mmap_mixes_with_managed_tensors(tmp_path: Path) -> None:
    want = expected()
    torch.save(evicted(), tmp_path / "t.pt")
    mapped = torch.load(tmp_path / "t.pt", mmap=True)
    assert torch.equal(mapped + 0.0, mapped)
    assert mapped.numpy().tobytes() == want


def test_a_model_three_times_the_budget(tmp_path: Path) -> None:
    umem.enable(budget="8MiB", device="soft")
    torch.manual_seed(1)
    net = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(6)])
    torch.save(net.state_dict(), tmp_path / "net.pt")
    other = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(6)])
    other.load_state_dict(torch.load(tmp_path / "net.pt"))
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    assert umem.stats().peak_resident_bytes <= 8 * MIB


def test_numpy_files(tmp_path: Path) -> None:
    want = expected()
    tensor = evicted()
    tensor.numpy().tofile(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == want
    np.save(tmp_path / "b.npy", tensor.numpy())
    assert np.load(tmp_path / "b.npy").tobytes() == want
    back = evicted()
    back.zero_()
    umem.evict(back)
    with (tmp_path / "a").open("rb", buffering=0) as file:
        view = memoryview(back.numpy()).cast("B")
        while view:
            view = view[file.readinto(view) :]
    assert back.numpy().tobytes() == want


def test_buffered_files(tmp_path: Path) -> None:
    want = expected()
    tensor = evicted()
    with (tmp_path / "a").open("wb") as file:
        file.write(memoryview(tensor.numpy()).cast("B"))
    assert (tmp_path / "a").read_bytes() == want


def test_sockets() -> None:
    want = expected(4)
    tensor = evicted(4)
    back = torch.zeros_like(tensor)
    umem.evict(back)
    left, right = socket.socketpair()
    with left, right:
        sender = threading.Thread(target=left.sendall, args=(memoryview(tensor.numpy()).cast("B"),))
        sender.start()
        view = memoryview(back.numpy()).cast("B")
        while view:
            view = view[right.recv_into(view) :]
        sender.join()
    assert back.numpy().tobytes() == want


def test_pipes_of_raw_descriptors() -> None:
    tensor = evicted(4)
    reader, writer = os.pipe()
    try:
        written = os.write(writer, memoryview(tensor.numpy()).cast("B")[:4096])  # fits the pipe
        assert written == 4096
        assert os.read(reader, written) == expected(4)[:written]
    finally:
        os.close(reader)
        os.close(writer)


def test_pickle_deepcopy_and_shared_memory() -> None:
    want = expected()
    tensor = evicted()
    assert pickle.loads(pickle.dumps(tensor)).numpy().tobytes() == want
    assert copy.deepcopy(tensor).numpy().tobytes() == want
    umem.evict(tensor)
    assert tensor.share_memory_().numpy().tobytes() == want


def test_safetensors(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    want = expected()
    safetensors.save_file({"t": evicted()}, tmp_path / "t.safetensors")
    assert safetensors.load_file(tmp_path / "t.safetensors")["t"].numpy().tobytes() == want


@pytest.mark.parametrize("budget", ["128MiB", "24MiB"])
def test_what_is_resident_stays_where_it_is(tmp_path: Path, budget: str) -> None:
    umem.enable(budget=budget, device="soft")
    tensor = torch.ones(16 * MIB // 4)
    view = memoryview(tensor.numpy()).cast("B")
    path = tmp_path / "file"
    before = umem.stats()
    torch.save(tensor, tmp_path / "t.pt")
    torch.save(tensor, tmp_path / "t.pt", _use_new_zipfile_serialization=False)
    torch.save(tensor, io.BytesIO())
    tensor.numpy().tofile(path)
    path.write_bytes(view)
    with path.open("rb") as file:
        file.readinto(view)
    descriptor = os.open(path, os.O_RDWR)
    os.writev(descriptor, [view[:MIB], view[MIB:]])
    os.preadv(descriptor, [view[:MIB], view[MIB:]], 0)
    os.pwritev(descriptor, [view[:MIB], view[MIB:]], 0)
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.readv(descriptor, [view[:MIB], view[MIB:]])
    os.close(descriptor)
    left, right = socket.socketpair()
    reader = threading.Thread(
        target=lambda: [right.recv(MIB, socket.MSG_WAITALL) for _ in view[::MIB]]
    )
    reader.start()
    left.sendall(view)
    reader.join()
    left.close()
    right.close()
    after = umem.stats()
    assert tensor.eq(1).all()
    assert (after.faults, after.bytes_in, after.bytes_out) == (
        before.faults, before.bytes_in, before.bytes_out,
    )  # fmt: skip


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of libraries that read a file themselves."""
    folder = tmp_path_factory.mktemp("libraries")
    source = """#include <unistd.h>
        long fill(int file, void* to, unsigned long bytes) { return pread(file, to, bytes, 0); }"""
    beside = """#include <dlfcn.h>
        int finds(void) { return dlopen("$ORIGIN/libopened.so", RTLD_NOW) != 0; }"""
    for name, text in {"opened": source, "torchs": source, "finder": beside}.items():
        link(folder, name, text)
    link(folder, "needed", "")
    link(folder, "needing", "", "-L", str(folder), "-Wl,--no-as-needed", "-lneeded")
    (folder / "libneeded.so").unlink()
    return folder


def link(folder: Path, name: str, source: str, *more: str) -> None:
    place = str(folder / f"lib{name}.so")
    command = ["g++", "-x", "c", "-", "-shared", "-fPIC", "-o", place, *more]
    subprocess.run(command, input=source, text=True, check=True)


@pytest.mark.parametrize("loaded_by", ["ctypes", "torch"])
def test_a_library_that_is_loaded_later_reads_at_once(
    tmp_path: Path, readers: Path, loaded_by: str
) -> None:
    (tmp_path / "bytes").write_bytes(want := expected())
    tensor = evicted()
    if loaded_by == "ctypes":
        library = ctypes.CDLL(str(readers / "libopened.so"))
    else:
        torch.ops.load_library(readers / "libtorchs.so")
        library = ctypes.PyDLL(str(readers / "libtorchs.so"))
    with (tmp_path / "bytes").open("rb") as file:
        place, size = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_ulong(len(want))
        assert library.fill(file.fileno(), place, size) == len(want)
    assert tensor.numpy().tobytes() == want


def test_libraries_load_as_without_umem(readers: Path) -> None:
    evicted()
    with pytest.raises(OSError, match=r"libneeded\.so: cannot open shared object file"):
        ctypes.CDLL(str(readers / "libneeding.so"))
    assert ctypes.CDLL(str(readers / "libfinder.so")).finds() == 1
