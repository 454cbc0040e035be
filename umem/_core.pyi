"""The native core: src/bindings."""

from collections.abc import Callable, Mapping
from typing import TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]

__version__: str

class Options:
    device: str
    profile: str
    device_bytes: int
    budget_bytes: int
    budget_percent: float
    host_budget_bytes: int
    min_swap_bytes: int
    floor_bytes: int
    policy: str
    guard: bool
    def __init__(self) -> None: ...
    def __eq__(self, other: object) -> bool: ...

class Profile(TypedDict):
    name: str
    gb_per_s_in: float
    gb_per_s_out: float
    fault_us: float
    memory_bytes: int
    source: str

class Block(TypedDict):
    base: int
    bytes: int
    tag: str
    family: str
    state: str
    pins: int

class Recorded(TypedDict):
    kind: Ints
    id: Ints
    bytes: Ints
    address: Ints
    us: Floats
    reads: Ints
    writes: Ints
    accesses: Ints
    name: list[str]
    family: list[str]
    dropped: int

class CudaDevice(TypedDict):
    name: str
    pci_bus_id: str
    total_bytes: int
    compute_capability: str
    managed_memory: bool
    concurrent_managed_access: bool
    pageable_memory_access: bool
    pageable_uses_host_page_tables: bool
    integrated: bool

class CudaProbe(TypedDict):
    available: bool
    reason: str
    driver_version: int
    concurrent_managed_access: bool
    batch_prefetch: bool
    discard: bool
    discard_and_prefetch: bool
    location_info: bool
    devices: list[CudaDevice]

class PlanStatus(TypedDict):
    plans: int
    active: int  # the number of the plan that acts; 0: none
    complete: int  # of the one that the last step went by; 0: none
    hits: int  # of the last step
    misses: int

def start(options: Options) -> None: ...
def stop() -> None: ...
def running() -> bool: ...
def current_options() -> Options: ...
def set_budget(budget_bytes: int, host_budget_bytes: int) -> None: ...
def set_policy(name: str) -> None: ...
def policies() -> list[str]: ...
def profiles() -> list[Profile]: ...
def stats() -> dict[str, int]: ...
def stats_docs() -> dict[str, str]: ...
def reset_peak_stats() -> None: ...
def trim() -> None: ...
def step() -> None: ...
def set_step_listener(listener: Callable[[], None] | None) -> None: ...
def record_start(sink: str) -> None: ...
def record_stop(sink: str) -> None: ...
def record_take(sink: str) -> Recorded: ...
def record_lines(sink: str, all: bool) -> tuple[bytes, int]: ...
def record_waiting(sink: str) -> int: ...
def prefetch(ptr: int, nbytes: int) -> None: ...
def evict(ptr: int, nbytes: int) -> None: ...
def read_mostly(address: int, nbytes: int, on: bool) -> None: ...
def tag(ptr: int, tag: str) -> bool: ...
def owns(ptr: int) -> bool: ...
def record_stream(ptr: int, stream: int) -> bool: ...
def allocate(nbytes: int, device: int = 0, stream: int = 0) -> int: ...
def release(ptr: int) -> bool: ...
def blocks() -> list[Block]: ...
def probe_cuda() -> CudaProbe: ...
def op_begin(
    pointers: list[int],
    family: str,
    phase: str,
    name: str = "",
    n_overwritten: int = 0,
    n_written: int = 0,
) -> int: ...
def op_end(token: int, tag: str) -> None: ...
def install_plan(columns: Mapping[str, npt.NDArray[np.int64] | int]) -> int: ...
def clear_plans() -> None: ...
def plan_status() -> PlanStatus: ...
