"""A live model under plans: traced and planned at its first call for given shapes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves

from .. import devices
from ..errors import ConfigError, UmemError
from ..values import Budget
from .choose import BY_BUDGET, Chosen, choose
from .forward import Prepared, Tally, dropping

if TYPE_CHECKING:
    from ..devices import DeviceProfile
    from ..plan.recording import Recording

_log = logging.getLogger("umem")

_MOST_PLANS = 16  # for shapes; further ones run by the plan of the largest
_MOST_MISMATCHES = 3  # forward passes other than planned, after which a plan is given up
_REPLAN_SHARE = 0.02  # of the budget that other memory has to change by
_here = threading.local()  # whether this thread traces


@dataclass
class Report:
    """What became of the last training forward pass. Sizes in bytes, times in µs."""

    plans: int = 0  # made so far
    dropped: int = 0  # tensors that autograd would have kept
    dropped_bytes: int = 0
    expected: Chosen | None = None  # None: no plan ran
    why_not: str = ""  # no plan ran, or not to its end


@dataclass
class _Case:
    """The inputs' shapes, and what was planned for them."""

    recording: Recording | None  # until it is not planned any more
    bytes: int  # of the inputs
    outside: int = 0
    chosen: Chosen | None = None
    prepared: Prepared | None = None  # None: runs plainly
    calls: int = 0
    mismatches: int = 0


@dataclass(eq=False)
class Optimized:
    """Stands in a model for its method `forward`."""

    model: nn.Module
    mode: str
    budget: Budget
    device: str | None
    report: Report = field(default_factory=Report)
    _cases: dict[Any, _Case] = field(default_factory=dict)
    _warned: set[str] = field(default_factory=set)
    _own_forward: Any = None  # where the model has one that is not of its class

    def install(self) -> None:
        """Take the place of the model's forward."""
        self._own_forward = vars(self.model).get("forward")
        self.model.forward = self

    def remove(self) -> None:
        """Give the model its forward back."""
        if self._own_forward is None:
            del self.model.forward
        else:
            self.model.forward = self._own_forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, by a plan where one applies."""
        forward = self._own_forward or self._of_class
        case = self._case(args, kwargs) if self._applies() else None
        if case is None or case.prepared is None:
            return forward(*args, **kwargs)
        with dropping(case.prepared) as tally:
            out = forward(*args, **kwargs)
        self._judge(case, tally)
        return out

    def __reduce__(self) -> Any:
        # A copy of the model, in this process or another, plans for itself.
        return _rebuilt, (self.model, self.mode, self.budget, self.device, self._own_forward)

    def _of_class(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.model).forward(self.model, *args, **kwargs)

    def _applies(self) -> bool:
        """Whether this call is a training forward pass that nobody else has a hand in."""
        if getattr(_here, "tracing", False) or not torch.is_grad_enabled():
            return False
        if not self.model.training or torch.compiler.is_compiling():
            return False
        if torch._C._current_graph_task_id() != -1:
            return False  # a forward pass inside of backward, of somebody who recomputes already
        why = _in_the_way()
        if why:
            self.report.why_not = why
            self._warn(f"the model runs without recomputation here: {why}")
        return not why

    def _case(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Case | None:
        key, size = _key(args, kwargs)
        case = self._cases.get(key)
        if case is None:
            if len(self._cases) >= _MOST_PLANS:
                self._warn(
                    f"inputs of more than {_MOST_PLANS} different shapes: further ones run by the "
                    "plan of the largest"
                )
                return max(self._cases.values(), key=lambda case: case.bytes)
            case = self._cases[key] = _Case(self._traced(args, kwargs), size)
            self._plan(case, args, kwargs)
        elif case.calls == 1 and case.recording is not None:
            # Now there is the state of the optimizer, which the first step had not.
            self._plan_again(case, args, kwargs)
            case.recording = None
        case.calls += 1
        return case

    def _traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recording | None:
        from .trace import step_of

        _here.tracing = True
        try:
            return step_of(self.model, args, kwargs)
        except UmemError as error:
            self.report.why_not = str(error)
            self._warn(f"the model keeps all activations: {error}")
            return None
        finally:
            _here.tracing = False

    def _plan(self, case: _Case, args: Any, kwargs: Any) -> None:
        if case.recording is None:
            return
        budget = None
        if self.mode in BY_BUDGET:
            budget = self._limit()
            # A percentage is of this step alone, whatever else is on the device.
            case.outside = 0 if budget.percent else _outside(self.model, args, kwargs)
        case.chosen = choose(
            case.recording,
            self._profile(),
            self.mode,
            budget=budget,
            outside=case.outside,
            swaps=_swaps(),
        )
        case.prepared = Prepared(case.chosen.plan) if case.chosen.plan.drop else None
        self.report.plans += 1
        self.report.expected = case.chosen
        self.report.why_not = "" if case.prepared else "nothing has to be dropped, or can be"

    def _plan_again(self, case: _Case, args: Any, kwargs: Any) -> None:
        if self.mode not in BY_BUDGET or self.budget.percent is not None:
            return
        now, limit = _outside(self.model, args, kwargs), self._limit().bytes or 0
        if abs(now - case.outside) > _REPLAN_SHARE * limit:
            self._plan(case, args, kwargs)

    def _limit(self) -> Budget:
        """The budget, found where it was left open.

        Raises:
            ConfigError: nothing here says how much memory there is.
        """
        if self.budget.bytes is not None or self.budget.percent is not None:
            return self.budget
        from .. import runtime

        if runtime.is_enabled():
            return Budget(bytes=runtime.stats().budget_bytes)
        if torch.cuda.is_available():
            free, _ = torch.cuda.mem_get_info()
            return Budget(bytes=free + torch.cuda.memory_reserved())
        raise ConfigError(
            "umem.optimize(): with umem off and no GPU there is no budget; allowed: budget= in "
            "bytes as 8GiB, or as a percentage of the step's own peak as 50%"
        )

    def _profile(self) -> DeviceProfile:
        from .. import autoplan, runtime

        if self.device is not None:
            return devices.find(self.device)
        if runtime.is_enabled():
            return autoplan.device()
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        return autoplan.device_of(name)

    def _judge(self, case: _Case, tally: Tally) -> None:
        report = self.report
        report.dropped, report.dropped_bytes = tally.dropped, tally.dropped_bytes
        report.expected, report.why_not = case.chosen, tally.mismatch
        if not tally.mismatch or case.calls == 1:
            return  # the first call may make what later ones find, such as a table of positions
        case.mismatches += 1
        self._warn(
            f"a forward pass of {type(self.model).__name__} was not as planned ({tally.mismatch}); "
            "all is kept from there on"
        )
        if case.mismatches >= _MOST_MISMATCHES:
            case.prepared = None
            report.why_not = f"given up after {case.mismatches} forward passes: {tally.mismatch}"

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            _log.warning("%s", text)


def of(model: object) -> Optimized | None:
    """What stands for the model's forward, if it is optimized."""
    found = vars(model).get("forward") if isinstance(model, nn.Module) else None
    return found if isinstance(found, Optimized) else None


