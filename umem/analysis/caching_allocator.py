"""A model of torch's caching allocator: the memory it reserves for requests, without a GPU.

The rules are those of c10/cuda/CUDACachingAllocator.cpp (torch 2.13) with its default settings, for
one stream: `round_size`, `get_pool`, `get_allocation_size`, `get_free_block`, `should_split`,
`try_merge_blocks`, `release_cached_blocks`, and with `expandable_segments:True` also
`find_expandable_block` and `map_block`. Not modelled, because they are off by default:
`max_split_size_mb`, `garbage_collection_threshold`, `roundup_power2_divisions`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..base.units import MIB, format_bytes
from ..errors import OutOfMemoryError
from ..trace.schema import Alloc, Event, Free

MIN_BLOCK = 512  # kMinBlockSize: requests are rounded up to multiples of it
SMALL_SIZE = MIB  # kSmallSize: the largest request of the small pool
SMALL_BUFFER = 2 * MIB  # kSmallBuffer: segments of the small pool
LARGE_BUFFER = 20 * MIB  # kLargeBuffer: segments of requests below MIN_LARGE_ALLOC
MIN_LARGE_ALLOC = 10 * MIB  # kMinLargeAlloc: larger requests get segments of their size,
ROUND_LARGE = 2 * MIB  # kRoundLarge: rounded up to a multiple of this
_ADDRESS_SPACE = LARGE_BUFFER << 20  # between the two expandable segments: more than any device has


@dataclass(eq=False)
class _Block:
    """A part of a segment, linked to its neighbours by address."""

    address: int
    size: int
    pool: _Pool
    allocated: bool = False
    mapped: bool = True
    before: _Block | None = None
    after: _Block | None = None


@dataclass(eq=False)
class _Pool:
    """One pool: its free blocks by (size, address), and its unmapped ones by address."""

    small: bool
    free: list[tuple[int, int]] = field(default_factory=list)
    unmapped: list[int] = field(default_factory=list)

    @property
    def granule(self) -> int:
        """Bytes that an expandable segment maps per call."""
        return SMALL_BUFFER if self.small else LARGE_BUFFER


def round_size(nbytes: int) -> int:
    """Return the rounded size of a request of `nbytes`."""
    return max(-(-nbytes // MIN_BLOCK), 1) * MIN_BLOCK


def segment_size(size: int) -> int:
    """Return the bytes to request from the driver if no cached block fits."""
    if size <= SMALL_SIZE:
        return SMALL_BUFFER
    return LARGE_BUFFER if size < MIN_LARGE_ALLOC else -(-size // ROUND_LARGE) * ROUND_LARGE


class CachingAllocator:
    """The allocator's state over requests and releases in program order; sizes in bytes.

    Args:
        expandable: as with `expandable_segments:True`.
        limit: device bytes that it may reserve; None: no limit.
    """

    def __init__(self, *, expandable: bool = False, limit: int | None = None) -> None:
        self.reserved = self.peak_reserved = 0  # obtained from the driver
        self.allocated = self.peak_allocated = 0  # in blocks handed out, rounded
        self.driver_calls = 0  # segments created and freed; granules if they are expandable
        self._expandable = expandable
        self._limit = limit
        self._pools = {small: _Pool(small) for small in (True, False)}
        self._blocks: dict[int, _Block] = {}
        self._next_address = SMALL_BUFFER
        if expandable:
            for number, pool in enumerate(self._pools.values()):
                block = _Block((number + 1) * _ADDRESS_SPACE, _ADDRESS_SPACE, pool, mapped=False)
                self._blocks[block.address] = block
                pool.unmapped.append(block.address)

    def malloc(self, nbytes: int) -> int:
        """Allocate a block and return its address.

        Raises:
            OutOfMemoryError: the limit is reached, even after the cache was emptied.
        """
        size = round_size(nbytes)
        pool = self._pools[size <= SMALL_SIZE]
        block = self._cached(pool, size) or self._grown(pool, size)
        if block is None:
            self.empty_cache()
            block = self._grown(pool, size)
        if block is None:
            raise OutOfMemoryError(
                f"the model of torch's allocator cannot allocate {format_bytes(nbytes)}: the limit "
                f"is {format_bytes(self._limit or 0)}, {format_bytes(self.allocated)} are "
                f"allocated, and {format_bytes(self.reserved - self.allocated)} reserved but "
                "unallocated"
            )
        rest = block.size - size
        if rest >= MIN_BLOCK if pool.small or self._expandable else rest > SMALL_SIZE:
            self._list_free(self._cut(block, size))
        block.allocated = True
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block.address

    def free(self, address: int) -> None:
        """Return the block to the cache.

        Raises:
            KeyError: no block is allocated at `address`.
        """
        block = self._blocks[address]
        if not block.allocated:
            raise KeyError(address)
        block.allocated = False
        self.allocated -= block.size
        self._list_free(self._joined(block))

    def empty_cache(self) -> None:
        """Free all unused segments, or unused granules of expandable ones."""
        for pool in self._pools.values():
            for _, address in tuple(pool.free):
                block = self._blocks[address]
                if self._expandable:
                    self._unmap(block)
                elif block.before is None and block.after is None:
                    self._unlist(block)
                    del self._blocks[address]
                    self._book(-block.size, 1)

    @property
    def largest_free(self) -> int:
        """The bytes of the largest cached block."""
        return max((pool.free[-1][0] for pool in self._pools.values() if pool.free), default=0)

    def _cached(self, pool: _Pool, size: int) -> _Block | None:
        """Return the smallest free block of at least `size`, the lowest of equals.

        A block that can grow into unmapped space counts that space, so others are used first.
        """
        at = bisect_left(pool.free, (size, 0))
        if at == len(pool.free):
            return None
        if self._expandable:
            while at + 1 < len(pool.free) and self._reach(pool, at + 1) < self._reach(pool, at):
                at += 1
        block = self._blocks[pool.free[at][1]]
        del pool.free[at]
        return block

    def _reach(self, pool: _Pool, at: int) -> int:
        block = self._blocks[pool.free[at][1]]
        return block.size + (block.after.size if block.after and not block.after.mapped else 0)

    def _grown(self, pool: _Pool, size: int) -> _Block | None:
        """Return a block of at least `size` with new driver memory; None at the limit."""
        if self._expandable:
            return self._mapped(pool, size)
        total = segment_size(size)
        if not self._room(total):
            return None
        block = _Block(self._next_address, total, pool)
        self._next_address += -(-total // ROUND_LARGE) * ROUND_LARGE
        self._blocks[block.address] = block
        self._book(total, 1)
        return block

    def _mapped(self, pool: _Pool, size: int) -> _Block | None:
        """Map the first unmapped block that is large enough with the free blocks around it."""
        for address in pool.unmapped:
            block = self._blocks[address]
            if block.before and not block.before.allocated:
                block = block.before
            if self._free_from(block) >= size:
                break
        while not block.mapped or block.size < size:
            more = block if not block.mapped else block.after
            assert more is not None
            have = block.size if block.mapped else 0
            wanted = min(-(-(size - have) // pool.granule) * pool.granule, more.size)
            if not self._room(wanted):
                return None
            block = self._map(more, wanted)
        self._unlist(block)
        return block

    def _free_from(self, block: _Block | None) -> int:
        total = 0
        while block is not None and not block.allocated:
            total += block.size
            block = block.after
        return total

    def _map(self, block: _Block, size: int) -> _Block:
        """Map the first `size` bytes; return the free block that contains them."""
        block.pool.unmapped.remove(block.address)
        if size < block.size:
            self._list_unmapped(self._cut(block, size))
        block.mapped = True
        self._book(size, size // block.pool.granule)
        block = self._joined(block)
        self._list_free(block)
        return block

    def _unmap(self, block: _Block) -> None:
        granule = block.pool.granule
        begin = -(-block.address // granule) * granule
        end = (block.address + block.size) // granule * granule
        if begin >= end:
            return
        self._unlist(block)
        if begin > block.address:
            left, block = block, self._cut(block, begin - block.address)
            self._list_free(left)
        if end < block.address + block.size:
            self._list_free(self._cut(block, end - block.address))
        self._book(-block.size, block.size // granule)
        block.mapped = False
        self._list_unmapped(self._joined(block))

    def _cut(self, block: _Block, size: int) -> _Block:
        """Shrink the block to its first `size` bytes, and return the rest, which is in no list."""
        rest = _Block(
            block.address + size, block.size - size, block.pool,
            mapped=block.mapped, before=block, after=block.after,
        )  # fmt: skip
        if rest.after:
            rest.after.before = rest
        block.after, block.size = rest, size
        self._blocks[rest.address] = rest
        return rest

    def _joined(self, block: _Block) -> _Block:
        """Merge the block with its free neighbours, which leave their lists."""
        for other in (block.before, block.after):
            if other is None or other.allocated or other.mapped != block.mapped:
                continue
            if other.mapped:
                self._unlist(other)
            else:
                other.pool.unmapped.remove(other.address)
            left, right = sorted((block, other), key=lambda b: b.address)
            left.size += right.size
            left.after = right.after
            if left.after:
                left.after.before = left
            del self._blocks[right.address]
            block = left
        return block

    def _list_free(self, block: _Block) -> None:
        insort(block.pool.free, (block.size, block.address))

    def _list_unmapped(self, block: _Block) -> None:
        insort(block.pool.unmapped, block.address)

    def _unlist(self, block: _Block) -> None:
        key = block.size, block.address
        at = bisect_left(block.pool.free, key)
        assert block.pool.free[at] == key
        del block.pool.free[at]

    def _room(self, size: int) -> bool:
        return self._limit is None or self.reserved + size <= self._limit

    def _book(self, size: int, calls: int) -> None:
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self.driver_calls += calls


def replay(events: Iterable[Event], limit: int | None = None) -> CachingAllocator:
    """Return the allocator after a recorded program, without umem, ran on it.

    Args:
        events: the program's allocations and releases; others are skipped.
        limit: device bytes that it may reserve; None: no limit.

    Raises:
        OutOfMemoryError: the limit is too small, even after the cache was emptied.
    """
    model = CachingAllocator(limit=limit)
    held: dict[int, int] = {}
    for event in events:
        if isinstance(event, Alloc) and event.bytes:
            held[event.id] = model.malloc(event.bytes)
        elif isinstance(event, Free) and event.id in held:
            model.free(held.pop(event.id))
    return model
