"""umem on a GPU, in 8 minutes: ``python bench/gpu/run.py [--smoke] [--parts a,b] [--resume]``.

Writes gpu_<hardware>_<date>.{json,md,...png} to bench/results. Safe by default: managed memory
stays below a quarter of what the device has free, and below 32 GiB.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BENCH = HERE.parent
sys.path[0] = str(BENCH)  # not this folder: its modules are a package's

from harness import add_outputs, results_folder  # noqa: E402

from gpu import children, parts, report, software  # noqa: E402
from gpu.config import SMOKE, Config  # noqa: E402
from gpu.guard import SHARE, limit_bytes  # noqa: E402
from gpu.record import DONE, FAILED, Record, load  # noqa: E402
from umem.base.units import GIB, format_bytes  # noqa: E402
from umem.config import settings  # noqa: E402

GRACE = 5.0  # seconds between a part's own deadline and its end by force
SOFTWARE_BYTES = 1 * GIB


@dataclass(frozen=True)
class Setup:
    """State shared by all parts of a run. `limit`: max managed bytes at a time."""

    folder: Path
    limit: int
    cache: str
    smoke: bool = False
    resume: bool = False
    oversubscribe: bool = False

    @property
    def patience(self) -> float:
        """Factor by which a part may take longer than on a GPU: CPUs are shared."""
        return 4.0 if self.smoke else 1.0


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        chosen = parts.choose(args.parts, args.allow_oversubscription)
    except ValueError as error:
        print(f"run.py: --parts: {error}", file=sys.stderr)
        return 2
    out = results_folder(parser, args)
    config = SMOKE if args.smoke else Config()
    cache = str(settings.load().torch_ext_cache)
    if args.smoke and software.asked_for():
        os.environ.setdefault("SOFTCUDA_BYTES", str(SOFTWARE_BYTES))
    facts = _facts(args.smoke)
    if isinstance(facts, str):
        print(f"run.py: {facts}", file=sys.stderr)
        return 2
    out = out or Path(tempfile.mkdtemp(prefix="umem-bench-"))
    folder = out / "gpu-parts"
    folder.mkdir(parents=True, exist_ok=True)
    limit = limit_bytes(facts["gpu_free_bytes"])
    _note(
        f"{facts['gpu']}: {format_bytes(facts['gpu_free_bytes'])} free, at most "
        f"{format_bytes(limit)} of managed memory at a time (1/{SHARE} of it)"
    )
    setup = Setup(folder, limit, cache, args.smoke, args.resume, args.allow_oversubscription)
    _child(["prepare", "--cache", cache], setup, timeout=300)
    records = run_parts(chosen, setup, _total(chosen, setup))
    paths = report.write(records, facts, config, out)
    print("\n".join(map(str, paths)))
    return 0 if all(record.status == DONE for record in records) else 1


def run_parts(chosen: list[parts.Part], setup: Setup, total: float) -> list[Record]:
    """Every part in a process of its own, within `total` seconds; a part that fails stops none."""
    records, end = [], time.monotonic() + total
    for part in chosen:
        path = setup.folder / f"{part.name}.json"
        old = load(path) if setup.resume else None
        if old is not None and old.status == DONE:
            _note(f"{part.name}: done already")
            records.append(old)
            continue
        seconds = min(part.seconds * setup.patience, end - time.monotonic())
        if seconds <= GRACE:
            records.append(_failed(part.name, path, "no time was left for it"))
        else:
            _note(f"{part.name}: up to {seconds:.0f} s")
            records.append(_run_part(part, path, setup, seconds))
    return records


def _total(chosen: list[parts.Part], setup: Setup) -> float:
    """Seconds for all parts. What oversubscribes comes on top."""
    beyond = sum(part.seconds for part in chosen if part.name == parts.OVERSUBSCRIPTION)
    return (parts.LONGEST + beyond) * setup.patience


def _run_part(part: parts.Part, path: Path, setup: Setup, seconds: float) -> Record:
    path.unlink(missing_ok=True)
    arguments = [part.name, "--folder", str(setup.folder), "--limit", str(setup.limit)]
    arguments += ["--cache", setup.cache, "--seconds", str(seconds - GRACE)]
    arguments += ["--smoke"] if setup.smoke else []
    arguments += ["--allow-oversubscription"] if setup.oversubscribe else []
    ended = _child(arguments, setup, timeout=seconds)
    record = load(path) or Record(part.name, path)
    if record.status not in (DONE, FAILED):
        how = f"did not end within {seconds:.0f} s" if ended is None else f"died: exit code {ended}"
        record.errors["part"] = f"the process {how}"
        record.status, record.seconds = FAILED, seconds if ended is None else record.seconds
        record.save()
    for number, error in record.errors.items():
        _note(f"{part.name}: {number} failed: {error}")
    return record


def _failed(name: str, path: Path, why: str) -> Record:
    record = Record(name, path, status=FAILED, errors={"part": why})
    record.save()
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
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _facts(smoke: bool) -> dict[str, Any] | str:
    """Return the facts about the device, or the reason why the bench cannot run on it."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "gpu.part", "facts"],
        env={**settings.child_environment(), "PYTHONPATH": children.python_path()},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        return (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if found["software"] and not smoke:
        return "this is the software driver, whose kernels compute nothing: only --smoke runs on it"
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench/gpu/run.py", description=__doc__)
    add_outputs(parser)
    parser.add_argument("--parts", help="names, or letters of the groups a to e (default: all)")
    parser.add_argument("--resume", action="store_true", help="skip parts that are done already")
    parser.add_argument(
        "--allow-oversubscription",
        action="store_true",
        help="also the parts that need more than the device has free: they can hang a GPU, so only "
        "on a card that nobody else uses",
    )
    return parser


def _note(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
