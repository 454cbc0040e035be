"""Live models that run recompute plans, made from their first step for each set of shapes."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves

from ...base import current_device, device_profiles
from ...base.native import core
from ...config.parsers import Budget
from ...errors import ConfigError, UmemError
from . import forwards
from .choose import BY_BUDGET, Chosen, choose
from .forward import Prepared, Tally, Unplanned, dropping
from .recorder import StepRecorder, is_own
from .sharded import sharder_of

if TYPE_CHECKING:
    from ...base.device_profiles import DeviceProfile
    from ...capture.recording import Recording

_log = logging.getLogger("umem")

_MAX_PLANS = 16  # sets of shapes; further ones use the plan of the largest inputs
_MAX_TRIES = 3  # recorded steps that no forward pass repeated, before it is given up
_STEADY = 8  # planned calls in a row after which earlier ones of these steps do not count
_REPLAN_SHARE = 0.02  # of the budget: the min change of other memory for a new plan
_MAX_WAIT = 64  # calls until the backward pass of a recorded step, such as of micro-batches
_LOOKS_AGAIN = frozenset({2, 4, 8, 16})  # at planned calls whether other memory has changed


@dataclass
class RecomputeReport:
    """A report on the last training forward pass. Sizes in bytes, times in µs."""

    plans: int = 0  # number of plans made so far
    dropped: int = 0  # number of tensors that autograd would have kept
    dropped_bytes: int = 0
    expected: Chosen | None = None  # None: no plan ran
    why_not: str = ""  # why no plan ran, or not to its end


@dataclass
class _Case:
    """The plan for inputs of the same shapes."""

    bytes: int  # inputs
    recording: Recording | None = None  # None: no step is recorded, or planning is done
    outside: int = 0
    chosen: Chosen | None = None
    prepared: Prepared | None = None  # None: runs without a plan
    calls: int = 0  # with the plan
    repeated: int = 0  # calls in a row that were as planned
    tries: int = 0  # recorded steps that led to nothing
    decided: bool = False  # no further step is recorded
    why_not: str = ""  # why it has no plan, or one that drops nothing


@dataclass(eq=False)
class OptimizedModule:
    """The plans of a model, and the run of its `forward` with them."""

    mode: str
    budget: Budget
    device: str | None
    report: RecomputeReport = field(default_factory=RecomputeReport)
    _model: weakref.ref[nn.Module] | None = None
    _cases: dict[Any, _Case] = field(default_factory=dict)
    _under_way: tuple[_Case, StepRecorder] | None = None  # the step that is recorded now
    _waited: int = 0  # calls since then
    _warned: set[str] = field(default_factory=set)

    @property
    def model(self) -> nn.Module:
        """The model, which lives as long as its forward runs."""
        model = None if self._model is None else self._model()
        assert model is not None, "a model that is gone has no forward pass"
        return model

    def install(self, model: nn.Module) -> None:
        """Run the model's forward from now on.

        Raises:
            NotSupportedError: `forward` is no function.
        """
        self._model = weakref.ref(model)
        forwards.replace(model, self._run)

    def _run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward, with a plan if one applies."""
        if not self._applies():
            return forward(*args, **kwargs)
        # The program's modes would see the calls.
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            self._take_record(args, kwargs)
            case = self._case(args, kwargs)
            self._look_again(case, args, kwargs)
        if case.prepared is not None:
            with dropping(case.prepared) as tally:
                out = forward(*args, **kwargs)
            self._judge(case, tally)
            return out
        if case.decided:
            self._tell(case.why_not, expected=case.chosen)
            return forward(*args, **kwargs)
        rule = Unplanned(cheap=not _swaps())  # with umem on, what does not fit is swapped
        if self._under_way is not None:
            with dropping(rule) as tally:
                out = forward(*args, **kwargs)
            self._tell("another pass is recorded, until its backward pass has run", tally)
            return out
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            recorder = StepRecorder(self.model, args, kwargs)
        out, tally = recorder.run(lambda: forward(*args, **kwargs), rule)
        self._under_way = case, recorder
        self._tell("this step is recorded; the next one with such inputs has a plan", tally)
        return out

    def _tell(
        self, why_not: str, tally: Tally | None = None, expected: Chosen | None = None
    ) -> None:
        """Report on this pass."""
        report, tally = self.report, tally or Tally()
        report.dropped, report.dropped_bytes = tally.dropped, tally.dropped_bytes
        report.expected, report.why_not = expected, why_not

    def _applies(self) -> bool:
        """Return whether this is a training forward pass that no other library changes."""
        if not torch.is_grad_enabled() or not self.model.training:
            return False
        if torch.compiler.is_compiling():
            return False
        if torch._C._current_graph_task_id() != -1:
            return False  # a forward pass inside backward: something else recomputes already
        why = _in_the_way()
        if (sharder := sharder_of(self.model)) is not None:
            why = f"{sharder} has sharded the model since, and frees its parameters in the step"
        if why:
            self._tell(why)
            self._warn(f"this forward pass runs without recomputation: {why}")
        return not why

    def _case(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Case:
        key, size = _key(args, kwargs)
        case = self._cases.get(key)
        if case is not None:
            return case
        if len(self._cases) >= _MAX_PLANS:
            self._warn(
                f"inputs have more than {_MAX_PLANS} different shapes: further ones use the plan "
                "of the largest"
            )
            return max(self._cases.values(), key=lambda case: case.bytes)
        if self.mode in BY_BUDGET and self._limit() is None:
            if not self._cases:
                raise _no_budget()  # before anything has run
            why = "umem is off, and umem.optimize() was given no budget"
            self._warn(f"this forward pass runs without recomputation: {why}")
            return _Case(size, decided=True, why_not=why)
        case = self._cases[key] = _Case(size)
        return case

    def _take_record(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Plan from the recorded step, once its backward pass has run."""
        under_way = self._under_way
        if under_way is None:
            return
        case, recorder = under_way
        self._waited += 1
        over = recorder.saw_backward or recorder.lost or recorder.failure
        if not over and self._waited < _MAX_WAIT:
            return
        self._under_way, self._waited = None, 0
        recording = recorder.finish()
        try:
            if recorder.saw_backward and not recorder.failure:
                case.recording = recording
                self._plan(case, args, kwargs)
                case.decided = True
                return
            why = recorder.failure or "no backward pass follows its forward pass"
        except UmemError as error:
            why = str(error)
        except Exception as error:
            if not is_own(error):
                raise
            why = f"umem cannot plan it: {type(error).__name__}: {error}"
        self._tried(case, why)

    def _tried(self, case: _Case, why: str) -> None:
        """Note that a recorded step was of no use; record another one, or give up."""
        case.tries += 1
        case.prepared = case.recording = case.chosen = None
        case.why_not = why
        case.decided = case.tries >= _MAX_TRIES
        if case.decided:
            self._warn(f"{type(self.model).__name__} keeps all activations: {why}")

    def _look_again(self, case: _Case, args: Any, kwargs: Any) -> None:
        """Plan again if other memory has changed, as after an optimizer's first step."""
        if case.recording is None:
            return
        case.calls += 1
        if case.calls not in _LOOKS_AGAIN:
            return
        if self.mode in BY_BUDGET and self.budget.percent is None:
            now, limit = _outside(self.model, args, kwargs), self._limit()
            size = None if limit is None else limit.bytes  # unknown once umem was turned off
            if size is not None and abs(now - case.outside) > _REPLAN_SHARE * size:
                self._plan(case, args, kwargs)
        if case.calls == max(_LOOKS_AGAIN):
            case.recording = None

    def _plan(self, case: _Case, args: Any, kwargs: Any) -> None:
        assert case.recording is not None
        budget = None
        if self.mode in BY_BUDGET:
            budget = self._limit()
            if budget is None:
                raise _no_budget()
            # A percentage refers to this step alone.
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
        case.why_not = "no tensor needs to be dropped, or can be"
        self.report.plans += 1

    def _limit(self) -> Budget | None:
        """Return the budget; if none was given, umem's or the GPU's free memory.

        None if umem is off and there is no GPU.
        """
        if self.budget.bytes is not None or self.budget.percent is not None:
            return self.budget
        if core.running():
            return Budget(bytes=_stats(self.model)["budget_bytes"])
        if torch.cuda.is_available():
            free, _ = torch.cuda.mem_get_info()
            return Budget(bytes=free + torch.cuda.memory_reserved())
        return None

    def _profile(self) -> DeviceProfile:
        if self.device is not None:
            return device_profiles.find(self.device)
        if core.running():
            return current_device.for_plans(current_device.profile())
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        return current_device.profile_of(name)

    def _judge(self, case: _Case, tally: Tally) -> None:
        self._tell(tally.mismatch, tally, case.chosen)
        if not tally.mismatch:
            case.repeated += 1
            if case.repeated >= _STEADY:
                case.tries = 0
        elif case.repeated:
            case.repeated = 0  # a step may call it twice, such as with weights cast by the first
        else:
            self._tried(case, f"its forward passes differ: {tally.mismatch}")

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            _log.warning("%s", text)


def optimized(model: object) -> OptimizedModule | None:
    """Return what runs the model's forward; None if it is not optimized."""
    run = forwards.run_of(model)
    found = getattr(run, "__self__", None)
    return found if isinstance(found, OptimizedModule) else None


def _in_the_way() -> str:
    """Return why tensors cannot be dropped in a forward pass now; empty if they can."""
    if torch._C._are_functorch_transforms_active():
        return "it runs inside a torch.func transform"
    if torch._C._get_tracing_state() is not None:
        return "it is traced by torch.jit"
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:
        return "it is traced by torch.fx"
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        return "hooks of saved tensors are disabled"
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return (
            "hooks of saved tensors are active already, such as those of a checkpoint or of "
            "save_on_cpu"
        )
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured"
    return ""


def _no_budget() -> ConfigError:
    return ConfigError(
        "umem.optimize(): there is no default budget with umem off and without a GPU; allowed: "
        "budget= in bytes, such as 8GiB, or in percent of the step's own peak, such as 50%"
    )


def _swaps() -> bool:
    return core.running()


def _key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, int]:
    """Return the key of a plan and the inputs' bytes; the key omits numbers, as they vary."""
    leaves, spec = tree_flatten((args, kwargs))
    parts: list[Any] = [str(spec), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled()]
    size = 0
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            size += leaf.numel() * leaf.itemsize
            nested = leaf.is_nested  # which has neither
            shape = None if nested else leaf.shape
            strides = leaf.stride() if leaf.layout == torch.strided and not nested else ()
            parts.append((shape, strides, leaf.dtype, leaf.device, leaf.requires_grad))
        else:
            parts.append(leaf if leaf is None or isinstance(leaf, (bool, str)) else type(leaf))
    return tuple(parts), size


def _stats(model: nn.Module) -> dict[str, int]:
    """Return umem's figures of the model's device, or of all devices if it is on none."""
    indices = (parameter.device.index for parameter in model.parameters())
    return core.stats(next((index for index in indices if index is not None), None))


def _outside(model: nn.Module, args: Any, kwargs: Any) -> int:
    """Return the device bytes outside of the model and its inputs, such as optimizer states."""
    if core.running():
        live = _stats(model)["live_bytes"]
    elif torch.cuda.is_available():
        live = torch.cuda.memory_allocated()
    else:
        return 0
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.is_leaf]
    known = [*parameters, *model.buffers(), *gradients, *tree_leaves((args, kwargs))]
    sizes = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
        for tensor in known
        if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided
    }
    return max(live - sum(sizes.values()), 0)
