"""Reader of torch's memory snapshots: `torch.cuda.memory._snapshot()`, pickled.

A snapshot has allocations and frees but no ops: each allocation becomes an op that writes it.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from ..errors import TraceError, kind_of, plain, shown
from .ids import BlockId, block_ids
from .schema import MAX_BYTES, Alloc, Event, Free, Header, Op

PICKLE = b"\x80"  # first byte of a pickle of protocol 2 and later
# Opcodes that hash contents of the file, or allocate before they read.
_REFUSED = pickle.EMPTY_SET + pickle.ADDITEMS + pickle.FROZENSET + pickle.DICT + pickle.BYTEARRAY8


class _NoCode(pickle._Unpickler):
    """Unpickler of containers, numbers and strings only: any other class could run code.

    It uses Python's unpickler, which is several times slower, because the one in C allocates a
    table as large as the largest object number in the file: a few bytes would ask for 64 GiB. That
    holds for byte arrays too, and a tuple nested deeply enough ends the process when it is hashed.
    """

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}, and a snapshot has only data")

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.stack[-1][_checked_key(key)] = value

    def _set_items(self) -> None:
        items = self.pop_mark()
        for key, value in zip(items[::2], items[1::2], strict=True):
            self.stack[-1][_checked_key(key)] = value

    def _refuse(self) -> NoReturn:
        raise pickle.UnpicklingError("it has a set or a byte array, and a snapshot has none")

    dispatch: ClassVar[dict[int, Any]] = {
        **pickle._Unpickler.dispatch,
        **dict.fromkeys(_REFUSED, _refuse),
        pickle.SETITEM[0]: _set_item,
        pickle.SETITEMS[0]: _set_items,
    }


def _checked_key(key: object) -> object:
    if type(key) is not str and type(key) is not int:
        raise pickle.UnpicklingError(f"{kind_of(key)} is a key, and a snapshot has names")
    return key


def read(path: str | os.PathLike[str], gpu: int | None = None) -> tuple[Header, Iterator[Event]]:
    """Read the snapshot as a trace of one step without an end; it is held in memory as a whole.

    Args:
        path: the pickle.
        gpu: the device's index; None: the only one with a history.

    Raises:
        TraceError: not a snapshot, no history, or a history of several devices and no `gpu`.
    """
    content = _load(path)
    try:
        traces = list(content["device_traces"])
        index = _device(path, traces, gpu)
        present = _blocks_present(content["segments"], index)
        header = Header(f"cuda:{index}", "torch memory snapshot", plain(Path(path).name))
        events = list(_events(traces[index], present))
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise TraceError(f"{path}: not as torch.cuda.memory._snapshot writes it: {what}") from None
    return header, iter(events)


def _load(path: str | os.PathLike[str]) -> Any:
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    try:
        # From memory, so that a length in a damaged file is not allocated before it is read.
        return _NoCode(io.BytesIO(data)).load()  # find_class allows no classes
    except Exception as error:  # noqa: BLE001  # unpickling damaged bytes can raise nearly any
        reason = plain(str(error)) or type(error).__name__
        raise TraceError(f"{path}: not a pickle of a memory snapshot: {reason}") from None


def _device(path: str | os.PathLike[str], traces: list[Any], gpu: int | None) -> int:
    used = [index for index, trace in enumerate(traces) if trace]
    allowed = ", ".join(map(str, used))
    if not used:
        raise TraceError(
            f"{path}: the snapshot has no history; call torch.cuda.memory._record_memory_history()"
            " before the program's work"
        )
    if gpu is None and len(used) > 1:
        raise TraceError(f"{path}: devices {allowed} have a history; choose one with --gpu")
    if gpu is not None and gpu not in used:
        raise TraceError(f"{path}: device {gpu} has no history; allowed: {allowed}")
    return used[0] if gpu is None else gpu


def _blocks_present(segments: list[dict[str, Any]], index: int) -> dict[int, int]:
    """Return bytes by address of the blocks that are allocated when the snapshot is taken."""
    present: dict[int, int] = {}
    for segment in segments:
        if segment.get("device", 0) != index:
            continue
        address = _whole(segment["address"])
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                present[_whole(block.get("address", address))] = _size(block)
            address += _whole(block["size"])
    return present


def _events(trace: list[dict[str, Any]], present: dict[int, int]) -> Iterator[Event]:
    ids = block_ids()
    live: dict[int, BlockId] = {}
    for address, size in _before(trace, present).items():
        live[address] = next(ids)
        yield Alloc(live[address], size)
    for entry in trace:
        action = entry["action"]
        address = _whole(entry.get("addr", 0))
        if action == "alloc":
            if address in live:  # its free is missing in the history
                yield Free(live.pop(address))
            block = live[address] = next(ids)
            yield Alloc(block, _size(entry))
            yield Op(_frame_name(entry.get("frames") or []), (), (block,))
        elif action == "free_completed" and address in live:
            yield Free(live.pop(address))


def _before(trace: list[dict[str, Any]], present: dict[int, int]) -> dict[int, int]:
    """Return bytes by address of the blocks that were allocated before the history starts."""
    before: dict[int, int] = {}
    seen: set[int] = set()
    for entry in trace:
        if entry["action"] in ("alloc", "free_completed"):
            address = _whole(entry["addr"])
            if entry["action"] == "free_completed" and address not in seen:
                before[address] = _size(entry)
            seen.add(address)
    return before | {address: size for address, size in present.items() if address not in seen}


def _frame_name(frames: list[dict[str, Any]]) -> str:
    """Return the innermost Python frame's name, or that of the first native frame."""
    python = (frame for frame in frames if _word(frame, "filename").endswith(".py"))
    frame = next(python, frames[0] if frames else None)
    if frame is None:
        return "alloc"
    name = f"{_word(frame, 'name')} {Path(_word(frame, 'filename')).name}:{_word(frame, 'line')}"
    return name.encode(errors="replace").decode()


def _word(frame: dict[str, Any], key: str) -> str:
    """Return a name or a number of a frame; other values could have a text of any length."""
    value = frame.get(key)
    if type(value) is str:
        return value
    return shown(value) if type(value) is int else "?"


def _size(block: dict[str, Any]) -> int:
    return _whole(block.get("requested_size", block["size"]), MAX_BYTES)


def _whole(value: Any, most: int = (1 << 64) - 1) -> int:
    if type(value) is not int or not 0 <= value <= most:
        what = shown(value) if type(value) in (int, str) else kind_of(value)
        raise TypeError(f"{what} is not an address or a size")
    return value
