"""Capsules that are placed on another device, and exporters that call their memory managed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import umem
from umem.integrations import dlpack

NEW_NUMPY = np.lib.NumpyVersion(np.__version__) >= "2.1.0"


class Placed:
    """An array that claims to be elsewhere; its memory is really the CPU's."""

    def __init__(self, kind: int, device: int = 0, versioned: bool = False) -> None:
        self.array = np.arange(6, dtype=np.int16).reshape(2, 3)
        self.place = (kind, device)
        self.asked: dict[str, object] | None = None
        self.versioned = versioned

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.place

    def __dlpack__(self, stream: int | None = None, **asked: object) -> object:
        self.asked = {"stream": stream, **asked}
        version = {"max_version": (1, 0)} if self.versioned else {}
        return dlpack.place_on(self.array.__dlpack__(**version), *self.place)


class Consumer:
    """Hands a capsule to numpy as CPU memory."""

    def __init__(self, capsule: object) -> None:
        self.capsule = dlpack.place_on(capsule, dlpack.CPU, 0)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (dlpack.CPU, 0)

    def __dlpack__(self, **asked: object) -> object:
        return self.capsule


@pytest.mark.parametrize(
    "versioned",
    [False, pytest.param(True, marks=pytest.mark.skipif(not NEW_NUMPY, reason="numpy < 2.1"))],
)
def test_managed_becomes_plain_cuda_and_nothing_else_changes(versioned: bool) -> None:
    array = Placed(dlpack.MANAGED, 3, versioned)
    exported = umem.export(array)
    assert exported.__dlpack_device__() == (dlpack.CUDA, 3)
    capsule = exported.__dlpack__(stream=7, dl_device=(dlpack.CUDA, 3))
    assert array.asked == {"stream": 7}
    with pytest.raises((BufferError, RuntimeError), match=r"(?i)device"):
        np.from_dlpack(_Raw(capsule))  # numpy reads the device in the capsule
    there = np.from_dlpack(Consumer(exported.__dlpack__(stream=-1)))
    assert there.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert there.dtype == np.int16
    address = array.array.ctypes.data
    del array, exported
    assert there.ctypes.data == address
    assert there.sum() == 15  # it keeps the memory


class _Raw(Consumer):
    def __init__(self, capsule: object) -> None:
        self.capsule = capsule


def test_the_version_asked_for_reaches_the_exporter() -> None:
    array = Placed(dlpack.CUDA)
    umem.export(array).__dlpack__(max_version=(1, 1))
    assert array.asked == {"stream": None, "max_version": (1, 1)}


def test_numbers_of_managed_memory_come_from_the_array() -> None:
    array = Placed(dlpack.MANAGED, 0)
    array.device_id = 1  # type: ignore[attr-defined]
    assert umem.export(array).__dlpack_device__() == (dlpack.CUDA, 1)


@pytest.mark.parametrize(
    ("asked", "words"),
    [({"copy": True}, "without a copy"), ({"dl_device": (1, 0)}, r"not on \(1, 0\)")],
)
def test_copies_and_other_devices_are_refused(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(BufferError, match=words):
        umem.export(Placed(dlpack.MANAGED)).__dlpack__(**asked)


def test_what_is_no_gpu_memory_is_refused() -> None:
    with pytest.raises(BufferError, match="type 1 is neither CUDA"):
        umem.export(np.zeros(3))
    with pytest.raises(TypeError, match="a list does not support DLPack"):
        umem.export([1])


def test_a_consumed_capsule_is_refused() -> None:
    capsule = np.zeros(3).__dlpack__()
    np.from_dlpack(_Raw(capsule))
    with pytest.raises(BufferError, match="used_dltensor"):
        dlpack.place_on(capsule, dlpack.CUDA, 0)
