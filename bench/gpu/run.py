"""umem on a GPU, a letter a command: ``python bench/gpu/run.py a --out DIR``.

Writes each part's record to DIR as it goes, and from all records there the report
gpu_<hardware>_<date>.{json,md,...png}. A part that is done in DIR is not run again. Safe by
default: managed memory stays below a quarter of what the device has free, and below 32 GiB.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BENCH = HERE.parent
sys.path[0] = str(BENCH)  # not this folder: its modules are a package's

from facts import machine_facts, version_facts  # noqa: E402
from harness import cases, note, results_folder, table  # noqa: E402

from gpu import children, parts, report, software  # noqa: E402
from gpu.guard import SHARE, limit_bytes  # noqa: E402
from gpu.record import DONE, FAILED, Record, load  # noqa: E402
from umem.base.progress import Advance, ignore  # noqa: E402
from umem.base.units import GIB, format_bytes  # noqa: E402
from umem.config import settings  # noqa: E402

GRACE = 2.0  # seconds for a process to say where it hangs, and for a killed one to end
SOFTWARE_BYTES = 1 * GIB
PREPARE, REPORT = "prepare", "report"


@dataclass(frozen=True)
class Setup:
    """State shared by all parts of a run. `limit`: max managed bytes at a time."""

    folder: Path
    limit: int
    cache: str
    about: dict[str, Any] = field(default_factory=dict)
    smoke: bool = False
    oversubscribe: bool = False

    @property
    def patience(self) -> float:
        """Factor by which a part may take longer than on a GPU: CPUs are shared."""
        return 4.0 if self.smoke else 1.0


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    if args.out is None and not args.smoke:
        parser.error("--out DIR says where results go; only --smoke does without")
    if args.out is None:
        args.out = Path(tempfile.mkdtemp(prefix="umem-bench-"))
    folder = args.out / "gpu-parts"
    if args.what == [REPORT]:
        return _finish(_records(folder), args.out)
    try:
        chosen = _choose(args.what, args.allow_oversubscription)
    except ValueError as error:
        return _refuse(str(error))
    results_folder(parser, args)
    setup = _set_up(args, folder)
    if isinstance(setup, str):
        return _refuse(setup)
    groups = parts.commands(chosen)
    with cases(sum(part.seconds for group in groups for part in group)) as advance:
        ran = [record for group in groups for record in run_parts(group, setup, advance)]
    written = _finish(_records(folder), args.out) if ran else 0
    return written or int(any(record.status != DONE for record in ran))


def _set_up(args: argparse.Namespace, folder: Path) -> Setup | str:
    """Prepare the machine and the folder; return why nothing can be measured, if so."""
    if args.smoke and software.asked_for():
        os.environ.setdefault("SOFTCUDA_BYTES", str(SOFTWARE_BYTES))
    cache = str(settings.load().torch_ext_cache)
    found = _prepare(cache)
    if found is None:
        return "the bench cannot run here, for the reason above"
    if found["software"] and not args.smoke:
        return "this is the software driver, which computes nothing: only --smoke runs"
    about = _about(found, args)
    if len({record.origin for record in [*_records(folder), Record("", about=about)]}) > 1:
        return f"{args.out} has results of another device or commit: name another folder"
    folder.mkdir(parents=True, exist_ok=True)
    limit = limit_bytes(found["gpu_free_bytes"])
    note(
        f"{found['gpu']}: {format_bytes(found['gpu_free_bytes'])} free, at most "
        f"{format_bytes(limit)} of managed memory at a time (1/{SHARE} of it)"
    )
    return Setup(folder, limit, cache, about, args.smoke, args.allow_oversubscription)


def run_parts(group: Sequence[parts.Part], setup: Setup, advance: Advance = ignore) -> list[Record]:
    """Every part in a process of its own, all within `LONGEST`; a part that fails stops none.

    A part may use what the declared times of the later ones leave, up to twice its own. `advance`
    is called with the declared time of each that is done.
    """
    records: list[Record] = []
    end = time.monotonic() + setup.patience * parts.LONGEST
    for i, part in enumerate(group):
        path = setup.folder / f"{part.name}.json"
        old = load(path)
        if old is not None and old.status == DONE:
            note(f"{part.name}: done already")
            records.append(old)
            advance(part.seconds)
            continue
        later = setup.patience * sum(each.seconds for each in group[i + 1 :])
        limit = min(end - time.monotonic() - later, 2 * setup.patience * part.seconds)
        note(f"{part.name}: {setup.patience * part.seconds:.0f} s, at most {limit:.0f} s")
        records.append(_run_part(part, path, setup, limit))
        advance(part.seconds)
    return records


def _run_part(part: parts.Part, path: Path, setup: Setup, limit: float) -> Record:
    Record(part.name, path, about=setup.about).save()
    arguments = [part.name, "--folder", str(setup.folder), "--limit", str(setup.limit)]
    arguments += ["--cache", setup.cache, "--seconds", str(setup.patience * part.measuring)]
    arguments += ["--smoke"] if setup.smoke else []
    arguments += ["--allow-oversubscription"] if setup.oversubscribe else []
    ended = _child(arguments, setup, timeout=limit)
    record = load(path) or Record(part.name, path, about=setup.about)
    if record.status not in (DONE, FAILED):
        how = f"did not end within {limit:.0f} s" if ended is None else f"died: exit code {ended}"
        record.errors["part"] = f"the process {how}"
        record.status, record.seconds = FAILED, limit if ended is None else record.seconds
        record.save()
    for number, error in record.errors.items():
        note(f"{part.name}: {number} failed: {error}")
    return record


def _child(arguments: list[str], setup: Setup, timeout: float) -> int | None:
    """Its exit code; None when it had to be killed, with all that it had started."""
    half = setup.limit // 2
    variables = children.environment(half, setup.limit - half, setup.cache)
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "gpu.part", *arguments],
        env=variables,
        start_new_session=True,
    )
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGUSR1)  # prints where it hangs
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the driver
            process.wait(GRACE)


def _prepare(cache: str) -> dict[str, Any] | None:
    """Build the extension before any clock starts; return the device's facts, None without one."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "gpu.part", PREPARE, "--cache", cache],
        env={**settings.child_environment(), "PYTHONPATH": children.python_path()},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        return None
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _about(found: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Return what all records of this run have in common."""
    versions = version_facts()
    if versions["commit"] == "unknown" and args.commit:
        versions["commit"] = args.commit
    return {
        "machine": {**machine_facts(), **found, "smoke": args.smoke},
        "versions": versions,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _records(folder: Path) -> list[Record]:
    """Return the records in the folder, in the order of the parts."""
    found = (load(folder / f"{name}.json") for name in parts.BY_NAME)
    return [record for record in found if record is not None]


def _finish(records: Sequence[Record], out: Path) -> int:
    """Write the report and print the summary: 0 if everything that is there ran."""
    if not records:
        return _refuse(f"{out} has no results: {out / 'gpu-parts'} has no record of a part")
    if len({record.origin for record in records}) > 1:
        return _refuse(f"{out} has results of several devices or commits, which make no report")
    paths = report.write(records, out)
    print("\n".join([*map(str, paths), "", *table(report.HEADER, report.summary(records))]))
    return int(any(record.status != DONE for record in records))


def _choose(words: Sequence[str], allow_oversubscription: bool) -> list[parts.Part]:
    """Return the parts to run; none for `prepare` alone.

    Raises:
        ValueError: as `parts.choose`.
    """
    if list(words) == [PREPARE]:
        return []
    return parts.choose(words, allow_oversubscription)


def _refuse(why: str) -> int:
    print(f"run.py: {why}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench/gpu/run.py", description=__doc__)
    letters = "; ".join(f"{letter}: {title}" for letter, title in parts.LETTERS.items())
    parser.add_argument(
        "what",
        nargs="*",
        metavar="WHAT",
        help=f"letters, or names of parts (default: all letters; {letters}); `{PREPARE}` alone: "
        f"build the extension for torch, which is also done before any letter; `{REPORT}` alone: "
        "join the records in DIR",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of results")
    parser.add_argument(
        "--smoke", action="store_true", help="does it work? small, and no figures to keep"
    )
    parser.add_argument("--commit", help="of this tree, where git cannot tell")
    parser.add_argument(
        "--allow-oversubscription",
        action="store_true",
        help="also the parts that need more than the device has free: they can hang a GPU, so only "
        "on a card that nobody else uses",
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
