"""The tensors that a training step uses, op by op, recorded in plain torch for the lower bound."""

from __future__ import annotations

from typing import Any

from umem.demo.training import Training


def record(training: Training) -> dict[str, Any]:
    """Train one step and say what it did, as JSON can carry it.

    `ops` are (seconds, numbers of the tensors used) in order, `sizes` the bytes of each tensor,
    `persistent` those that were there before the step and outlive it, `written` those that it
    wrote. Tensors are storages: views count as what they view.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Recorder(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.storages = _Storages()
            self.ops: list[tuple[Any, Any, list[int]]] = []

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            given = {self.storages.number(x, made=False) for x in inputs if x.is_cuda}
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            result = func(*args, **kwargs)
            end.record()
            outputs = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
            made = {self.storages.number(x, made=True) for x in outputs if x.is_cuda}
            if func.is_view:
                return result
            writes = _written_arguments(func, args, kwargs)
            self.storages.written |= (made - given) | {
                self.storages.number(x, made=False) for x in writes if x.is_cuda
            }
            if given or made:
                self.ops.append((begin, end, sorted(given | made)))
            return result

    recorder = Recorder()
    with recorder:
        training.step()
    torch.cuda.synchronize()
    storages = recorder.storages
    return {
        "ops": [(b.elapsed_time(e) / 1e3, used) for b, e, used in recorder.ops],
        "sizes": storages.sizes,
        "persistent": storages.persistent(),
        "written": sorted(storages.written),
    }


class _Storages:
    """Numbers storages in the order in which they are met."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._references: list[Any] = []  # weak, and kept: else an address would be used again
        self.sizes: list[int] = []
        self._old: list[int] = []  # met first as an input
        self.written: set[int] = set()

    def number(self, tensor: Any, made: bool) -> int:
        from torch.multiprocessing.reductions import StorageWeakRef

        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._numbers:
            self._numbers[key] = len(self.sizes)
            self._references.append(StorageWeakRef(storage))
            self.sizes.append(storage.nbytes())
            if not made:
                self._old.append(self._numbers[key])
        return self._numbers[key]

    def persistent(self) -> list[int]:
        """Return the initial tensors that are still alive."""
        return [number for number in self._old if not self._references[number].expired()]


def _written_arguments(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the tensors that an op changes in place."""
    import torch
    from torch.utils._pytree import tree_leaves

    found = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        found += [x for x in tree_leaves(value) if isinstance(x, torch.Tensor)]
    return found
