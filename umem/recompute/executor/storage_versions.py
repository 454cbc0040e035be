"""Values that are recomputed: their inputs, and the run that rebuilds them.

A value is what a storage holds between two writes. The ops of a forward pass that are to run again
are `Node`s, whose arguments refer to values by their place in the storage, so that views cost
nothing, and an op in place makes a new value from the old one.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ...capture import op_semantics
from ...capture.op_semantics import OpSemantics, Place
from ...errors import StateError

READ, WRITE, SCRATCH = range(3)


class Value:
    """The content of a storage between two writes: `held`, to be made by `node`, or neither.

    `held` shares memory and version with the program's tensor; a version other than `version`
    says that the program has changed it since.
    """

    __slots__ = ("__weakref__", "held", "made", "node", "reads", "storage", "version")

    def __init__(self, version: int, held: torch.Tensor | None, node: Node | None) -> None:
        self.version = version
        self.held = held
        self.node = node
        self.made = node is not None  # by an op that runs again, whose result nothing else sees
        self.reads = 0  # the number of ops and handles that have referred to it
        self.storage: weakref.ref[Any] | None = None  # tells when the program has released it

    def checked(self) -> torch.Tensor:
        """Return `held`, unless it was changed.

        Raises:
            StateError: it was.
        """
        assert self.held is not None
        if self.held._version != self.version:
            raise StateError(changed(self.held, self.version))
        return self.held


@dataclass(frozen=True, eq=False, slots=True)
class Ref:
    """A tensor argument: a value, seen through a view."""

    value: Value | None  # None: its content does not matter
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # in elements
    dtype: torch.dtype
    device: torch.device
    bytes: int  # of the storage
    use: int = READ

    def of(self, base: torch.Tensor) -> torch.Tensor:
        """Return the view of this place in the storage of `base`."""
        if (
            base.dtype == self.dtype
            and base.storage_offset() == self.offset
            and base.shape == self.size
            and base.stride() == self.stride
        ):
            return base
        return self.in_storage(base.untyped_storage())

    def in_storage(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the view of this place in a storage."""
        empty = torch.empty(0, dtype=self.dtype, device=self.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


def refer(tensor: torch.Tensor, value: Value | None, use: int = READ) -> Ref:
    """Return a reference to `value` through the view that `tensor` is."""
    if value is not None:
        value.reads += 1
    return Ref(
        value,
        tuple(tensor.shape),
        tensor.stride(),
        int(tensor.storage_offset()),
        tensor.dtype,
        tensor.device,
        tensor.untyped_storage().nbytes(),
        use,
    )


@dataclass(eq=False, slots=True)
class Node:
    """An op to run again. It holds its inputs; its outputs hold it."""

    operator: OpSemantics
    func: Any
    random: RandomState | None
    scratch: frozenset[Place]  # arguments that it writes and whose content does not matter
    args: tuple[Any, ...] = ()  # tensors replaced by their Refs
    named: dict[str, Any] = field(default_factory=dict)
    refs: list[Ref] = field(default_factory=list)
    results: int = 0  # the number of tensors it returned
    # By position among the results, and by the argument that was written.
    outputs: list[tuple[int, weakref.ref[Value]]] = field(default_factory=list)
    written: list[tuple[Ref, weakref.ref[Value]]] = field(default_factory=list)


class RandomState:
    """The state of a random generator when an op began to draw from it."""

    def __init__(self, device: torch.device, generator: torch.Generator | None) -> None:
        self.device, self.generator = device, generator
        self.state = self._get()

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Put the generator back to this state within the context."""
        now = self._get()
        self._set(self.state)
        try:
            yield
        finally:
            self._set(now)

    def _get(self) -> torch.Tensor:
        if self.generator is not None:
            return self.generator.get_state()
        if self.device.type == "cuda":
            return torch.cuda.get_rng_state(self.device)
        return torch.get_rng_state()

    def _set(self, state: torch.Tensor) -> None:
        if self.generator is not None:
            self.generator.set_state(state)
        elif self.device.type == "cuda":
            torch.cuda.set_rng_state(state, self.device)
        else:
            torch.set_rng_state(state)


def rebuild(wanted: Value, keep: bool) -> torch.Tensor:
    """Run again what makes `wanted`; return any tensor over its storage.

    Args:
        keep: what is rebuilt stays for as long as anything refers to it, and what it came from is
            let go; else only the tensor returned is left.

    Raises:
        StateError: the program has changed an input since the forward pass.
    """
    if wanted.held is not None:
        return wanted.checked()
    order = _order(wanted)
    # As in the forward pass: some ops make less where no gradient is wanted. No gradient
    # is computed, because no tensor here requires one.
    with torch.enable_grad():
        if keep:
            while order:
                _keep(order.pop())
            assert wanted.held is not None
            return wanted.held
        return _passing(wanted, order)


def _keep(node: Node) -> None:
    """Run the node; its outputs hold their tensors from now on, and no longer the node."""
    for value, tensor in _run(node, {}):
        value.held, value.version, value.node = tensor, tensor._version, None


def _passing(wanted: Value, order: list[Node]) -> torch.Tensor:
    """Run the nodes, last first; each intermediate tensor goes after its last reader."""
    left = Counter(ref.value for node in order for ref in node.refs if ref.value is not None)
    left[wanted] += 1
    found: dict[Value, torch.Tensor] = {}
    while order:
        node = order.pop()
        found.update((v, tensor) for v, tensor in _run(node, found) if left[v])
        for ref in node.refs:
            if ref.value is None:
                continue
            left[ref.value] -= 1
            if not left[ref.value]:
                found.pop(ref.value, None)
    return found[wanted]


def _order(wanted: Value) -> list[Node]:
    """Return the nodes to run, the first one last."""
    order: list[Node] = []
    seen: set[int] = set()
    stack = [(wanted.node, False)]
    while stack:
        node, inputs_done = stack.pop()
        assert node is not None
        if inputs_done:
            order.append(node)
        elif id(node) not in seen:
            seen.add(id(node))
            stack.append((node, True))
            for ref in node.refs:
                if ref.value is not None and ref.value.held is None:
                    stack.append((ref.value.node, False))
    order.reverse()
    return order


def _run(node: Node, found: dict[Value, torch.Tensor]) -> list[tuple[Value, torch.Tensor]]:
    """Return the values that the node makes, as far as anything refers to them still."""
    own: dict[Value, torch.UntypedStorage] = {}  # private copies of what is written
    for ref in node.refs:
        if ref.use == WRITE and ref.value is not None and ref.value not in own:
            own[ref.value] = _to_write(ref.value, found)
    written: dict[int, torch.Tensor] = {}  # by id of the Ref

    def tensor(ref: Ref) -> torch.Tensor:
        if ref.value is None:
            made = ref.in_storage(storage_of(ref.bytes, ref.device))
            if ref.use == SCRATCH:
                made.zero_()
            written[id(ref)] = made
            return made
        storage = own.get(ref.value)
        if storage is None:
            return ref.of(_content(ref.value, found))
        made = written[id(ref)] = ref.in_storage(storage)
        return made

    args, named = _filled(node.args, tensor), _filled(node.named, tensor)
    with contextlib.nullcontext() if node.random is None else node.random.again():
        results = list(op_semantics.tensors([node.func(*args, **named)]))
    if len(results) != node.results:
        raise StateError(
            f"{node.operator.overload} gave {node.results} tensors in the forward pass and "
            f"{len(results)} when it ran again, so that no activation is rebuilt from it; turn "
            "recomputation off for this model by umem.deoptimize(model)"
        )
    made = [(value(), results[i]) for i, value in node.outputs]
    made += [(value(), written[id(ref)]) for ref, value in node.written]
    return [(value, tensor) for value, tensor in made if value is not None]


def _content(value: Value, found: dict[Value, torch.Tensor]) -> torch.Tensor:
    tensor = found.get(value)
    return value.checked() if tensor is None else tensor


def _to_write(value: Value, found: dict[Value, torch.Tensor]) -> torch.UntypedStorage:
    """Return the value's content in a storage that may be changed; a copy if others need it."""
    storage = _content(value, found).untyped_storage()
    return storage if value.made and value.reads == 1 else copied(storage)


def _filled(value: Any, tensor: Any) -> Any:
    if isinstance(value, Ref):
        return tensor(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_filled(item, tensor) for item in value)
    if isinstance(value, dict):
        return {key: _filled(item, tensor) for key, item in value.items()}
    return value


def storage_of(count: int, device: torch.device) -> torch.UntypedStorage:
    """Return a new storage of `count` bytes."""
    return torch.empty(count, dtype=torch.uint8, device=device).untyped_storage()


def copied(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Return a storage with the same content."""
    copy = storage_of(storage.nbytes(), storage.device)
    copy.copy_(storage)
    return copy


def changed(tensor: torch.Tensor, expected: int) -> str:
    """Return the message for a tensor that backward needs and that was changed."""
    return (
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: a {tensor.dtype} tensor of shape {list(tensor.shape)} is at version "
        f"{tensor._version}; expected version {expected} instead. Activations that were dropped "
        "are rebuilt from it in backward: change it after backward, or change a clone(), or turn "
        "recomputation off for this model by umem.deoptimize(model)"
    )
