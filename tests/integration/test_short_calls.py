"""A call whose buffer is partly evicted does as much as the same call on plain memory."""

from __future__ import annotations

import os
import select
import socket
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import umem  # noqa: E402

MIB = 1 << 20
BYTES = 6 * MIB


def mixed(managed: bool) -> memoryview:
    """Six MiB; under umem the first page is on the device and the rest on the host."""
    if managed:
        umem.enable(budget="8MiB", device="soft", policy="none", observer="off")
    tensor = torch.randint(
        0, 255, (BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(2)
    )
    if managed:
        umem.evict(tensor)
        assert umem.stats().host_bytes >= BYTES
        tensor[0].item()  # faults in the first page only
    return memoryview(tensor.numpy())


@pytest.mark.parametrize("managed", [False, True])
def test_one_write_to_a_file_is_whole(managed: bool, tmp_path: Path) -> None:
    view = mixed(managed)
    with (tmp_path / "a").open("wb", buffering=0) as file:
        written = file.write(view)  # on plain memory a file takes all of it
    assert written == BYTES
    assert (tmp_path / "a").read_bytes() == view.tobytes()


@pytest.mark.parametrize("managed", [False, True])
def test_one_read_of_a_file_is_whole(managed: bool, tmp_path: Path) -> None:
    view = mixed(managed)
    content = os.urandom(BYTES)
    (tmp_path / "a").write_bytes(content)
    with (tmp_path / "a").open("rb", buffering=0) as file:
        count = file.readinto(view)
    assert count == BYTES
    assert view.tobytes() == content


@pytest.mark.parametrize("managed", [False, True])
@pytest.mark.parametrize("kind", [socket.SOCK_DGRAM, socket.SOCK_SEQPACKET])
def test_a_datagram_is_received_once_and_whole(managed: bool, kind: int) -> None:
    view = mixed(managed)
    left, right = socket.socketpair(socket.AF_UNIX, kind)
    with left, right:
        right.settimeout(5)
        message = os.urandom(50_000)
        left.send(message)
        at = 2 * MIB - 20_000  # begins on the device, ends on the host
        assert right.recv_into(view[at : at + 60_000]) == len(message)
        assert view[at : at + len(message)].tobytes() == message
        assert select.select([right], [], [], 0)[0] == []


@pytest.mark.parametrize("managed", [False, True])
def test_wait_for_all(managed: bool) -> None:
    view = mixed(managed)
    left, right = socket.socketpair()
    with left, right:
        right.settimeout(5)
        message = os.urandom(100_000)
        left.sendall(message)
        at = 2 * MIB - 50_000
        assert right.recv_into(view[at : at + 100_000], 100_000, socket.MSG_WAITALL) == 100_000
        assert view[at : at + 100_000].tobytes() == message
