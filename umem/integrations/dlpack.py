"""DLPack capsules that declare plain CUDA memory where the exporter declares managed memory.

Managed memory is valid on the device like any other, but torch refuses its DLPack device type (13).
The exporter still defines ownership, shape and stream order: only the device in the capsule is
changed, before a consumer takes it.
"""

from __future__ import annotations

import ctypes
from typing import Any

from ..errors import kind_of

CPU, CUDA, MANAGED = 1, 2, 13
# Byte offsets of the device in DLManagedTensor and DLManagedTensorVersioned (dlpack.h): it follows
# the data pointer, before which the latter has version, context, deleter and flags.
_DEVICE_AT = {b"dltensor": 8, b"dltensor_versioned": 40}

_name = ctypes.pythonapi.PyCapsule_GetName
_name.restype, _name.argtypes = ctypes.c_char_p, [ctypes.py_object]
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def place_on(capsule: object, kind: int, device: int) -> object:
    """Change the device that a capsule declares, in place, and return the capsule.

    Raises:
        BufferError: not a DLPack capsule, or one that was consumed.
    """
    name = _name(capsule)
    if name not in _DEVICE_AT:
        raise BufferError(f"a capsule named {name!r} is not an unused DLPack capsule")
    place = (ctypes.c_int32 * 2).from_address(_pointer(capsule, name) + _DEVICE_AT[name])
    place[0], place[1] = kind, device
    return capsule


def check_request(place: tuple[int, int], dl_device: object, copy: bool | None) -> None:
    """Raise BufferError where a consumer requests a device other than `place`, or a copy."""
    if copy:
        raise BufferError("umem exports its memory without a copy; allowed: copy=False or None")
    if dl_device is not None and dl_device != place:
        raise BufferError(f"the memory is on DLPack device {place}, not on {dl_device}")


class Export:
    """An exporter that declares the memory of an array as plain CUDA memory."""

    def __init__(self, exporter: Any, device: int) -> None:
        self._exporter, self._place = exporter, (CUDA, device)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the device type and the device number."""
        return self._place

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """Return the exporter's capsule, declared as plain CUDA memory."""
        check_request(self._place, dl_device, copy)
        asked = {} if max_version is None else {"max_version": max_version}
        return place_on(self._exporter.__dlpack__(stream=stream, **asked), *self._place)


def export(array: Any) -> Export:
    """Wrap an array so that `torch.from_dlpack` and others take it as plain CUDA memory.

    CuPy arrays and cuda.core buffers in umem's memory declare managed memory, which is correct but
    refused by torch. Nothing is copied.

    Raises:
        TypeError: the array does not support DLPack.
        BufferError: its memory is neither CUDA nor managed memory.
    """
    if not hasattr(array, "__dlpack_device__"):
        raise TypeError(f"{kind_of(array)} does not support DLPack (no __dlpack_device__)")
    kind, device = array.__dlpack_device__()
    if kind not in (CUDA, MANAGED):
        raise BufferError(f"DLPack device type {int(kind)} is neither CUDA nor managed memory")
    if kind == MANAGED:  # whose number in DLPack says little about the device
        device = _number(array, device)
    return Export(array, int(device))


def _number(array: Any, otherwise: int) -> int:
    if hasattr(array, "device_id"):  # cuda.core
        return int(array.device_id)
    return int(getattr(getattr(array, "device", None), "id", otherwise))  # CuPy
