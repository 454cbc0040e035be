"""The steps of workloads on devices: recorded on fake tensors once, then kept as files."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import numpy as np

from policies.workloads import WORKLOADS
from umem import devices
from umem.devices import DeviceProfile
from umem.plan import roofline, tracer
from umem.plan.recording import Recording
from umem.trace.reader import read
from umem.trace.schema import Alloc, Header
from umem.trace.step import Ints, StepTrace
from umem.trace.steps import read_step
from umem.trace.writer import Writer

HERE = Path(__file__).resolve().parent
UMEM = HERE.parents[1] / "umem"
# What decides what is in a trace: with any other content the old files are not used.
_SOURCES = (*HERE.glob("*s.py"), UMEM / "demo" / "nets.py", *UMEM.glob("plan/*.py"))


class Traces:
    """The steps of one workload; it is recorded at the first device whose file is missing."""

    def __init__(self, workload: str, folder: Path) -> None:
        self.workload = workload
        self.folder = folder

    @functools.cached_property
    def recording(self) -> Recording:
        """Two steps on fake tensors: the second is steady."""
        return tracer.trace(WORKLOADS[self.workload].make)

    def on(self, device: str) -> tuple[DeviceProfile, StepTrace]:
        """The step with the durations that the roofline of this device gives."""
        return devices.find(device), read_step(self._path(device))

    def asked(self, device: str) -> Ints:
        """The bytes that each tensor of the step asked for, before they are rounded up."""
        path = self._path(device)
        asked = {event.id: event.bytes for event in read(path)[1] if isinstance(event, Alloc)}
        return np.array([asked[source] for source in read_step(path).source.tolist()], np.int64)

    def _path(self, device: str) -> Path:
        path = self.folder / f"{self.workload}_{device}_{_version()}.jsonl.gz"
        if not path.is_file():
            self._write(devices.find(device), path)
        return path

    def _write(self, profile: DeviceProfile, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        note = WORKLOADS[self.workload].title
        part = path.with_suffix(".part")  # no half file is ever taken for a whole one
        with Writer(part, Header(profile.name, "fake tensors", note)) as writer:
            for event in self.recording.events(roofline.clock(profile)):
                writer.write(event)
        part.rename(path)


@functools.cache
def _version() -> str:
    digest = hashlib.sha256()
    for path in sorted(_SOURCES):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
