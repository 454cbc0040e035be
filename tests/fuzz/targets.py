"""The readers of input from elsewhere, one function each: `target(data)` raises if a reader fails.

A reader refuses bad input with its documented error, in a message that controls no terminal, and
changes nothing then. A second way of reading has to find everything that it accepts.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import copy
import dataclasses
import functools
import io
import json
import os
import shutil
import socket
import struct
import tempfile
import threading
import unicodedata
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from umem.base import device_profiles
from umem.base.native import core
from umem.base.stats import Stats
from umem.base.units import GIB, PAGE_BYTES
from umem.cli import trace_info
from umem.config import settings
from umem.errors import (
    CheckpointError,
    ConfigError,
    OutOfMemoryError,
    PlanError,
    StateError,
    TraceError,
    UmemError,
)
from umem.monitor import server, top
from umem.offload.checkpoint.load import load_checkpoint
from umem.session import resolve
from umem.simulation import replay
from umem.trace import torch_snapshot
from umem.trace.convert import convert
from umem.trace.ids import BlockId
from umem.trace.info import examine
from umem.trace.reader import read
from umem.trace.schema import Alloc, Event, Free, Header, Op, Step
from umem.trace.step_builder import StepBuilder, read_step
from umem.trace.step_trace import StepTrace
from umem.trace.writer import Writer


@functools.cache
def folder() -> Path:
    """A directory of this process's own, removed at its end."""
    made = Path(tempfile.mkdtemp(prefix="umem-fuzz-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


def put(name: str, data: bytes) -> Path:
    path = folder() / name
    path.write_bytes(data)
    return path


def check_message(error: Exception) -> None:
    """Find control characters, which a terminal obeys, and half pairs, which none can show."""
    text = str(error)
    assert text
    assert not {unicodedata.category(c) for c in text} & {"Cc", "Cs"}, ascii(text)


def trace(data: bytes) -> None:
    """Read a trace file, all that is made from one, and replay its last step."""
    path = put("trace.jsonl", data)
    found = events_of(path)
    partial = events_of(path, partial=True)
    if found is None:
        for read_other in (examine, read_step):
            refused(TraceError, read_other, path)
        return
    whole = data.endswith(b"\n") or data.startswith(b"\x1f\x8b")
    assert not whole or partial == found
    header, events = found
    with Writer(folder() / "copy.jsonl", header) as writer:
        for event in events:
            writer.write(event)
    assert events_of(folder() / "copy.jsonl") == found
    text = trace_info.render(examine(path))
    assert not any(unicodedata.category(c) == "Cc" for c in text.replace("\n", ""))
    convert(path, folder() / "trace.json")
    json.loads((folder() / "trace.json").read_text(encoding="utf-8"))
    step = refused(TraceError, read_step, path)
    refused(TraceError, functools.partial(convert, last_step=True), path, put("last.jsonl.gz", b""))
    if step is not None:
        of_step = read_step(folder() / "last.jsonl.gz")
        assert of_step.op_us.tolist() == step.op_us.tolist()
        assert of_step.bytes.tolist() == step.bytes.tolist()
        replay_it(step)


def events_of(path: Path, partial: bool = False) -> tuple[Header, list[Event]] | None:
    """Return what a reader of the file gets; None if it is refused."""

    def read_all() -> tuple[Header, list[Event]]:
        header, events = read(path, partial=partial)
        return header, list(events)

    return refused(TraceError, read_all)


def refused(kind: type[UmemError], call: Callable[..., Any], *args: object) -> Any:
    """The call's result; None if it refuses with this error."""
    try:
        return call(*args)
    except kind as error:
        check_message(error)
        return None


def options() -> core.Options:
    made = core.Options()
    made.budget_bytes, made.floor_bytes, made.min_swap_bytes = GIB, 8 << 20, 2 << 20
    made.profile = device_profiles.DEFAULT
    return made


def replay_it(step: StepTrace) -> None:
    if step.peak_bytes > 1 << 40:  # a replay's time follows the number of pages
        return
    device = device_profiles.find(device_profiles.DEFAULT)
    for policy in ("lru", "auto"):
        try:
            result = replay.replay_step(step, policy, device, step.peak_bytes // 2, repeats=2)
        except (OutOfMemoryError, PlanError) as error:
            check_message(error)
        else:
            assert result.step_us >= 0.0
            assert result.bytes_in >= 0


def snapshot(data: bytes) -> None:
    """Read torch's memory snapshot, and convert it to a trace that can be read."""
    path, target = put("snapshot.pickle", data), folder() / "converted.jsonl"
    for gpu in (None, 0):
        made = refused(TraceError, torch_snapshot.read, path, gpu)
        if made is not None:
            events = list(made[1])
            source = put("as_source.pickle", data)
            if data[:1] == torch_snapshot.PICKLE:
                convert(source, target, gpu=gpu)
                copied = events_of(target)
                assert copied is not None
                assert copied[1] == events


@functools.cache
def a_step() -> Mapping[str, Any]:
    """The columns of a step that has all kinds of tensors."""
    builder = StepBuilder()
    builder.add(Alloc(BlockId(0), 3 * PAGE_BYTES, "param"))
    builder.add(Alloc(BlockId(1), PAGE_BYTES, "activation"))
    for made in range(2, 8, 2):
        kept, scratch = BlockId(made), BlockId(made + 1)
        builder.add(Alloc(kept, 2 * PAGE_BYTES, "activation", "conv"))
        builder.add(Alloc(scratch, 5000))
        parts = (0, 0, PAGE_BYTES, 0, 2 * PAGE_BYTES, 2 * PAGE_BYTES + 7)
        builder.add(
            Op("forward", (BlockId(0), BlockId(made - 1)), (kept, scratch), 50.0, parts=parts)
        )
        builder.add(Free(BlockId(made - 1)))
        builder.add(Op("backward", (kept,), (BlockId(0), scratch), 80.0))
        builder.add(Free(kept))
        builder.add(Step())
    return replay.columns_of(builder.step())


def columns(data: bytes) -> None:
    """Change values of a step's columns, and run it natively."""
    step = {name: copy.copy(column) for name, column in a_step().items()}
    arrays = [name for name, column in step.items() if isinstance(column, np.ndarray)]
    for which, item, value in struct.iter_unpack("<BBq", data[: len(data) // 10 * 10]):
        name = arrays[which % len(arrays)]
        column = step[name]
        if item == 255 or not len(column):  # of another length
            step[name] = np.resize(column, max(0, len(column) + value % 5 - 2))
        elif column.dtype == np.float64:
            column[item % len(column)] = struct.unpack("<d", struct.pack("<q", value))[0]
        else:
            column[item % len(column)] = value
    player = core.Replay(options())
    try:
        player.set_step(step)
        player.run_step(2)
        assert (np.diff(player.op_end_us()) >= 0).all()
    except (ValueError, OutOfMemoryError) as error:
        check_message(error)
    finally:
        player.close()


@functools.cache
def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(allow_abbrev=False)
    settings.add_arguments(made)
    return made


def from_everywhere(data: bytes) -> None:
    """Read options: lines of the environment, words of the command line, and a pyproject.toml.

    A blank line ends the first two parts.
    """
    variables, words, toml = [*data.split(b"\n\n", 2), b"", b""][:3]
    project = folder() / "project"
    project.mkdir(mode=0o700, exist_ok=True)
    (project / "pyproject.toml").write_bytes(toml)
    (project / "pyproject.toml").chmod(0o600)
    pairs = (os.fsdecode(line).partition("=") for line in variables.split(b"\n"))
    environ = {name: value for name, _, value in pairs}
    given: Mapping[str, object] = {}
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        try:
            given = settings.given_arguments(parser().parse_args(os.fsdecode(words).split("\n")))
        except SystemExit as done:
            if done.code not in (0, 2):  # of --help, and of what is wrong
                raise
    found = refused(
        ConfigError, lambda: settings.load(given, environ=environ, directory=project, flags=True)
    )
    if found is None:
        return
    assert found == settings.load(given, environ=environ, directory=project)
    usual = settings.load(environ={}, directory=folder())
    assert settings.difference(usual, found)
    count = refused(ConfigError, lambda: resolve.soft_budget(found, available=GIB, threads=1))
    assert count is None or count >= resolve.floor_bytes(1)


@functools.cache
def module() -> Any:
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))


def state() -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in module().state_dict().items()}


def checkpoint(data: bytes) -> None:
    """Load a checkpoint: an index, a file of torch.save or its pickle alone, or safetensors."""
    if data.startswith(b"{"):
        path, expect = put_index(data), expect_of_shards
    elif data.startswith(b"\x80"):
        path, expect = put_pickle(data), expect_of_torch
    elif data.startswith(b"P"):
        path, expect = put("model.bin", data), expect_of_torch
    else:
        path, expect = put("model.safetensors", data), expect_of_safetensors
    before = {name: tensor.clone() for name, tensor in module().state_dict().items()}
    for strict in (True, False):
        bytes_before = state()
        loaded = refused(
            CheckpointError, lambda s=strict: load_checkpoint(module(), path, strict=s)
        )
        if loaded is None:
            assert state() == bytes_before
        else:
            stored = expect(path)
            assert set(loaded.unexpected_keys) == stored.keys() - before.keys()
            assert state() == {n: stored.get(n, old) for n, old in bytes_before.items()}
    module().load_state_dict(before)


def put_index(data: bytes) -> Path:
    """The index beside two files that each have a half of the module."""
    values = [(name, len(held), held) for name, held in state().items()]
    for file, part in (("a", values[::2]), ("b", values[1::2])):
        rows, at = {}, 0
        for name, count, _ in part:
            tensor = module().state_dict()[name]
            dtype = "I64" if tensor.dtype.itemsize == 8 else "F32"
            offsets = [at, at + count]
            rows[name] = {"dtype": dtype, "shape": [*tensor.shape], "data_offsets": offsets}
            at += count
        header = json.dumps(rows).encode()
        size = len(header).to_bytes(8, "little")
        put(f"{file}.safetensors", size + header + b"".join(bytes(c) for _, c, _ in part))
    return put("model.safetensors.index.json", data)


def put_pickle(data: bytes) -> Path:
    """An archive as torch.save writes it, with this pickle, and storages 0 to 7 of 32 bytes."""
    path = folder() / "model.bin"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/byteorder", "little")
        for storage in range(8):
            archive.writestr(f"archive/data/{storage}", bytes(range(32)))
        archive.writestr("archive/version", "3\n")
    return path


def expect_of_safetensors(path: Path) -> dict[str, bytes]:
    data = path.read_bytes()
    first = 8 + int.from_bytes(data[:8], "little")
    rows = json.loads(data[8:first])
    rows.pop("__metadata__", None)
    spans = {name: row["data_offsets"] for name, row in rows.items()}
    return {name: data[first + begin : first + end] for name, (begin, end) in spans.items()}


def expect_of_shards(path: Path) -> dict[str, bytes]:
    files = set(json.loads(path.read_text())["weight_map"].values())
    return {k: v for f in files for k, v in expect_of_safetensors(path.parent / f).items()}


def expect_of_torch(path: Path) -> dict[str, bytes]:
    import torch

    held = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    plain = {name: value.detach().resolve_conj().resolve_neg() for name, value in held.items()}
    return {
        name: bytes(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        for name, value in plain.items()
    }


@functools.cache
def serving() -> server.Server:
    about = {"device": "soft", "policy": "auto", "allocator": "none"}
    return server.Server(folder() / "top.sock", lambda: about)


def asked(data: bytes) -> None:
    """Send the server of `umem top` anything; it answers each time."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(5)
        client.connect(str(serving().path))
        with contextlib.suppress(BrokenPipeError):  # it answered, and read nothing
            client.sendall(data)
        with client.makefile("rb") as stream:
            answer = json.loads(stream.readline())
    assert answer["stats"].keys() >= {field.name for field in dataclasses.fields(Stats)}


@functools.cache
def listening() -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(folder() / "peer.sock"))
    made.listen(1)
    made.settimeout(5)
    return made


def close() -> None:
    """End what the target of `umem top` started."""
    serving().close()
    listening().close()
    serving.cache_clear()
    listening.cache_clear()


def answered(data: bytes) -> Mapping[str, Any] | None:
    """Return what `umem top` takes from a process that answers with this; None if it refuses."""

    listener = listening()

    def answer() -> None:
        with contextlib.suppress(OSError):  # the client did not come, or has enough
            peer, _ = listener.accept()
            with peer:
                peer.sendall(data)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        return refused(StateError, server.ask, Path(listener.getsockname()))
    finally:
        thread.join()


def completed(line: bytes) -> bytes:
    """The answer with the statistics that there are now: its file may be older than some."""
    try:
        answer = json.loads(line)
        stats = dict.fromkeys((field.name for field in dataclasses.fields(Stats)), 0)
        stats |= answer["stats"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return line
    return json.dumps(answer | {"stats": stats}).encode() if stats != answer["stats"] else line


def socket_of_top(data: bytes) -> None:
    """Send the server anything, and show the answers of a process: the second one is later."""
    asked(data[:4096])
    first, _, second = data.partition(b"\n")
    before = answered(completed(first) + b"\n")
    now = answered(completed(second or first))
    for sample in (before, now):
        if sample is not None:
            view = top.view(sample, before)
            json.dumps(view, allow_nan=False)
            shown = top.render(view).replace("\n", "")
            assert not {unicodedata.category(c) for c in shown} & {"Cc", "Cs"}, ascii(shown)


TARGETS: Mapping[str, Callable[[bytes], None]] = {
    "trace": trace,
    "snapshot": snapshot,
    "columns": columns,
    "options": from_everywhere,
    "checkpoint": checkpoint,
    "top": socket_of_top,
}
