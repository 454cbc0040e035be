"""`umem.page_optimizer`: optimizer state is on the device only during `step()`, or never."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...base.step_hooks import Handle, before_steps
from ...base.units import format_bytes
from ...base.untraced import untraced
from ...errors import ConfigError, StateError, kind_of, plain
from ...session import session
from ...session.host_share import host_updated
from ...session.statistics import stats
from . import arrivals, state_file
from .host_update import HostUpdate, end_shared, refuse_capture, refuse_in_order
from .masters import NAME as MASTER
from .masters import added_bytes, in_checkpoint
from .parts import OfOptimizer, is_per_parameter, overlapping, part_of, update
from .release import Release, processes
from .states import States, acting, parameters_of, planning
from .turns import FirstHook, MethodHook, Turn

if TYPE_CHECKING:
    from ...session.planned_step import PlannedStep

_CHUNKS = 8  # chunks that fit the budget: one in use, one arriving, one leaving

_WAYS = ("device", "host", "auto")
_TRIED = 64  # steps that `auto` waits for a recorded step
_OTHERS = 2  # steps in which the recorded one may still be another optimizer's

_log = logging.getLogger("umem")
_paged: weakref.WeakKeyDictionary[Optimizer, weakref.ref[PagedOptimizer]] = (
    weakref.WeakKeyDictionary()
)
_ordering: Handle | None = None  # the hook that puts theirs in order
_hosts: weakref.WeakSet[PagedOptimizer] = weakref.WeakSet()  # those that update on the host


class _Handle(Protocol):
    def remove(self) -> None: ...


class Host(NamedTuple):
    """Options of updates on the host."""

    masters: bool = False  # float32 copies of lower-precision parameters
    overlap: bool = False  # with work after `step()`


class PagedOptimizer(OfOptimizer):
    """The effect of `page_optimizer`, until `remove`; also a context manager."""

    def __init__(
        self,
        optimizer: Optimizer,
        release_gradients: bool,
        host_share: float | None,
        host: Host,
        automatic: bool = False,
    ) -> None:
        super().__init__(optimizer)
        # Not requested by the program: the device does the rest, with a message.
        self._automatic = automatic
        self._states = States(optimizer)
        self._turn = Turn(optimizer)
        self._share = host_share or 0.0
        self._undecided = _TRIED if host_share is None else 0  # steps left for the choice
        self._how = host
        self._host = self._new_host() if host_share else None
        self._saved: dict[Tensor, dict[str, Any]] = {}  # from the checkpoint being loaded
        self._chosen: set[int] = set()  # ids of the parameters that are updated on the host
        self._left: set[int] = set()  # ids of those that no longer are
        self._shared: set[int] = set()  # ids of parameters that share memory with others
        self._planned: PlannedStep | None = None  # the last one seen
        self._known: list[int] = []  # ids of the parameters at the last choice
        self._failure: StateError | None = None  # this step's
        if self._host is not None:
            self._choose()
        step_hook = optimizer.register_step_pre_hook(self._before_step)
        load_hook = optimizer.register_load_state_dict_pre_hook(self._loads)
        self._step_hook, self._load_hook = step_hook.id, load_hook.id
        self._handles: list[_Handle] = [
            step_hook,
            load_hook,
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_pre_hook(self._saves),
            optimizer.register_load_state_dict_post_hook(self._loaded),
            # A cleared gradient would lose the rest of a step's updates.
            FirstHook(optimizer, "zero_grad", functools.partial(self._check, "zero_grad()")),
            FirstHook(optimizer, "load_state_dict", self._loads_last),
            MethodHook(optimizer, "__getstate__", self._copied),
        ]
        self._release = (
            Release(optimizer, self._states, self._host, self._takes, self._turn)
            if release_gradients
            else None
        )
        _paged[optimizer] = weakref.ref(self)
        weakref.finalize(optimizer, _order_hooks).atexit = False
        _order_hooks()
        self._loaded(optimizer)

    def __repr__(self) -> str:
        optimizer = self._reference()
        what = "gone" if optimizer is None else type(optimizer).__name__
        how = f", {self._share:.0%} updated on the host" if self._host else ""
        how += ", update place not chosen yet" if self._undecided else ""
        how += ", gradients released" if self._release else ""
        return f"<umem.page_optimizer: {what}{how}{'' if self._handles else ', removed'}>"

    def __enter__(self) -> PagedOptimizer:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def remove(self, *, give_back: bool = True) -> None:
        """Restore the optimizer. State on the host comes back when an op needs it.

        Args:
            give_back: put states of updates on the host back on the device.

        Raises:
            StateError: it is called in the middle of a step.
        """
        if not self._handles or self._reference() is None:
            self._forget()
            return
        self.check_remove("remove()")
        with self._turn.take("remove()"):
            host = self._host
            try:
                if host is not None:
                    host.finish()
            finally:
                if host is not None and give_back:
                    host.give_back(self._updated_on_host())
                self._forget()

    def check_remove(self, what: str) -> None:
        """Refuse the call `what`, which removes it, in the middle of a step.

        Raises:
            StateError: this thread is in one, or another thread remains in one.
        """
        if self._handles and self._reference() is not None:
            self._check(what)
            self._turn.await_steps(what, own=int(self._automatic))

    def _forget(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        if self._release is not None:
            self._release.remove()
        self._handles.clear()
        self._undecided = 0
        if (optimizer := self._reference()) is not None:
            _paged.pop(optimizer, None)
        _order_hooks()
        if self._host is not None:
            self._host = None
            _hosts.discard(self)
            if not _hosts:
                end_shared()

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Accumulate gradients: with released gradients, backward passes inside only add to them.

        The next pass outside, or else `optimizer.step()`, updates with the sum.
        """
        if self._release is None:
            yield
            return
        with self._release.paused():
            yield

    def runs_last(self) -> None:
        """Move its hook behind those that the program has registered since.

        Those may change gradients, and its own hook may use them.
        """
        _move_last(self._optimizer._optimizer_step_pre_hooks, self._step_hook)

    def _loads_last(self) -> None:
        # Hooks that the program has registered since adapt what is loaded.
        _move_last(self._optimizer._optimizer_load_state_dict_pre_hooks, self._load_hook)

    @untraced
    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Run the step if umem has a part in it; the step itself then finds nothing to do."""
        self._check("step()")
        self._turn.check_step()
        self._turn.acts = False
        closure = any(given is not None for given in (*args[1:], *kwargs.values()))
        if self._host is not None and closure and self._automatic:
            _log.warning("%s is updated on the device: step() has a closure", _name(optimizer))
            self.remove()
            return None
        if self._host is not None:
            with self._turn.take("step()"):  # and it is not removed
                if self._host is not None:
                    self._check_host_step(closure)
                    self._choose()
        if self._release is not None:
            self._release.step_begins()
        if self._host is None and (closure or not acting()):
            return None  # the backward passes of a closure come first, and need the memory
        if self._host is None and (planning() or not is_per_parameter(optimizer)):
            self._states.bring(p for p in parameters_of(optimizer) if p.grad is not None)
            return None
        self._turn.acts = True
        with self._turn.take("step()"):
            self._run({p: p.grad for p in parameters_of(optimizer) if p.grad is not None})
        return (part_of(optimizer, ()), *args[1:]), kwargs

    def _run(self, due: dict[Tensor, Tensor]) -> None:
        """Update the parameters with these gradients."""
        rest = list(due) if self._host is None else self._update_on_host(self._host, due)
        if not rest:
            return
        if not acting() or planning():
            self._states.bring(rest)
            update(self._optimizer, rest)
            return
        chunks = self._chunks(rest)
        self._states.bring(chunks[0])
        for now, then in itertools.pairwise(chunks):
            self._states.bring([*now, *then])
            update(self._optimizer, now)
            self._send(now)
        update(self._optimizer, chunks[-1])  # it is sent after the step, with all

    @staticmethod
    def _check_host_step(closure: bool) -> None:
        if closure:
            raise StateError(
                "step(closure) was called, but umem.page_optimizer(..., update='host') needs the "
                "gradients before the step; run the closure first, or update on the device"
            )
        refuse_capture()
        refuse_in_order()

    def _update_on_host(self, host: HostUpdate, due: dict[Tensor, Tensor]) -> list[Tensor]:
        """Update the chosen parameters; return the others. Errors are raised after the step."""
        rest: list[Tensor] = []
        try:
            for parameter, gradient in due.items():
                if self._takes(parameter, gradient):
                    host.add(parameter, gradient)
                else:
                    rest.append(parameter)
            if self._how.overlap:
                self._end(host.leave)
        except BaseException:
            self._end(host.finish)  # added parameters are updated even if the step is interrupted
            raise
        if not self._how.overlap:
            self._end(host.finish)
        return rest

    def _end(self, end: Callable[[], None]) -> None:
        try:
            end()
        except StateError as error:
            self._failure = error

    def _takes(self, parameter: Tensor, gradient: Tensor) -> bool:
        """Return whether the host updates it with this gradient.

        It does not after the first sparse gradient, nor once another parameter shares the memory:
        the one copied back last would undo the other one's update.
        """
        if id(parameter) not in self._chosen:
            return False
        if gradient.layout == torch.strided and id(parameter) not in self._shared:
            return True
        assert self._host is not None
        self._host.give_back([parameter])
        self._chosen.discard(id(parameter))
        self._left.add(id(parameter))
        return False

    def _choose(self) -> None:
        """Choose parameters up to the share of bytes, the last ones first.

        Their gradients are ready first, so most of the backward pass can overlap their updates.
        """
        assert self._host is not None
        parameters = [p for p in parameters_of(self._optimizer) if _updatable(p)]
        self._shared = overlapping(parameters)
        if self._known == (known := [id(p) for p in parameters]):
            return
        if self._automatic:
            parameters = self._plain(parameters)
        self._check_plain(parameters)
        left = self._share * sum(p.nbytes for p in parameters)
        left -= sum(p.nbytes for p in parameters if id(p) in self._chosen)
        taken = self._chosen | self._left
        chosen = []
        for parameter in (p for p in reversed(parameters) if id(p) not in taken):
            if left <= 0:
                break
            chosen.append(parameter)
            left -= parameter.nbytes
        self._claim(chosen)
        self._known = known

    def _plain(self, parameters: list[Tensor]) -> list[Tensor]:
        """Return those to claim: on one device, not wrappers, and not another optimizer's."""
        found = [p for p in parameters if not is_traceable_wrapper_subclass(p)]
        found = [p for p in found if p.device == found[0].device and not self._has_other_owner(p)]
        if len(found) < len(parameters) and not self._chosen:
            _log.warning(
                "%s: %d of %d parameters are updated on the device: they wrap others, are on "
                "another device, or another optimizer updates them on the host",
                _name(self._optimizer), len(parameters) - len(found), len(parameters),
            )  # fmt: skip
        return found

    @staticmethod
    def _check_plain(parameters: list[Tensor]) -> None:
        if any(is_traceable_wrapper_subclass(p) for p in parameters):
            raise ConfigError(
                "umem.page_optimizer(..., update='host'): a parameter wraps others, as shards of "
                "FSDP2 do (DTensor); allowed: plain tensors; leave update out"
            )
        devices = {p.device for p in parameters}
        if len(devices) > 1:
            raise ConfigError(
                f"umem.page_optimizer(..., update='host'): parameters on {len(devices)} devices "
                f"({', '.join(sorted(map(str, devices)))}); allowed: one; use an optimizer for each"
            )

    def _claim(self, parameters: list[Tensor]) -> None:
        assert self._host is not None
        if any(map(self._has_other_owner, parameters)):
            gc.collect()  # an optimizer and its hooks are a cycle: the program may have dropped it
        for parameter in parameters:
            if self._has_other_owner(parameter):
                raise ConfigError(
                    f"umem.page_optimizer(..., update='host'): a parameter of shape "
                    f"{tuple(parameter.shape)} is updated on the host by another optimizer; call "
                    "remove() on the result of that call"
                )
        _hosts.add(self)
        for parameter in parameters:
            self._chosen.add(id(parameter))
            self._host.adopt(parameter)

    def _has_other_owner(self, parameter: Tensor) -> bool:
        return any(
            any(p is parameter for p in other._updated_on_host())
            for other in list(_hosts)
            if other is not self
            and other._reference() is not None
            and id(parameter) in other._chosen
        )

    def _updated_on_host(self) -> list[Tensor]:
        return [p for p in parameters_of(self._optimizer) if id(p) in self._chosen]

    @untraced
    def _after_step(self, _optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        if self._release is not None:
            self._release.step_ended()
        if acting():
            self._states.send(self._states.all())
        if self._undecided:
            self._decide()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _decide(self) -> None:
        """Choose what the host updates, once a step of this optimizer was recorded."""
        if self._undecided > _TRIED - _OTHERS:
            self._undecided -= 1
            return
        parameters = [p for p in parameters_of(self._optimizer) if _updatable(p)]
        if self._automatic:
            parameters = self._plain(parameters)
        here = {p.data_ptr() for p in parameters}
        device = (parameters[0].device.index or 0) if parameters else 0
        released = self._release is not None
        chosen = host_updated(here, self._planned, released=released, device=device)
        self._planned = session.planned_step(device)
        self._undecided = 0 if chosen is not None else self._undecided - 1
        if mine := [p for p in parameters if p.data_ptr() in (chosen or ())]:
            self._begin_host(mine, parameters)

    def _begin_host(self, mine: list[Tensor], parameters: list[Tensor]) -> None:
        """Let the host update `mine` of the parameters, unless that is refused."""
        self._undecided = 0
        host = self._new_host()
        try:
            self._check_plain(parameters)
            _check_room(self._optimizer, mine, with_masters=self._how.masters)
            self._host = host
            self._claim(mine)
        except ConfigError as error:
            self._host = None
            _log.warning("%s; all parameters are updated on the device", error)
            return
        self._share = sum(p.nbytes for p in mine) / sum(p.nbytes for p in parameters)
        self._known = [id(p) for p in parameters]
        self._shared = overlapping(parameters)
        if self._release is not None:
            self._release.use(self._host)
        _log.info("%r", self)

    def _new_host(self) -> HostUpdate:
        how = self._how
        return HostUpdate(self._optimizer, with_masters=how.masters, overlap=how.overlap)

    def _check(self, what: str) -> None:
        """Refuse a call in the middle of an operation, such as a backward pass that updates."""
        self._turn.check(what)
        if self._release is not None and torch._C._current_graph_task_id() != -1:
            raise self._turn.refusal(what)

    def _copied(self) -> dict[str, Any]:
        """Return what a copy or pickle of the optimizer gets, which is a plain one."""
        self._arrive("a copy")
        found: dict[str, Any] = type(self._optimizer).__getstate__(self._optimizer)
        if self._host is not None:
            found["state"] = found["state"].copy()
            found["state"].update(self._host.plain_states(self._updated_on_host()))
        return found

    @untraced
    def _saves(self, _optimizer: Optimizer) -> None:
        self._arrive("state_dict()")

    def _arrive(self, what: str) -> None:
        """Bring the states up to date with the last step."""
        self._check(what)
        self._turn.check_checkpoint(what)
        if self._host is not None:
            with self._turn.take(what):
                self._host.finish()

    @untraced
    def _loads(self, optimizer: Optimizer, saved: dict[str, Any]) -> None:
        self._arrive("load_state_dict()")
        if not self._how.masters or (self._host is None and not self._undecided):
            return
        found = in_checkpoint(optimizer, saved)
        if self._undecided and found:  # the host updated these when the checkpoint was saved
            parameters = [p for p in parameters_of(optimizer) if _updatable(p)]
            self._begin_host([p for p in parameters if p in found], parameters)
        self._saved = found if self._host is not None else {}

    @untraced
    def _loaded(self, _optimizer: Optimizer) -> None:
        if self._host is not None:
            saved, self._saved = self._saved, {}
            self._host.restore({p: s for p, s in saved.items() if id(p) in self._chosen})
            for parameter in self._updated_on_host():
                self._host.adopt(parameter)
        if acting():
            self._states.send(self._states.all())

    def _send(self, parameters: list[Tensor]) -> None:
        self._states.send(t for parameter in parameters for t in self._states.of(parameter))

    def _chunks(self, parameters: list[Tensor]) -> list[list[Tensor]]:
        """Return parts in the order of the parameters: a chunk of state, or one parameter's.

        All in one if some share memory, which each step of the update may read and write.
        """
        if overlapping(parameters):
            return [parameters]
        from ...base.native import core

        most = core.stats(parameters[0].device.index)["budget_bytes"] // _CHUNKS
        chunks: list[list[Tensor]] = []
        room = 0
        for parameter in parameters:
            size = self._states.bytes_of(parameter)
            if not chunks or size > room:
                chunks.append([])
                room = most
            chunks[-1].append(parameter)
            room -= size
        return chunks


def _updatable(parameter: Tensor) -> bool:
    """Return whether it is trained, and has memory that can be copied."""
    return (
        parameter.requires_grad
        and not is_lazy(parameter)
        and not is_fake(parameter)
        and parameter.layout == torch.strided
        and parameter.device.type != "meta"
    )


def _order_hooks() -> None:
    """Let the hook of each paged optimizer run last; those of all optimizers come first."""
    global _ordering
    there = any(True for _ in _paged)  # its length counts those that go just now
    if there and _ordering is None:
        _ordering = before_steps(_before_hooks)
    elif not there and _ordering is not None:
        _ordering.remove()
        _ordering = None


def _before_hooks(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
    if (reference := _paged.get(optimizer)) and (paged := reference()):
        paged.runs_last()


def _move_last(hooks: Any, number: int) -> None:
    with contextlib.suppress(KeyError):  # removed
        hooks.move_to_end(number)


def _name(optimizer: Optimizer) -> str:
    return type(optimizer).__name__


def is_paged(optimizer: Optimizer) -> bool:
    """Return whether `page_optimizer` is active for it."""
    return optimizer in _paged


def page_optimizer(
    optimizer: Optimizer,
    *,
    release_gradients: bool = False,
    update: str = "device",
    share: float | None = None,
    masters: bool = False,
    overlap: bool = False,
    _automatic: bool = False,
) -> PagedOptimizer:
    """Keep an optimizer's state on the host, and bring it to the device around its `step()`.

    With `update="host"` it is never brought: gradients and parameters are copied to the host,
    updated there by torch's own kernels, and the parameters are copied back. The results of
    `update="device"` are bit-identical to the plain step. See docs/optimizer_state.md.

    Args:
        optimizer: of any class; if it wraps another in its attribute `optimizer` or `optim`, that
            one is used.
        release_gradients: update each parameter in the backward pass, as soon as its gradient is
            ready, and free the gradient. For the optimizers of torch.optim except LBFGS. `step()`
            then has nothing left to do, but must still be called after each backward pass.
        update: "device", "host" or "auto". The latter two are for the same optimizers, with
            parameters on one device. "auto" updates on the device until a step has been recorded
            and planned (with policies that plan), and then chooses what the host updates; a
            checkpoint with masters that is loaded before makes that choice.
        share: with `update="host"`, the host's share of the parameters' bytes, from 0 to 1, by
            default 1; the last parameters are taken first. The others are updated on the device.
        masters: with updates on the host: keep float32 copies of float16 and bfloat16 parameters
            there.
        overlap: with updates on the host: return from `step()` before they are done; an operator
            waits for the parameters that it uses.

    Raises:
        ConfigError: not an optimizer, or one that is paged already; with `release_gradients` or
            `update="host"` also one whose update is not known to be per parameter; with
            `release_gradients` gradients that are averaged over processes; with `update="host"` a
            host budget, or space for the option `disk`, that the states exceed.
        StateError: umem is off.
    """
    session.require_session("page_optimizer")
    found = _unwrapped(optimizer)
    if found in _paged:
        raise ConfigError(
            f"umem.page_optimizer({type(found).__name__}): it is paged already; call remove() on "
            "the result of that call"
        )
    if update not in _WAYS:
        raise ConfigError(
            f"umem.page_optimizer(..., update={update!r}); allowed: {' and '.join(_WAYS)}"
        )
    if share is not None and not (update == "host" and 0 <= share <= 1):
        raise ConfigError(
            f"umem.page_optimizer(..., update={update!r}, share={share}); allowed: from 0 to 1, "
            "with update='host'"
        )
    if (masters or overlap) and update == "device":
        raise ConfigError(
            f"umem.page_optimizer(..., update={update!r}, masters={masters}, overlap={overlap}); "
            "allowed: with update='host' or 'auto'"
        )
    if release_gradients:
        _check_release(found)
    if overlap:
        _check_overlap()
    host_share = {"device": 0.0, "host": 1.0 if share is None else share, "auto": None}[update]
    if host_share != 0:
        _check_host(found, update, host_share or 0.0, with_masters=masters)
    return PagedOptimizer(
        found, release_gradients, host_share, Host(masters, overlap), automatic=_automatic
    )


def _unwrapped(optimizer: object) -> Optimizer:
    found: Any = optimizer
    for _ in range(8):  # wrappers of wrappers
        inner = next(
            (x for name in ("optimizer", "optim")
             if isinstance(x := getattr(found, name, None), Optimizer)), None
        )  # fmt: skip
        if inner is None:
            break
        found = inner
    if not isinstance(found, Optimizer):
        raise ConfigError(
            f"umem.page_optimizer(...) was given {kind_of(optimizer)}; allowed: a "
            "torch.optim.Optimizer, or an object with one in its attribute optimizer or optim"
        )
    return found


def _check_release(optimizer: Optimizer) -> None:
    what = f"umem.page_optimizer({type(optimizer).__name__}, release_gradients=True)"
    if not is_per_parameter(optimizer):
        raise ConfigError(
            f"{what}: only an update of one parameter by its own gradient can run in the backward "
            "pass, and only torch.optim's classes except LBFGS are known to do that; leave "
            "release_gradients out"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ConfigError(f"{what}: its step is differentiable, and needs all gradients; allowed: "
                          "differentiable=False")  # fmt: skip
    if (ranks := processes()) > 1:
        raise ConfigError(
            f"{what}: gradients are averaged over {ranks} processes after they are ready; leave "
            "release_gradients out"
        )


def _check_overlap() -> None:
    if not session.sees_every_thread():
        settings = session.require_session("page_optimizer").settings
        raise ConfigError(
            "umem.page_optimizer(..., overlap=True): not every operator is seen with "
            f"observer={settings.observer!r} and allocator={settings.allocator!r}; allowed: the "
            "native observer, with umem as torch's allocator"
        )
    arrivals.watch()


def _check_host(optimizer: Optimizer, update: str, share: float, *, with_masters: bool) -> None:
    what = f"umem.page_optimizer({type(optimizer).__name__}, update={update!r})"
    if not is_per_parameter(optimizer) or any(
        g.get("differentiable") for g in optimizer.param_groups
    ):
        raise ConfigError(
            f"{what}: only an update of one parameter by its own gradient can run on the host, "
            "which is known of torch.optim's classes other than LBFGS, with differentiable=False; "
            "leave update out"
        )
    trained = [p for p in parameters_of(optimizer) if _updatable(p)]
    _check_room(optimizer, trained, share, with_masters=with_masters)


def _check_room(
    optimizer: Optimizer, parameters: list[Tensor], share: float = 1.0, *, with_masters: bool
) -> None:
    what = f"umem.page_optimizer({type(optimizer).__name__}, update='host')"
    file = state_file.current()
    file = file if file is not None and file.works else None
    needed = int(share * _on_host(optimizer, parameters, file, with_masters=with_masters))
    these = {id(p) for p in parameters}  # if another optimizer updates them, that is refused
    others = sum(
        _on_host(
            found,
            [p for p in other._updated_on_host() if id(p) not in these],
            file,
            with_masters=other._how.masters,
        )
        for other in list(_hosts)
        if (found := other._reference()) is not None and found is not optimizer
    )
    if file is not None:
        if needed > (left := max(file.room() - others, 0)):
            raise ConfigError(
                f"{what}: the states take about {format_bytes(needed)}, and there is space for "
                f"{format_bytes(left)} in {plain(str(file.folder))}; allowed: a larger disk or "
                "limit of the option disk, or a smaller share"
            )
        return
    now = stats()
    room = now.host_budget_bytes - now.host_bytes - others
    if now.host_budget_bytes and needed > room:
        raise ConfigError(
            f"{what}: the states take about {format_bytes(needed)} on the host, and the host "
            f"budget of {format_bytes(now.host_budget_bytes)} has {format_bytes(max(room, 0))} "
            "left; allowed: a larger host_budget, or a smaller share"
        )


def _on_host(
    optimizer: Optimizer,
    parameters: list[Tensor],
    file: state_file.StateFile | None,
    *,
    with_masters: bool,
) -> int:
    """Return the bytes of these parameters' states on the host, or still to come into the file."""
    states = States(optimizer)
    total = 0
    for parameter in parameters:
        total += (nbytes := states.bytes_of(parameter))
        if with_masters and MASTER not in optimizer.state.get(parameter, {}):
            total += added_bytes(parameter, nbytes)
        if file is not None:
            total -= sum(t.nbytes for t in states.of(parameter) if file.holds(t))
    return total
