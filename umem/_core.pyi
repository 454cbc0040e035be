"""The native core: src/bindings."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any, TypeAlias, TypedDict, overload

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
    piece_bytes: int
    policy: str
    backing: str
    disk: str
    disk_bytes: int
    staging_bytes: int
    disk_bytes_a_day: int
    guard: bool
    watchdog_s: float
    backed: bool
    link_in_bytes_per_us: float
    link_out_bytes_per_us: float
    fault_us: float
    def __init__(self) -> None: ...
    def __eq__(self, other: object) -> bool: ...

MAX_PLANS: int  # that a device keeps

def headroom_bytes(nbytes: int) -> int: ...  # that a budget leaves free, of so many

class Profile(TypedDict):
    name: str
    gb_per_s_in: float
    gb_per_s_out: float
    fault_us: float
    memory_bytes: int
    source: str

Span: TypeAlias = tuple[int, int]  # address, bytes

class Whereabouts(TypedDict):
    bytes: int
    resident_bytes: int
    evicted_bytes: int
    discarded_bytes: int
    unknown_bytes: int
    arriving_bytes: int
    leaving_bytes: int
    pins: int
    exempt: bool
    in_use: bool
    tag: str
    family: str
    scope: str

class PlacedBlock(Whereabouts):
    address: int

class DeviceMemory(TypedDict):
    device: int
    free_bytes: int  # as the driver has it
    total_bytes: int
    allowed_bytes: int  # by torch's per_process_memory_fraction
    budget_bytes: int
    requested_bytes: int  # the budget set for this device alone; 0: none
    held_bytes: int  # of the budget
    dropped_bytes: int
    unused_bytes: int

class Recorded(TypedDict):
    kind: Ints
    id: Ints
    bytes: Ints
    address: Ints
    device: Ints  # of allocs
    us: Floats
    reads: Ints
    writes: Ints
    accesses: Ints
    part_access: Ints  # of them, whose bytes from `begin` to `end` are used, and no others
    begin: Ints
    end: Ints
    name: list[str]
    family: list[str]
    before: int  # of them: allocs of blocks that were alive at the start
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

class Kind(IntEnum):
    """Lifetime of a tensor relative to the step. The step repeats: its start follows its end."""

    PERSISTENT = 0  # alive all the time: weights, optimizer states
    TRANSIENT = 1  # allocated and freed inside the step
    MADE = 2  # allocated in the step, freed in a later one
    CARRIED = 3  # a MADE one in the next step, until its free; `next_alias` names it

class LayoutStatus(TypedDict):
    entries: int
    bytes: int
    hits: int
    misses: int
    followed: bool

class PlanStatus(TypedDict):
    plans: list[int]  # their numbers
    active: int  # the number of the plan that acts; 0: none
    complete: int  # the number of the plan that the last step followed; 0: none
    hits: int  # of the last step
    misses: int

# A unit that may leave: id, bytes, tag, family, last use, whether it is a page of small blocks.
Candidate = tuple[int, int, str, str, int, bool]
# (candidates, resident bytes, budget bytes, bytes that have to leave) -> ids
Advisor = Callable[[list[Candidate], int, int, int], Iterable[int]]

def start(options: Options) -> None: ...
def stop() -> None: ...
def running() -> bool: ...
def current_options() -> Options: ...
def set_budget(budget_bytes: int, host_budget_bytes: int) -> None: ...
def policies() -> list[str]: ...
def profiles() -> list[Profile]: ...
def stats(device: int | None = None) -> dict[str, int]: ...  # None: the sum
def opened_devices() -> list[int]: ...
def stats_docs() -> dict[str, str]: ...
def faults_by_operator() -> list[tuple[str, int]]: ...
def reset_peak_stats() -> None: ...
def trim() -> None: ...
def step() -> None: ...  # the program says so; from then on only it does
def guess_step() -> None: ...
def steps() -> int: ...
def is_interrupt(error: BaseException) -> bool: ...
def set_step_listener(listener: Callable[[], None] | None) -> None: ...
def record_start(sink: str) -> None: ...
def record_stop(sink: str) -> None: ...
def record_take(sink: str) -> Recorded: ...
def record_lines(sink: str, final: bool) -> tuple[bytes, int]: ...
def record_waiting(sink: str) -> int: ...
@overload
def prefetch(ptr: int, nbytes: int) -> None: ...
@overload
def prefetch(spans: list[Span]) -> None: ...
@overload
def evict(ptr: int, nbytes: int) -> None: ...
@overload
def evict(spans: list[Span]) -> None: ...
def read_mostly(address: int, nbytes: int, on: bool) -> None: ...
def discard(ptr: int, nbytes: int, stream: int = 0) -> int: ...
def place_in_file(ptr: int, nbytes: int, path: str, offset: int) -> bool: ...
def own_pages(ptr: int, nbytes: int) -> int: ...
def staying(spans: list[Span]) -> list[bool]: ...
def hold(spans: list[Span], kind: str, labels: list[str]) -> int: ...  # "pin" or "exempt"
def exempt_all(tag: str, min_bytes: int, max_bytes: int) -> int: ...
def unhold(number: int) -> None: ...
def unpin(ptr: int, nbytes: int) -> bool: ...
def where(ptr: int, nbytes: int) -> Whereabouts: ...
def placed_blocks() -> list[PlacedBlock]: ...
def set_scope(name: str) -> str: ...
def tag(ptr: int, tag: str) -> bool: ...
def owns(ptr: int) -> bool: ...
def record_stream(ptr: int, stream: int) -> bool: ...
def stream_captures(device: int, stream: int) -> bool: ...
def wait_stream(device: int, waiter: int, on: int) -> None: ...
def allocate(nbytes: int, device: int = 0, stream: int = 0) -> int: ...
def release(ptr: int) -> bool: ...
def probe_cuda() -> CudaProbe: ...
def op_begin(
    pointers: list[int],
    family: str,
    phase: str,
    name: str = "",
    n_overwritten: int = 0,
    n_written: int = 0,
    parts: Mapping[int, tuple[int, int]] = ...,
    device: int = 0,
    stream: int = 0,
) -> int: ...
def op_end(token: int, tag: str) -> None: ...
def range_bytes(block: int) -> int: ...
def finer_piece(block: int) -> int: ...
def cut_sizes() -> list[int]: ...
def install_plan(columns: Mapping[str, npt.NDArray[np.int64] | int], device: int = 0) -> int: ...
def number_of_op(name: str) -> int: ...
def clear_plans(device: int = 0) -> None: ...
def replace_plan(number: int, columns: Mapping[str, object], device: int = 0) -> None: ...
def roll_back_plan(number: int, device: int = 0) -> None: ...
def plan_status(device: int = 0) -> PlanStatus: ...
def room_ahead(device: int = 0) -> int: ...
def install_layout(
    sizes: Ints, offsets: Ints, total: int, device: int = 0, stays: bool = False
) -> None: ...
def clear_layout(device: int = 0) -> None: ...
def layout_status(device: int = 0) -> LayoutStatus: ...
def choose_gaps(
    begin: Ints, end: Ints, wrap: Ints, sizes: Ints, idle_us: Floats, over: Ints, order: Ints
) -> Ints: ...
def return_starts(
    start: Ints, end: Ints, sizes: Ints, occupancy: Ints, room: int
) -> tuple[Ints, Ints]: ...
def step_estimate(
    op_us: Floats,
    slack_us: Floats,
    *,
    start: Ints,
    out_us: Floats,
    in_us: Floats,
    quiet: Ints,
    returns: Ints,
    return_start: Ints,
    return_end: Ints,
    room_us: Floats,
    written: Ints,
    due: Ints,
    copy_us: Floats,
    parameter: Ints,
    gradient: Ints,
    work_us: Floats,
    never: int,
) -> tuple[float, Ints]: ...
def family_of(name: str) -> str: ...
def set_advisor(advisor: Advisor | None) -> None: ...
def set_awaited(storages: Sequence[int], arrive: Callable[[int], None]) -> None: ...
def bring_awaited() -> None: ...
def sleep(
    tags: Iterable[str], discard: bool
) -> tuple[int, int, bool]: ...  # number, bytes, shown as free
def wake(tags: Iterable[str], number: int) -> int: ...  # 0: of all sleeps
def start_transfer_log() -> None: ...
def take_transfer_log() -> tuple[
    list[tuple[int, str, int, int, int]], int
]: ...  # device, what, bytes, begin and end in ns since 1970; how many more there were
def tags() -> list[str]: ...
def bytes_by_tag() -> dict[str, tuple[int, int, int]]: ...  # blocks, bytes, resident bytes
def device_memory() -> list[DeviceMemory]: ...
def set_device_budget(device: int, nbytes: int) -> None: ...

class Replay:
    """A step on the runtime, in virtual time; one at a time, and only while umem is off."""

    def __init__(self, options: Options, backed: bool = False) -> None: ...
    def set_step(self, step: Mapping[str, object]) -> None: ...
    def run_step(self, repeats: int) -> None: ...
    def run_logged(self) -> None: ...
    def moves(self) -> dict[str, Any]: ...
    def placed(self) -> Ints: ...
    def address(self, tensor: int) -> int: ...
    def figures(self) -> dict[str, float]: ...
    def op_end_us(self) -> Floats: ...
    def close(self) -> None: ...
