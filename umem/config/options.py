"""The table of options; docs/options.md is generated from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..base.units import BYTES_ALLOWED, parse_bytes
from . import parsers


@dataclass(frozen=True)
class Option:
    """One row of the table. `allowed` completes the sentence "allowed: ..."."""

    name: str
    env: str
    kind: str
    parse: Callable[[str], object]
    default: str
    allowed: str
    doc: str
    env_only: bool = False

    @property
    def flag(self) -> str:
        """The option's name on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def is_path(self) -> bool:
        """True if it names a file or directory, which no pyproject.toml may."""
        return self.kind in ("path", "file", "socket", "folder")


_LEVELS = ("debug", "info", "warning", "error")
_OBSERVERS = ("auto", "native", "python", "off")
_RECOMPUTE = ("off", "auto", "recompute", "per_block", "speed", "memory")
_LAYOUTS = ("auto", "on", "off")
_BACKINGS = ("managed", "mapped")
_ALLOCATORS = ("auto", "subclass", "pluggable", "pool", "none")

OPTIONS = (
    Option(
        "enabled", "UMEM", "switch", parsers.parse_switch, "off", parsers.SWITCH_ALLOWED,
        "Turn umem on inside `import torch`, with no change to the program. `umem.enable()` and "
        "`umem run` do not need it.",
        env_only=True,
    ),
    Option(
        "budget", "UMEM_BUDGET", "size", parsers.parse_budget, "auto",
        f"auto, {BYTES_ALLOWED}, or a percentage of the device's memory such as 80%",
        "Maximum bytes that umem keeps on each device, live and cached. `auto` on a GPU is the "
        "memory that is free at the first use, less an eighth of it or 512 MiB, whichever is less. "
        "On the software device it is the device's size; if it has none, half of the memory "
        "available at the start, or with a disk four fifths. A software device has at most 40 GiB "
        "where `vm.max_map_count` is 65530, the kernel's default. On a device with a size, `auto` "
        "follows the free memory (docs/sleep.md). A percentage of a software device needs a device "
        "of known size. The minimum is 8 MiB (4 pages of 2 MiB), on the software device per torch "
        "thread, because one instruction can need several pages at once; a disk takes a sixteenth "
        "of the budget more, 4 MiB to 128 MiB.",
    ),
    Option(
        "host_budget", "UMEM_HOST_BUDGET", "size", parsers.parse_host_budget, "auto",
        f"auto, unlimited, or {BYTES_ALLOWED}",
        "Maximum bytes that may be evicted to the host. Allocations that would exceed it fail with "
        "`OutOfMemoryError`. `auto` limits it, together with the budget of a software device, to "
        "nine tenths of the memory that is available at the start. With a disk on the software "
        "device it is the disk's limit, or none. With `unlimited`, the operating "
        "system may kill a program that runs out of memory.",
    ),
    Option(
        "disk", "UMEM_DISK", "folder", parsers.parse_disk, "off",
        "off, or a folder on a disk, with or without a limit: /fast or /fast:200GiB",
        "Without a GPU: the folder where evicted memory lives, so that a program needs no more "
        "memory than the budget (docs/disk.md). The file has no name and is gone when the program "
        "ends, however it ends; blocks for all allocated memory are reserved in it, up to the "
        "limit. A sixteenth of the budget, 4 to 128 MiB, holds pages that are being read or "
        "written. States of optimizers that are updated on the host are in a second such file, "
        "with or without a GPU (docs/optimizer_state.md).",
    ),
    Option(
        "disk_writes", "UMEM_DISK_WRITES", "bytes a day", parsers.parse_writes, "unlimited",
        parsers.WRITES_ALLOWED,
        "How much evicted memory may be written to `disk`, which writing wears out. Plans assume "
        "a disk that writes no faster, so they write less where another choice, or "
        "recomputation, then costs less. It is no hard limit: nothing waits for it, and a plan "
        "that moves more and is slower than `lru` is dropped as without it. The end of the program "
        "says if more is written.",
    ),
    Option(
        "policy", "UMEM_POLICY", "policy", parsers.parse_name, "auto",
        "auto, lru, conv_lru, none, the name of a baseline (docs/policies.md) or of an installed "
        "policy, module:attribute or file.py:attribute; in a program also a policy itself",
        "The policy decides which tensors leave the device, and when they return. Most policies "
        "record a step of the program, plan it, and run the next steps from the plan; `auto` is "
        "one of them. `lru` evicts the least recently used when memory is short, `conv_lru` evicts "
        "activations of convolutions first, `none` leaves everything to page faults. The "
        "baselines are policies from the literature, for comparison.",
    ),
    Option(
        "min_swap", "UMEM_MIN_SWAP", "size", parse_bytes, "2MiB", BYTES_ALLOWED,
        "Blocks smaller than this are evicted only if nothing else is left. The moves that a plan "
        "schedules, such as those of `auto`, ignore it.",
    ),
    Option(
        "device", "UMEM_DEVICE", "device", parsers.parse_device, "auto",
        "auto, cuda[:SIZE] or soft[:PROFILE][:SIZE], such as cuda:8GiB or soft:a100-pcie4:64MiB",
        "`soft` is the software device: CPU tensors on a device with SIZE bytes of frames (as many "
        "as the budget without SIZE) and the speed of PROFILE. `cuda` means all GPUs that torch "
        "sees (CUDA_VISIBLE_DEVICES chooses); with SIZE umem occupies the rest of their memory, so "
        "that a program runs as on a GPU of that size. `auto` is `cuda` if torch sees a GPU, else "
        "`soft`.",
    ),
    Option(
        "backing", "UMEM_BACKING", "choice", parsers.choice(*_BACKINGS), "managed",
        ", ".join(_BACKINGS),
        "The memory that a GPU's tensors are in. `managed`: the driver's managed memory, where a "
        "wrong decision, or an access that umem does not see, costs only time. `mapped`: device "
        "memory that is copied to the host and back near the link's rate; programs whose GPU "
        "work is not all operators of torch must not use it (docs/cuda.md).",
    ),
    Option(
        "allocator", "UMEM_ALLOCATOR", "choice", parsers.choice(*_ALLOCATORS), "auto",
        ", ".join(_ALLOCATORS),
        "The way in which umem becomes torch's allocator on a GPU. `subclass`: torch keeps its "
        "statistics, snapshots, graphs and errors; needs the torch extension. `pluggable`: needs "
        "no extension, but torch has no statistics. `pool`: a `torch.cuda.MemPool` for a part of "
        "the program; the only one that can start after CUDA was initialised. `none`: torch keeps "
        "its own; CuPy, cuda.core and `umem.Buffer` get umem's memory, with or without torch. "
        "`auto` is `subclass` if the extension builds, else `pluggable`.",
    ),
    Option(
        "log", "UMEM_LOG", "level", parsers.choice(*_LEVELS), "warning", ", ".join(_LEVELS),
        "Minimum severity of the messages that the logger `umem` writes to stderr.",
    ),
    Option(
        "guard", "UMEM_GUARD", "switch", parsers.parse_switch, "off", parsers.SWITCH_ALLOWED,
        "Refuse allocations that would raise all managed bytes above the device memory that was "
        "free at the start, for machines where real oversubscription is unwanted.",
    ),
    Option(
        "observer", "UMEM_OBSERVER", "choice", parsers.choice(*_OBSERVERS), "auto",
        ", ".join(_OBSERVERS),
        "How umem observes the program: `native` (in torch's dispatcher, fast), `python` "
        "(slower, for diagnosis), `off` (not at all; data moves through page faults). "
        "`auto` is `native`.",
    ),
    Option(
        "recompute", "UMEM_RECOMPUTE", "choice", parsers.choice(*_RECOMPUTE), "off",
        ", ".join(_RECOMPUTE),
        "The results of the forward pass that models keep for backward: all (`off`), or those that "
        "a mode of `umem.optimize` chooses; the rest is recomputed. Each outermost module that is "
        "called in training is optimized: its second call is recorded, and the third has a plan.",
    ),
    Option(
        "optimizer", "UMEM_OPTIMIZER", "share", parsers.parse_share, "device",
        parsers.SHARE_ALLOWED,
        "The place of parameter updates (docs/optimizer_state.md): `host` keeps optimizer states "
        "in host memory and updates there, with torch's CPU kernels; a percentage is "
        "the share of the parameters' bytes that the host updates; `auto` chooses the share from a "
        "recorded step. Each optimizer of torch.optim takes part from its first step on.",
    ),
    Option(
        "optimizer_threads", "UMEM_OPTIMIZER_THREADS", "count", parsers.parse_count, "0",
        parsers.COUNT_ALLOWED,
        "Threads of an update on the host; 0 means as many as torch uses for an operator. With a "
        "GPU they run on the processors that are nearest to it.",
    ),
    Option(
        "optimizer_buffers", "UMEM_OPTIMIZER_BUFFERS", "size", parse_bytes, "512MiB", BYTES_ALLOWED,
        "Host memory for the transfers of updates on the host, which are gradients and "
        "parameters; pinned with a GPU. Three buffers of at most 32 MiB, or with `overlap=True` "
        "as many as fit.",
    ),
    Option(
        "torch_ext_cache", "UMEM_TORCH_EXT_CACHE", "path", parsers.parse_path, "~/.cache/umem",
        "a directory",
        "Directory of the built extension for the installed torch. The default follows "
        "`XDG_CACHE_HOME`; a user whose home cannot be written has `umem-cache-UID` in the "
        "directory for temporary files. No other user may be able to write to it.",
    ),
    Option(
        "trace", "UMEM_TRACE", "file", parsers.parse_trace, "off",
        "off, FILE.jsonl or FILE.jsonl.gz",
        "File for the trace of the whole program: its allocations, reads, writes and "
        "frees, and the durations of its ops (docs/trace_format.md). Each of several ranks has its "
        "own file, `x.rank1.jsonl` for `x.jsonl`; `%r` in the name is the rank, `%p` the process "
        "(`PID-2` if that file exists, as of a process of the same ID in another container). "
        "A child that inherits the variable writes no file, unless the name has `%p`.",
    ),
    Option(
        "layout", "UMEM_LAYOUT", "choice", parsers.choice(*_LAYOUTS), "auto", ", ".join(_LAYOUTS),
        "Large blocks whose lifetimes do not overlap share addresses, as planned from a "
        "recorded step (docs/sharing.md): `auto` if the step fits the budget; `on` also if it "
        "does not, under `backing=mapped` brief blocks only and with the policy `auto`. For "
        "policies that plan.",
    ),
    Option(
        "summary", "UMEM_SUMMARY", "switch", parsers.parse_switch, "off", parsers.SWITCH_ALLOWED,
        "Print a one-line summary to stderr when the program ends. `umem run` turns it on.",
    ),
    Option(
        "top", "UMEM_TOP", "socket", parsers.parse_top, "off",
        f"{parsers.SWITCH_ALLOWED}, or the path of a socket with a `/` in it",
        "Serve `umem top` (docs/top.md) on a local socket that only the same user can open. With "
        "`on`, the socket has the name of the process, in `$XDG_RUNTIME_DIR/umem` or in `umem-UID` "
        "in the directory for temporary files.",
    ),
    Option(
        "watchdog", "UMEM_WATCHDOG", "seconds", parsers.parse_seconds, "30",
        f"off, or seconds from {parsers.SECONDS_ALLOWED}",
        "Time that a driver call that moves memory of a GPU may take before a warning names it. "
        "The call continues.",
    ),
    Option(
        "strict", "UMEM_STRICT", "switch", parsers.parse_switch, "off", parsers.SWITCH_ALLOWED,
        "With `UMEM=1`: if umem cannot turn itself on, `import torch` fails instead of warning and "
        "continuing with plain torch. `umem run` sets it.",
        env_only=True,
    ),
)  # fmt: skip
BY_NAME = {option.name: option for option in OPTIONS}
BY_ENV = {option.env: option for option in OPTIONS}
SETTABLE = tuple(option for option in OPTIONS if not option.env_only)
