"""Types for the numbers that identify a tensor, from torch to the native engine.

    StorageKey -> BlockId -> TensorIndex -> piece -> column of a plan -> Address

All are integers, and one passed in place of another would go unnoticed, so signatures name them.
The two without a type exist only as arrays: a piece is an index into
`StepTrace.pieces`, whose `whole` has the tensor of each; an installed plan has columns for large
pieces alone (`policies.lowering`). Arrays of any of them stay plain int64.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import NewType

# The address of torch's StorageImpl while that is alive; a later storage may have the same one.
StorageKey = NewType("StorageKey", int)
# A block of a trace, from its Alloc to its Free.
BlockId = NewType("BlockId", int)
# A tensor of one StepTrace: an index into its columns [m]; `StepTrace.block_of` has its block.
TensorIndex = NewType("TensorIndex", int)
# A byte of the device's memory; 0 is nowhere.
Address = NewType("Address", int)


def block_ids() -> Iterator[BlockId]:
    """Yield the ids 0, 1, 2, ... of new blocks."""
    return map(BlockId, count())
