"""Values that are recomputed: their inputs, and the run that rebuilds them.

A value is a storage's content between two writes. Ops of the forward pass to run again are `Node`s,
whose arguments refer to values by their place in the storage, so that views cost nothing, and an
in-place op makes a new value from the old one.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from ...base import locks
from ...capture import op_semantics
from ...capture.op_semantics import OpSemantics, Place
from ...errors import StateError

READ, WRITE, SCRATCH = range(3)
_of_default = locks.reentrant()  # it is the process's
_of_random = locks.reentrant()  # and so are the default generators


class Value:
    """The content of a storage between two writes: `held`, made by `node`, or neither.

    `held` shares memory and version with the program's tensor; a version other than `version`
    means that the program has since changed it.
    """

    __slots__ = (
        "__weakref__", "bytes", "handles", "held", "made", "node", "others", "readers", "reads",
        "rebuilt", "storage", "version",
    )  # fmt: skip

    def __init__(self, version: int, held: torch.Tensor | None, node: Node | None) -> None:
        self.version = version
        self.held = held
        self.bytes = 0 if held is None else held.untyped_storage().nbytes()
        # The tensors through which the program has read `held`, views by their base. All but the
        # first, such as `data`, may have another version counter.
        self.readers: list[weakref.ref[torch.Tensor]] = []
        self.others: list[tuple[torch.Tensor, int]] = []
        self.node = node
        self.made = node is not None  # by an op that runs again; nothing else sees its result
        self.reads = 0  # ops and handles that have referred to it
        self.storage: weakref.ref[Any] | None = None  # dead once the program has released it
        self.handles: weakref.WeakSet[Any] | None = None  # what autograd has instead of it
        # The storage of the last rebuild, and an empty tensor with its version counter.
        self.rebuilt: tuple[weakref.ref[Any], torch.Tensor, int] | None = None

    @property
    def free(self) -> bool:
        """True if it is rebuilt for each use."""
        return self.node is not None and self.node.free

    def alive(self) -> torch.Tensor | None:
        """Return the content rebuilt for another use that has not ended; else None."""
        if self.rebuilt is None:
            return None
        known, counter, version = self.rebuilt
        storage = known()
        if storage is None or counter._version != version:  # freed, or changed by the program
            self.rebuilt = None
            return None
        return over(counter, storage)

    def lent(self, tensor: torch.Tensor) -> None:
        """Share the tensor, rebuilt for a use, with others while it is alive and unchanged."""
        self.rebuilt = weakref.ref(tensor.untyped_storage()), counter_of(tensor), tensor._version

    @property
    def unchanged(self) -> bool:
        """True if the program has neither changed nor freed `held`."""
        assert self.held is not None
        there = self.held.untyped_storage().nbytes() >= self.bytes
        return there and self._changed() is None

    def _changed(self) -> tuple[torch.Tensor, int] | None:
        """Return what was changed since the program read `held` through it, with its version."""
        assert self.held is not None
        read = (self.held, self.version), *self.others
        return next((each for each in read if each[0]._version != each[1]), None)

    def read_through(self, tensor: torch.Tensor) -> None:
        """Note the version of a tensor through which the program reads `held`."""
        base = tensor if tensor._base is None else tensor._base
        if any(known() is base for known in self.readers):
            return
        if self.readers:
            self.others.append((alias(tensor), tensor._version))
        self.readers.append(weakref.ref(base))

    def checked(self) -> torch.Tensor:
        """Return `held`, unless it was changed or freed.

        Raises:
            StateError: it was.
        """
        assert self.held is not None
        if self.unchanged:
            return self.held
        if (found := self._changed()) is not None:
            tensor, version = found
            raise StateError(changed(tensor, version, tensor._version))
        raise StateError(
            f"the program has freed the memory of a {self.held.dtype} tensor of shape "
            f"{list(self.held.shape)}, from which backward rebuilds activations that were "
            "dropped; free it after backward, or turn recomputation off for this model by "
            "umem.deoptimize(model)"
        )


@dataclass(frozen=True, eq=False, slots=True)
class Ref:
    """A tensor argument: a view of a value."""

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

    def shared(self, base: torch.Tensor) -> torch.Tensor:
        """Like `of`, with the version counter of `base`."""
        if base.dtype != self.dtype:  # rare: a view as another dtype
            return self.of(base)
        return over(base, base.untyped_storage(), self)

    def in_storage(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the view of this place in a storage."""
        empty = torch.empty(0, dtype=self.dtype, device=self.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


def refer(tensor: torch.Tensor, value: Value | None, use: int = READ) -> Ref:
    """Return a reference to `value` with the view of `tensor`."""
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
    free: bool = False  # its results are freed after each use
    args: tuple[Any, ...] = ()  # tensors replaced by their Refs
    named: dict[str, Any] = field(default_factory=dict)
    refs: list[Ref] = field(default_factory=list)
    results: int = 0  # the number of tensors it returned
    default: torch.dtype = field(default_factory=torch.get_default_dtype)
    # By position among the results, with its form, and by the argument that was written.
    outputs: list[tuple[int, weakref.ref[Value], Form]] = field(default_factory=list)
    written: list[tuple[Ref, weakref.ref[Value]]] = field(default_factory=list)


Form = tuple[torch.dtype, torch.Size, tuple[int, ...]]


def form_of(tensor: torch.Tensor) -> Form:
    """Return type, size and strides: what references to places in its storage rely on."""
    return tensor.dtype, tensor.shape, tensor.stride()


class RandomState:
    """The state of a random generator when an op began to draw from it."""

    def __init__(self, device: torch.device, generator: torch.Generator | None) -> None:
        self.device, self.generator = device, generator
        self.state = self._get()

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Set the generator to this state within the context."""
        with _of_random:  # or another thread would take this state for the program's
            now = self._get()
            try:
                self._set(self.state)
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


def rebuild(wanted: Value) -> torch.Tensor:
    """Rebuild `wanted` by running its ops again; return any tensor over its storage.

    Rebuilt values live as long as anything refers to them; their sources are released. A value
    that is freed after each use lives until the last op here that reads it, or, if it is `wanted`,
    while the caller uses it.

    Raises:
        StateError: the program has changed an input since the forward pass.
    """
    if wanted.held is not None:
        return wanted.checked()
    passing: dict[Value, torch.Tensor] = {}
    order = _order(wanted, passing)
    left = Counter(
        ref.value for node in order for ref in node.refs if ref.value is not None and ref.value.free
    )
    left[wanted] += 1
    with _as_in_forward():
        while order:
            _run_again(order.pop(), passing, left)
    found = passing.get(wanted, wanted.held)
    assert found is not None
    if wanted.free:
        wanted.lent(found)
    return found


@contextlib.contextmanager
def _as_in_forward() -> Iterator[None]:
    """Let ops do what they did in the forward pass, whatever surrounds the backward pass.

    Some return less if no gradient is needed; none is computed, as no tensor here requires one.
    Autocast had cast their inputs already. Batched gradients and torch.func have neither their
    inputs nor their results.
    """
    levels = torch._C._vmapmode_increment_nesting() - 1
    for _ in range(levels + 1):
        torch._C._vmapmode_decrement_nesting()
    try:
        with (
            torch.enable_grad(),
            torch._C._DisableAutocast(),
            temporarily_clear_interpreter_stack(),
        ):
            yield
    finally:
        for _ in range(levels):
            torch._C._vmapmode_increment_nesting()


@contextlib.contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    """Set torch's default type, which ops on integers use, within the context."""
    now = torch.get_default_dtype()
    if now == dtype:
        yield
        return
    with _of_default:
        try:
            torch.set_default_dtype(dtype)
            yield
        finally:
            torch.set_default_dtype(now)


def _run_again(node: Node, passing: dict[Value, torch.Tensor], left: Counter[Value]) -> None:
    """Run the node; its outputs pass, or hold their tensors instead of the node."""
    for made, tensor in _run(node, passing):
        if not node.free:
            made.held, made.version, made.node = tensor, tensor._version, None
        elif left[made]:
            passing[made] = tensor
    for ref in node.refs:
        value = ref.value
        if value is not None and value in left:
            left[value] -= 1
            if not left[value]:
                passing.pop(value, None)
                del left[value]


def _order(wanted: Value, passing: dict[Value, torch.Tensor]) -> list[Node]:
    """Return the nodes to run, the first one last; add values kept by other uses to `passing`."""
    order: list[Node] = []
    seen: set[int] = set()

    def missing(value: Value | None) -> bool:
        if value is None or value.held is not None or value in passing:
            return False
        tensor = value.alive()
        if tensor is not None:
            passing[value] = tensor
        return tensor is None

    stack = [(wanted.node, False)] if missing(wanted) else []
    while stack:
        node, inputs_done = stack.pop()
        assert node is not None
        if inputs_done:
            order.append(node)
        elif id(node) not in seen:
            seen.add(id(node))
            stack.append((node, True))
            stack += [
                (ref.value.node, False)
                for ref in node.refs
                if ref.value is not None and missing(ref.value)
            ]
    order.reverse()
    return order


def _run(node: Node, found: dict[Value, torch.Tensor]) -> list[tuple[Value, torch.Tensor]]:
    """Return the values that the node makes and that anything still refers to."""
    own: dict[Value, torch.UntypedStorage] = {}  # private copies of written arguments
    for ref in node.refs:
        if ref.use == WRITE and ref.value is not None and ref.value not in own:
            own[ref.value] = _to_write(node, ref.value, found)
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
    random = contextlib.nullcontext() if node.random is None else node.random.again()
    with random, _default(node.default):
        results = list(op_semantics.tensors([node.func(*args, **named)]))
    if len(results) != node.results:
        raise _differs(node, f"{node.results} tensors", f"{len(results)}")
    for i, _, form in node.outputs:
        if form_of(results[i]) != form:
            raise _differs(node, _named(form), _named(form_of(results[i])))
    made = [(value(), results[i]) for i, value, _ in node.outputs]
    made += [(value(), written[id(ref)]) for ref, value in node.written]
    return [(value, tensor) for value, tensor in made if value is not None]


def _differs(node: Node, before: str, now: str) -> StateError:
    return StateError(
        f"{node.operator.overload} gave {before} in the forward pass and {now} when it ran again, "
        "so no activation can be rebuilt from it; turn recomputation off for this model by "
        "umem.deoptimize(model)"
    )


def _named(form: Form) -> str:
    dtype, size, stride = form
    return f"a {dtype} tensor of shape {list(size)} and strides {list(stride)}"


def _content(value: Value, found: dict[Value, torch.Tensor]) -> torch.Tensor:
    tensor = found.get(value)
    return value.checked() if tensor is None else tensor


def _to_write(node: Node, value: Value, found: dict[Value, torch.Tensor]) -> torch.UntypedStorage:
    """Return the value's content in a storage that may be changed; a copy if others need it.

    A kept value that a node changes at each use is needed again for the next use.
    """
    storage = _content(value, found).untyped_storage()
    once = value.made and value.reads == 1 and (value.free or not node.free)
    return storage if once else copied(storage)


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


def changed(tensor: torch.Tensor | Ref, expected: int, version: int) -> str:
    """Return the message for a tensor that backward needs and that was changed."""
    size = tensor.size if isinstance(tensor, Ref) else tensor.shape
    return (
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: a {tensor.dtype} tensor of shape {list(size)} is at version {version}; "
        f"expected version {expected} instead. Activations that were dropped are rebuilt from it "
        "in backward: change it after backward, or change a clone(), or turn recomputation off "
        "for this model by umem.deoptimize(model)"
    )


_IN_PLACE_OR_VIEW = torch._C.DispatchKey.ADInplaceOrView


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the same memory and version, and no graph.

    Below autograd a plain detach() would have a version of its own, and no change would be seen.
    """
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(_IN_PLACE_OR_VIEW)
    torch._C._dispatch_tls_set_dispatch_key_excluded(_IN_PLACE_OR_VIEW, False)
    try:
        with torch._C._DisableTorchDispatch():  # the program's modes would see it
            return tensor.detach()
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(_IN_PLACE_OR_VIEW, excluded)


def counter_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without memory that has the tensor's version counter."""
    return over(tensor, storage_of(0, tensor.device))


def over(
    tensor: torch.Tensor, storage: torch.UntypedStorage, ref: Ref | None = None
) -> torch.Tensor:
    """Return a tensor over `storage` with the version counter of `tensor`."""
    with torch.no_grad():
        made = tensor.detach()
        excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(_IN_PLACE_OR_VIEW)
        torch._C._dispatch_tls_set_dispatch_key_excluded(_IN_PLACE_OR_VIEW, True)
        try:
            if ref is None:
                count = storage.nbytes() // made.element_size()
                return made.set_(storage, 0, (count,), (1,))
            return made.set_(storage, ref.offset, ref.size, ref.stride)
        finally:
            torch._C._dispatch_tls_set_dispatch_key_excluded(_IN_PLACE_OR_VIEW, excluded)
