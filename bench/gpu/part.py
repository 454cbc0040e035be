"""One part in a process of its own: ``python -m gpu.part NAME --folder DIR --limit BYTES ...``.

The folder has the part's record already, which says what is measured. NAME may also be `prepare`:
it builds the extension for torch where there is none, and prints the device's facts as JSON.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from gpu import software
from gpu.config import SMOKE, Config
from gpu.context import Context
from gpu.deadline import Deadline
from gpu.device import Gpu
from gpu.guard import Guard
from gpu.parts import BY_NAME, Part
from gpu.record import DONE, FAILED, Record, load

_SMI = ("driver_version", "pcie.link.gen.current", "pcie.link.gen.max", "pcie.link.width.current")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gpu.part", description=__doc__)
    parser.add_argument("name", choices=[*BY_NAME, "prepare"])
    parser.add_argument("--folder", type=Path, help="where the record is, as NAME.json")
    parser.add_argument("--limit", type=int, help="managed bytes at a time")
    parser.add_argument("--seconds", type=float, default=60.0, help="to measure in")
    parser.add_argument("--cache", help="where the extension for torch is kept")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--allow-oversubscription", action="store_true")
    args = parser.parse_args(argv)
    if args.name == "prepare":
        software.load_if_asked()
        found = facts()
        prepare(args.cache)
        print(json.dumps(found))
        return 0
    if args.folder is None or args.limit is None:
        parser.error("a part needs --folder and --limit")
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # from run.py, before it kills this process
    path = args.folder / f"{args.name}.json"
    context = Context(
        Guard(args.limit),
        load(path) or Record(args.name, path),
        SMOKE if args.smoke else Config(),
        Deadline(args.seconds),
        args.folder,
        args.cache,
        args.allow_oversubscription,
    )
    return measure(BY_NAME[args.name], context)


def measure(part: Part, context: Context) -> int:
    """Run the part and keep its record, whatever happens: 0 if all went well."""
    record, begin = context.record, time.monotonic()
    record.save()
    try:
        if part.raw:
            with context.deadline.stopped():
                gpu = Gpu(context.guard)
            part.load().run(gpu, record, context.config, context.deadline)
        else:
            part.load().run(context)
    except Exception as error:  # noqa: BLE001  (the record is the report of it)
        record.errors["part"] = f"{type(error).__name__}: {error}"
        record.details.setdefault("tracebacks", {})["part"] = traceback.format_exc()
    record.status = FAILED if record.errors else DONE
    record.seconds = round(time.monotonic() - begin, 1)
    record.details["managed_peak_bytes"] = context.guard.peak
    record.save()
    return 1 if record.errors else 0


def facts() -> dict[str, Any]:
    """Return the facts about device 0."""
    import torch

    if not torch.cuda.is_available():
        raise SystemExit(
            "there is no CUDA device that torch can use (torch.cuda.is_available() is False); "
            "`nvidia-smi` says whether the driver sees one"
        )
    free, total = torch.cuda.mem_get_info(0)
    name = torch.cuda.get_device_name(0)
    found = {
        "gpu": name,
        "software": software.is_software(name),
        "gpu_memory_bytes": total,
        "gpu_free_bytes": free,
        "compute_capability": ".".join(map(str, torch.cuda.get_device_capability(0))),
        "cuda_of_torch": torch.version.cuda,
    }
    return {**found, **({} if found["software"] else _smi())}


def prepare(cache: str | None) -> None:
    """Build now what a measurement would have to wait for."""
    from umem.base.native import core
    from umem.integrations.torch import build

    assert core is not None  # loads libumem.so, which the extension joins
    build.find_or_build(None if cache is None else Path(cache))


def _smi() -> dict[str, str]:
    """Return the facts that only nvidia-smi reports; empty without it."""
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(_SMI)}", "--format=csv,noheader", "--id=0"],
            capture_output=True,
            text=True,
            check=True,
            timeout=20,
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(_SMI, (word.strip() for word in done.stdout.split(",")), strict=False))


if __name__ == "__main__":
    sys.exit(main())
