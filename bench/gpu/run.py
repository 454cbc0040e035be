"""umem on a GPU, a letter a command: ``python bench/gpu/run.py a --out DIR``.

Writes each part's record to DIR/gpu-parts as it goes, and from all records there the report
gpu_<hardware>_<date>.{json,md}. A part that is done in DIR is not run again. Safe by default:
managed memory stays below a quarter of what the device has free, and below 32 GiB.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])  # this folder's modules are a package's

from facts import machine_facts, version_facts  # noqa: E402
from harness import note, output_of, results_folder, table  # noqa: E402

from gpu import parts, report  # noqa: E402
from gpu.device import ENTRIES, SOFTWARE, Driver, software_driver  # noqa: E402
from gpu.record import DONE, FAILED, Deadline, Guard, Record, limit_bytes, load  # noqa: E402
from gpu.trainings import environment  # noqa: E402
from umem.base.units import GIB, format_bytes  # noqa: E402
from umem.config import settings  # noqa: E402
from umem.errors import UmemError  # noqa: E402

GRACE = 5.0  # seconds for a process to say where it hangs, and for a killed one to end
SLOWER = 4.0  # times a GPU's, for --smoke on CPUs that others use
SOFTWARE_BYTES = 1 * GIB  # the software driver's device


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    if args.child is not None:
        return child(args)
    if args.what == ["report"]:
        return _finish(args.out, with_bounds=True)
    results_folder(parser, args)
    return measure(args)


def measure(args: argparse.Namespace) -> int:
    """Prepare the machine and the folder, run the parts, and report: 0 if all is well.

    Raises:
        SystemExit: nothing can be measured, and why.
    """
    if args.smoke and os.environ.get("SOFTCUDA_LIB"):
        os.environ.setdefault("SOFTCUDA_BYTES", str(SOFTWARE_BYTES))
    args.cache = str(settings.load().torch_ext_cache)
    variables = environment(SOFTWARE_BYTES, SOFTWARE_BYTES, args.cache)
    output = output_of(_command("prepare", SOFTWARE_BYTES, args), env=variables)
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    if found["software"] and not args.smoke:
        raise SystemExit("run.py: the software driver computes nothing: only --smoke runs on it")
    versions = version_facts()
    if args.commit:
        versions["commit"] = args.commit
    about = {
        "machine": {**machine_facts(), **found, "smoke": args.smoke},
        "versions": versions,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    _check_origins([about, *(record.about for record in _records(args.out))], args.out)
    (args.out / report.FOLDER).mkdir(parents=True, exist_ok=True)
    limit = limit_bytes(found["gpu_free_bytes"])
    note(f"{found['gpu']}: managed memory of at most {format_bytes(limit)}; umem: {found['umem']}")
    chosen = [part for part in parts.PARTS if {part.name, part.letter} & {*args.what}]
    for part in chosen:
        run_part(part, args, limit, about)
    return _finish(args.out) if chosen else 0


def run_part(part: parts.Part, args: argparse.Namespace, limit: int, about: dict[str, Any]) -> None:
    """Run a part in a process of its own, which is killed if it takes too long.

    `limit`: max managed bytes at a time. A part that dies leaves what it had measured.
    """
    path = args.out / report.FOLDER / f"{part.name}.json"
    if (old := load(path)) is not None and old.status == DONE:
        note(f"{part.name}: done already")
        return
    seconds = part.seconds * (SLOWER if args.smoke else 1.0)
    note(f"{part.name}: {seconds:.0f} s")
    Record(part.name, path, about).save()
    begin = time.monotonic()
    command = [*_command(part.name, limit, args), "--seconds", str(seconds)]
    ended = _run(command, environment(limit // 2, limit - limit // 2, args.cache), seconds)
    record = load(path) or Record(part.name, path, about)
    record.seconds = round(time.monotonic() - begin, 1)
    if ended is None:
        record.errors["part"] = "the process took too long and was killed"
    elif ended != 0:
        record.errors["part"] = f"the process died: exit code {ended}"
    record.status = FAILED if record.errors else DONE
    record.save()
    for name, error in record.errors.items():
        note(f"{part.name}: {name} failed: {error}")


def _command(name: str, limit: int, args: argparse.Namespace) -> list[str]:
    words = [sys.executable, "-W", "ignore", __file__, name, "--child", str(limit)]
    words += ["--out", str(args.out), "--cache", args.cache]
    return [*words, "--smoke"] if args.smoke else words


def _run(command: list[str], variables: dict[str, str], seconds: float) -> int | None:
    """Return its exit code; None when it had to be killed, with all that it had started."""
    process = subprocess.Popen(command, env=variables, start_new_session=True)
    try:
        return process.wait(parts.PATIENCE * seconds + GRACE)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the driver
            process.wait(GRACE)


def child(args: argparse.Namespace) -> int:
    """Measure one part in this process, or prepare, and print what that returns."""
    (name,) = args.what
    if name == "prepare":
        print(json.dumps(prepare(args.cache)))
        return 0
    faulthandler.enable()
    faulthandler.dump_traceback_later(parts.PATIENCE * args.seconds)  # then it is killed
    record = load(args.out / report.FOLDER / f"{name}.json")
    assert record is not None, "run_part made it"
    config = parts.SMOKE if args.smoke else parts.Config()
    deadline, guard = Deadline(args.seconds - parts.START), Guard(args.child)
    (part,) = (part for part in parts.PARTS if part.name == name)
    module, _, function = part.run.partition(".")
    bench = parts.Bench(part, record, config, deadline, guard, args.cache)
    try:
        getattr(importlib.import_module(f"gpu.{module}"), function)(bench)
    except Exception as error:  # noqa: BLE001  (the record is the report of it)
        record.fail("part", error)
    faulthandler.cancel_dump_traceback_later()
    record.details["managed_peak_bytes"] = guard.peak
    record.save()
    return 0


def prepare(cache: str) -> dict[str, Any]:
    """Build umem's extension for torch where there is none; return the facts about device 0."""
    software_driver()
    import torch

    if not torch.cuda.is_available():
        raise SystemExit(
            "there is no CUDA device that torch can use (torch.cuda.is_available() is False); "
            "`nvidia-smi` says whether the driver sees one"
        )
    free, total = torch.cuda.mem_get_info(0)
    name, driver = torch.cuda.get_device_name(0), Driver()
    version = Path("/proc/driver/nvidia/version")
    try:
        from umem.base.native import core
        from umem.integrations.torch import build

        assert core is not None  # loads libumem.so, which the extension joins
        build.find_or_build(Path(cache))
        able = "ready"
    except UmemError as error:  # the measurements of the driver need nothing of it
        able = f"no trainings: {error}"
    return {
        "gpu": name,
        "software": SOFTWARE in name,
        "gpu_memory_bytes": total,
        "gpu_free_bytes": free,
        "cuda_of_driver": driver.number("cuDriverGetVersion"),
        "driver": version.read_text("utf-8").splitlines()[0] if version.exists() else "unknown",
        "lacking": ", ".join(each for each in ENTRIES if each not in driver.found) or "nothing",
        "umem": able,
    }


