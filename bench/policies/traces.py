"""The steps of workloads on devices: recorded on fake tensors once, then kept as files."""

from __future__ import annotations

import functools
import hashlib
import os
from importlib import metadata
from pathlib import Path

import numpy as np

from policies.workloads import WORKLOADS
from umem.base import device_profiles
from umem.base.device_profiles import DeviceProfile
from umem.capture import program, roofline
from umem.capture.recording import Recording
from umem.trace.reader import read
from umem.trace.schema import Alloc, Header
from umem.trace.step_builder import read_step
from umem.trace.step_trace import Ints, StepTrace
from umem.trace.writer import Writer

HERE = Path(__file__).resolve().parent
BENCH = HERE.parent
UMEM = BENCH.parent / "umem"
# The inputs of a trace: if any of them changes, the old files are not used.
_SOURCES = (
    *HERE.glob("*nets.py"),
    *HERE.glob("*workloads.py"),
    HERE / "training.py",
    BENCH / "nets.py",
    UMEM / "demo" / "nets.py",
    UMEM / "base" / "device_profiles.py",  # durations are from its rooflines
    BENCH.parent / "examples" / "llama.py",
    *UMEM.glob("capture/*.py"),
)


class Traces:
    """One workload's steps; it is recorded at the first device whose file is missing."""

    def __init__(self, workload: str, folder: Path) -> None:
        self.workload = workload
        self.folder = folder

    @functools.cached_property
    def recording(self) -> Recording:
        """Two steps on fake tensors: the second is steady."""
        return program.trace(WORKLOADS[self.workload].make)

    def on(self, device: str) -> tuple[DeviceProfile, StepTrace]:
        """Return the step with durations from the roofline of this device."""
        return device_profiles.find(device), read_step(self._path(device))

    def asked(self, device: str) -> Ints:
        """Return the requested bytes of each tensor of the step, before rounding."""
        path = self._path(device)
        asked = {event.id: event.bytes for event in read(path)[1] if isinstance(event, Alloc)}
        return np.array([asked[source] for source in read_step(path).source.tolist()], np.int64)

    def _path(self, device: str) -> Path:
        path = self.folder / f"{self.workload}_{device}_{_version()}.jsonl.gz"
        if not path.is_file():
            self._write(device_profiles.find(device), path)
        return path

    def _write(self, profile: DeviceProfile, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        note = WORKLOADS[self.workload].title
        # No half file is ever taken for a whole one.
        part = path.with_name(f"{os.getpid()}.{path.name}")
        with Writer(part, Header(profile.name, "fake tensors", note)) as writer:
            for event in self.recording.device_events(roofline.clock(profile)):
                writer.write(event)
        part.rename(path)


@functools.cache
def _version() -> str:
    digest = hashlib.sha256(metadata.version("torch").encode())
    for path in sorted(_SOURCES):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
