"""Fuzz one target of targets.py with atheris, guided by coverage, from the corpus on.

python tests/fuzz/run.py TARGET [--seconds N] [--crashes DIR] [--keep]

The exit code is 1 if an input breaks the target; it is then in DIR, and the target raises when it
is called with it. With --keep, what was found and reaches more than the corpus is added to that.
"""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIMITS = ("-timeout=20", "-rss_limit_mb=3000", "-max_len=4096")  # seconds, and MiB
CHILD = "--child"
KEPT = 60  # inputs of a corpus at most


def fuzz(arguments: Sequence[str]) -> None:
    """Run libFuzzer in this process, and end it."""
    import atheris

    sys.path.insert(0, str(HERE.parent))
    with atheris.instrument_imports(include=["umem", "pickle"]):
        from fuzz.targets import TARGETS
    logging.getLogger("umem").setLevel(logging.ERROR)  # of each file that is cut off, a warning
    name, *rest = arguments
    # A merge starts itself again through a shell, by its first argument.
    itself = shlex.join([sys.executable, __file__, CHILD, name])
    atheris.Setup([itself, *LIMITS, *rest], TARGETS[name])
    atheris.Fuzz()


def run(*arguments: str, folder: Path) -> int:
    """Run `fuzz` in a process with its temporary files in `folder`."""
    command = [sys.executable, __file__, CHILD, *arguments]
    return subprocess.run(command, env=os.environ | {"TMPDIR": str(folder)}, check=False).returncode


def keep(name: str, found: Path, work: Path) -> None:
    """Add the smallest of what was found that reaches more than the corpus does."""
    corpus, merged = HERE / "corpus" / name, work / "merged"
    shutil.copytree(corpus, merged)
    crashes = f"-artifact_prefix={work}/"
    if run(name, "-merge=1", crashes, str(merged), str(found), folder=work):
        raise SystemExit("the inputs cannot be merged")
    here = [path.name for path in corpus.iterdir()]
    new = [path for path in merged.iterdir() if path.name not in here]
    new.sort(key=lambda path: path.stat().st_size)
    for path in new[: max(0, KEPT - len(here))]:
        path.rename(corpus / path.name[:12])  # libFuzzer names an input by its SHA-1


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("target", choices=sorted(p.name for p in (HERE / "corpus").iterdir()))
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--crashes", type=Path, default=Path(), help="default: where it is started")
    parser.add_argument("--keep", action="store_true", help="of what is found, in the corpus")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        work, found = Path(temporary), Path(temporary, "found")
        found.mkdir()
        crashes = f"-artifact_prefix={options.crashes.resolve()}/{options.target}-"
        limit = f"-max_total_time={options.seconds}"
        corpus = str(HERE / "corpus" / options.target)
        code = run(options.target, crashes, limit, str(found), corpus, folder=work)
        if options.keep:
            keep(options.target, found, work)
    return 1 if code else 0


if __name__ == "__main__":
    if sys.argv[1:2] == [CHILD]:
        fuzz(sys.argv[2:])
    sys.exit(main(sys.argv[1:]))
