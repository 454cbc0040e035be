"""DLPack capsules that say plain CUDA memory, where the exporter would say managed.

Managed memory is valid on the device like any other, but torch refuses its type in DLPack (13).
Ownership, shape, and the order of streams stay the exporter's: only the device in the capsule is
changed, before anybody consumed it.
"""

from __future__ import annotations

import ctypes
from typing import Any

CPU, CUDA, MANAGED = 1, 2, 13
# Where the device stands in DLManagedTensor and DLManagedTensorVersioned (dlpack.h): after the
# pointer to the data; before that one the latter has version, context, deleter and flags.
_DEVICE_AT = {b"dltensor": 8, b"dltensor_versioned": 40}

_name = ctypes.pythonapi.PyCapsule_GetName
_name.restype, _name.argtypes = ctypes.c_char_p, [ctypes.py_object]
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def place_on(capsule: object, kind: int, device: int) -> object:
    """The same capsule, which says from now on that its memory is on that device.

    Raises:
        BufferError: a capsule that is no DLPack's, or that was consumed.
    """
    name = _name(capsule)
    if name not in _DEVICE_AT:
        raise BufferError(f"a capsule named {name!r} is no unused DLPack capsule")
    place = (ctypes.c_int32 * 2).from_address(_pointer(capsule, name) + _DEVICE_AT[name])
    place[0], place[1] = kind, device
    return capsule


def check_request(place: tuple[int, int], dl_device: object, copy: bool | None) -> None:
    """BufferError where a consumer wants another device than `place`, or a copy."""
    if copy:
        raise BufferError("umem exports its memory and no copy of it: copy=False or None")
    if dl_device is not None and dl_device != place:
        raise BufferError(f"the memory is on DLPack device {place}, and {dl_device} was asked for")


class Export:
    """An array that says of its memory that it is plain CUDA memory."""

    def __init__(self, exporter: Any, device: int) -> None:
        self._exporter, self._place = exporter, (CUDA, device)

    def __dlpack_device__(self) -> tuple[int, int]:
        """The device's type, and its number."""
        return self._place

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """The exporter's capsule."""
        check_request(self._place, dl_device, copy)
        asked = {} if max_version is None else {"max_version": max_version}
        return place_on(self._exporter.__dlpack__(stream=stream, **asked), *self._place)


def export(array: Any) -> Export:
    """What `torch.from_dlpack` and others take as plain CUDA memory, without a copy.

    CuPy arrays and cuda.core buffers in umem's memory call themselves managed memory, which is
    true, and which torch refuses.

    Raises:
        TypeError: no DLPack exporter.
        BufferError: neither CUDA nor managed memory.
    """
    if not hasattr(array, "__dlpack_device__"):
        raise TypeError(f"a {type(array).__name__} has no __dlpack__ to export by")
    kind, device = array.__dlpack_device__()
    if kind not in (CUDA, MANAGED):
        raise BufferError(f"DLPack device type {int(kind)} is neither CUDA nor managed memory")
    if kind == MANAGED:  # of which the number says little
        device = _number(array, device)
    return Export(array, int(device))


def _number(array: Any, otherwise: int) -> int:
    if hasattr(array, "device_id"):  # cuda.core
        return int(array.device_id)
    return int(getattr(getattr(array, "device", None), "id", otherwise))  # CuPy
