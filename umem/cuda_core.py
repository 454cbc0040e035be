"""cuda.core in umem's memory: `device.memory_resource = umem.cuda_core.MemoryResource()`."""

from __future__ import annotations

from .integrations.cuda_core import UmemMemoryResource as MemoryResource

__all__ = ["MemoryResource"]