def _rebuilt(
    model: nn.Module, mode: str, budget: Budget, device: str | None, forward: Callable[..., Any]
) -> Optimized:
    made = Optimized(model, mode, budget, device)
    made._own_forward = forward
    return made


def _in_the_way() -> str:
    """Why no tensor may be dropped in a forward pass now; empty where all may."""
    if torch._C._are_functorch_transforms_active():
        return "it runs inside of a torch.func transform"
    if torch._C._get_tracing_state() is not None:
        return "it is traced by torch.jit"
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        return "hooks of saved tensors are disabled"
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return (
            "there are hooks of saved tensors around it already, such as those of a checkpoint or "
            "of save_on_cpu"
        )
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        return "a CUDA graph is captured"
    return ""


def _swaps() -> bool:
    from .. import runtime

    return runtime.is_enabled()


def _key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, int]:
    """What a plan depends on, and the inputs' bytes. Numbers may change in each step: not they."""
    leaves, spec = tree_flatten((args, kwargs))
    parts: list[Any] = [str(spec), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled()]
    size = 0
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            size += leaf.numel() * leaf.itemsize
            strides = leaf.stride() if leaf.layout == torch.strided else ()
            parts.append((leaf.shape, strides, leaf.dtype, leaf.device, leaf.requires_grad))
        else:
            parts.append(leaf if leaf is None or isinstance(leaf, (bool, str)) else type(leaf))
    return tuple(parts), size


def _outside(model: nn.Module, args: Any, kwargs: Any) -> int:
    """Bytes on the device that are not the model's or its inputs', such as optimizer states."""
    from .. import runtime

    if runtime.is_enabled():
        live = runtime.stats().live_bytes
    elif torch.cuda.is_available():
        live = torch.cuda.memory_allocated()
    else:
        return 0
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters]
    known = [*parameters, *model.buffers(), *gradients, *tree_leaves((args, kwargs))]
    sizes = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
        for tensor in known
        if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided
    }
    return max(live - sum(sizes.values()), 0)