def _check_origins(abouts: list[dict[str, Any]], out: Path) -> None:
    """Refuse results of several devices, commits or modes: they make no report."""
    keys = {(a["machine"]["gpu"], a["machine"]["smoke"], a["versions"]["commit"]) for a in abouts}
    if len(keys) > 1:
        raise SystemExit(f"run.py: {out} has results of another device or commit: name a new one")


def _records(out: Path) -> list[Record]:
    """Return the records in the folder, in the order of the parts."""
    found = (load(out / report.FOLDER / f"{part.name}.json") for part in parts.PARTS)
    return [record for record in found if record is not None]


def _finish(out: Path, with_bounds: bool = False) -> int:
    """Write the report and print the summary: 0 if everything that is there ran."""
    records = _records(out)
    if not records:
        raise SystemExit(
            f"run.py: {out} has no results: {out / report.FOLDER} has no record of a part"
        )
    _check_origins([record.about for record in records], out)
    paths = report.write(records, out, with_bounds)
    print("\n".join([*map(str, paths), "", *table(report.HEADER, report.summary(records))]))
    return int(any(record.status != DONE for record in records))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench/gpu/run.py", description=__doc__)
    parser.add_argument(
        "what",
        nargs="+",
        metavar="WHAT",
        choices=["prepare", "report", *parts.LETTERS, *(part.name for part in parts.PARTS)],
        help=f"letters ({' '.join(parts.LETTERS)}) or names of parts; `prepare` alone builds "
        "umem's extension for torch, as each letter does where there is none; `report` alone joins "
        "the records in DIR and adds lower bounds, without a GPU",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of results")
    parser.add_argument(
        "--smoke", action="store_true", help="does it work? small, and no figures to keep"
    )
    parser.add_argument("--commit", help="of this tree, where git cannot tell")
    for name, kind in (("--child", int), ("--cache", str), ("--seconds", float)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
