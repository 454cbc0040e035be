"""The one table of options. docs/options.md is generated from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from . import values
from .units import BYTES_ALLOWED, parse_bytes


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
        """The option on the command line."""
        return "--" + self.name.replace("_", "-")


_LEVELS = ("debug", "info", "warning", "error")
_OBSERVERS = ("auto", "native", "python", "off")
_RECOMPUTE = ("off", "umem", "recompute", "hybrid", "capuchin", "speed", "memory", "cost",
              "per_block")  # fmt: skip
_LAYOUTS = ("auto", "on", "off")
_ALLOCATORS = ("auto", "subclass", "pluggable", "pool", "none")

OPTIONS = (
    Option(
        "enabled", "UMEM", "switch", values.parse_switch, "off", values.SWITCH_ALLOWED,
        "Turn umem on inside `import torch`, with no change to the program. `umem.enable()` and "
        "`umem run` do not need it.",
        env_only=True,
    ),
    Option(
        "budget", "UMEM_BUDGET", "size", values.parse_budget, "auto",
        f"auto, {BYTES_ALLOWED}, or a percentage of the device's memory as 80%",
        "Most bytes that umem keeps on each device, live and cached. `auto` on a GPU is the memory "
        "that is free at the first use, less 512 MiB; on the software device it is the device's "
        "size, or without one half of the memory that is available at the start. Where the device "
        "has a size, it follows the free memory (docs/sleep.md). A percentage of a "
        "software device needs one of known size. The least is 8 MiB (4 pages of 2 MiB), on the "
        "software device for each of torch's threads, because one instruction can need several "
        "pages at once.",
    ),
    Option(
        "host_budget", "UMEM_HOST_BUDGET", "size", values.parse_host_budget, "auto",
        f"auto, unlimited, or {BYTES_ALLOWED}",
        "Most bytes that may be evicted to the host. Beyond it an allocation fails with "
        "`OutOfMemoryError`. `auto` keeps it and the budget of a software device together within "
        "nine tenths of the memory that is available at the start. `unlimited` leaves it to the "
        "operating system, which may kill the program.",
    ),
    Option(
        "policy", "UMEM_POLICY", "name", values.parse_name, "umem", "the name of a policy",
        "Who leaves the device, and when it comes back. Most policies record a step of the "
        "program, plan it, and run the next steps by the plan; `umem` is such a one. `none` leaves "
        "everything to page faults, `lru` evicts what was used longest ago when room is needed, "
        "`conv_lru` takes activations of convolutions first.",
    ),
    Option(
        "min_swap", "UMEM_MIN_SWAP", "size", parse_bytes, "2MiB", BYTES_ALLOWED,
        "Smaller blocks are evicted only when nothing else is left.",
    ),
    Option(
        "device", "UMEM_DEVICE", "device", values.parse_device, "auto",
        "auto, cuda or soft[:PROFILE][:SIZE], as soft:a100-pcie4:64MiB",
        "`soft` is the software device: CPU tensors on a device with SIZE bytes of frames (as many "
        "as the budget without SIZE) and the speed of PROFILE. `cuda` is all GPUs that torch sees "
        "(CUDA_VISIBLE_DEVICES chooses). `auto` is `cuda` where torch sees one, else `soft`.",
    ),
    Option(
        "allocator", "UMEM_ALLOCATOR", "choice", values.choice(*_ALLOCATORS), "auto",
        ", ".join(_ALLOCATORS),
        "The way into torch on a GPU. `subclass`: torch keeps its statistics, snapshots, graphs "
        "and errors; needs the torch extension. `pluggable`: needs no extension, and torch has no "
        "statistics. `pool`: a `torch.cuda.MemPool` for a part of the program; the only one that "
        "can start after CUDA was initialised. `none`: torch keeps its own; CuPy, "
        "cuda.core and `umem.Buffer` get umem's memory, with or without torch. `auto` is "
        "`subclass` where the extension builds, else `pluggable`.",
    ),
    Option(
        "log", "UMEM_LOG", "level", values.choice(*_LEVELS), "warning", ", ".join(_LEVELS),
        "Least severe messages that go to stderr, through the logger `umem`.",
    ),
    Option(
        "guard", "UMEM_GUARD", "switch", values.parse_switch, "off", values.SWITCH_ALLOWED,
        "Refuse to let all managed bytes together exceed the memory that the device had free at "
        "the start, for machines where real oversubscription is unwanted.",
    ),
    Option(
        "observer", "UMEM_OBSERVER", "choice", values.choice(*_OBSERVERS), "auto",
        ", ".join(_OBSERVERS),
        "How umem learns what the program does: `native` (in torch's dispatcher, fast), `python` "
        "(slower, for diagnosis), `off` (nothing is learnt: page faults only keep it correct). "
        "`auto` is `native`.",
    ),
    Option(
        "recompute", "UMEM_RECOMPUTE", "choice", values.choice(*_RECOMPUTE), "off",
        ", ".join(_RECOMPUTE),
        "What models keep of their forward passes for backward: all (`off`), or what a mode of "
        "`umem.optimize` chooses; the rest is computed again. Each outermost module that is called "
        "in training is optimized, from its second call on.",
    ),
    Option(
        "torch_ext_cache", "UMEM_TORCH_EXT_CACHE", "path", values.parse_path, "~/.cache/umem",
        "a directory",
        "Where the extension for the installed torch is kept once built. The default follows "
        "`XDG_CACHE_HOME`.",
    ),
    Option(
        "trace", "UMEM_TRACE", "file", values.parse_trace, "off",
        "off, FILE.jsonl or FILE.jsonl.gz",
        "Where to write the trace of the whole program: what it allocates, reads, writes and "
        "frees, and how long its ops take (docs/trace_format.md).",
    ),
    Option(
        "layout", "UMEM_LAYOUT", "choice", values.choice(*_LAYOUTS), "auto", ", ".join(_LAYOUTS),
        "Whether large blocks whose lives do not overlap share addresses, as planned from a "
        "recorded step (docs/sharing.md): `auto` where the step fits the budget. For policies that "
        "plan, on the first device.",
    ),
    Option(
        "summary", "UMEM_SUMMARY", "switch", values.parse_switch, "off", values.SWITCH_ALLOWED,
        "Say in a line on stderr at the program's end what umem did. `umem run` turns it on.",
    ),
    Option(
        "top", "UMEM_TOP", "socket", values.parse_top, "off",
        f"{values.SWITCH_ALLOWED}, or the path of a socket with a `/` in it",
        "Answer `umem top` (docs/top.md) on a local socket that only the same user can open. `on` "
        "names it after the process in `$XDG_RUNTIME_DIR/umem`, or `umem-UID` in the directory "
        "for temporary files.",
    ),
    Option(
        "strict", "UMEM_STRICT", "switch", values.parse_switch, "off", values.SWITCH_ALLOWED,
        "With `UMEM=1`: when umem cannot turn itself on, let `import torch` fail instead of a "
        "warning and plain torch. `umem run` sets it.",
        env_only=True,
    ),
)  # fmt: skip
BY_NAME = {option.name: option for option in OPTIONS}
BY_ENV = {option.env: option for option in OPTIONS}
SETTABLE = tuple(option for option in OPTIONS if not option.env_only)
