"""The known policies; makes a policy from its name, its location or an object."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from ..base import python_file
from ..errors import ConfigError, did_you_mean, kind_of

if TYPE_CHECKING:  # base needs numpy, and the names alone do not
    from .base import Policy

DEFAULT = "auto"
ENTRY_POINTS = "umem.policies"
ALLOWED = (
    "a name, module:attribute, file.py:attribute, an object with a method plan(trace, device, "
    "budget), or such a function"
)

# The forms of a policy: a name or a location as text, an object, a class or a function.
Spec: TypeAlias = object

# The name, the module and the class. A third party cannot take one of these names.
_BUILT_IN = {
    "auto": ("default.planner", "Auto"),
    "lru": ("native", "Lru"),
    "conv_lru": ("native", "ConvLru"),
    "none": ("native", "Unmanaged"),
    "belady": ("published.belady", "Belady"),
    "ocdnn": ("published.ocdnn", "OcDnn"),
    "vdnn": ("published.vdnn", "Vdnn"),
    "vdnn_all": ("published.vdnn", "VdnnAll"),
    "vdnn_conv": ("published.vdnn", "VdnnConv"),
    "distance": ("published.distance", "Distance"),
    "autoswap": ("published.autoswap", "AutoSwap"),
    "capuchin": ("published.capuchin", "Capuchin"),
    "deepum": ("published.deepum", "DeepUm"),
    "stream_layers": ("published.stream_layers", "StreamLayers"),
    "optimizer_state": ("published.optimizer_state", "OptimizerState"),
    "lms": ("published.lms", "Lms"),
}
# Policies from the literature, to compare others with.
BASELINES = tuple(name for name, (module, _) in _BUILT_IN.items() if module.startswith("published"))


def names() -> tuple[str, ...]:
    """Return the built-in names, the default first, then those that other packages registered."""
    return (*_BUILT_IN, *sorted(set(_third_parties()) - set(_BUILT_IN)))


def make(spec: Spec) -> Policy:
    """Make the policy that `spec` describes.

    Args:
        spec: a name; a location, as `package.module:attribute` or `folder/file.py:attribute`; a
            policy; or a function `plan(trace, device, budget)`. A location may also be that of a
            class, or of a function without arguments that returns a policy.

    Raises:
        ConfigError: there is no policy of this name or at this location, two packages registered
            it, it fails to load, or it is not a policy.
    """
    if not isinstance(spec, str):
        return _as_policy(spec, f"{spec!r}")
    if ":" in spec:
        return _as_policy(_at(spec), spec)
    if spec in _BUILT_IN:
        module, cls = _BUILT_IN[spec]
        return cast("Policy", getattr(import_module(f"{__package__}.{module}"), cls)())
    found = _third_parties().get(spec)
    if not found:
        known = names()
        raise ConfigError(
            f"there is no policy {spec!r}{did_you_mean(spec, known)}; allowed: {listed(known)}"
        )
    if len(found) > 1:
        sources = " and ".join(sorted(entry.value for entry in found))
        raise ConfigError(f"the policy {spec!r} is registered more than once: by {sources}")
    return _load(spec, found[0])


def name_of(spec: Spec) -> str:
    """Return the text for a policy in messages: its name, or its location."""
    if isinstance(spec, str):
        return spec
    name = getattr(spec, "name", None)  # of a class, it may be a property
    return name if isinstance(name, str) else getattr(spec, "__name__", type(spec).__name__)


def is_built_in(policy: Policy) -> bool:
    """Return True if the policy is one of umem's own, whose plans need no check."""
    homes = {f"{__package__}.{module}" for module, _ in _BUILT_IN.values()}
    return type(policy).__module__ in homes


def listed(known: tuple[str, ...]) -> str:
    """Return the allowed values for a policy as text, the baselines last."""
    first = [name for name in known if name not in BASELINES]
    return (
        f"{', '.join(first)}; module:attribute or file.py:attribute; baselines: "
        f"{', '.join(BASELINES)}"
    )


def _third_parties() -> dict[str, list[metadata.EntryPoint]]:
    found: dict[str, list[metadata.EntryPoint]] = {}
    for entry in metadata.entry_points(group=ENTRY_POINTS):
        known = found.setdefault(entry.name, [])
        if entry not in known:  # the same package found in two folders of the path
            known.append(entry)
    return found


def _load(name: str, entry: metadata.EntryPoint) -> Policy:
    try:
        loaded = entry.load()
    except Exception as error:  # a stranger's code
        raise ConfigError(
            f"the policy {name!r} ({entry.value}) does not load: {error!r}"
        ) from error
    made = _as_policy(loaded, entry.value)
    if made.name != name:
        raise ConfigError(
            f"{entry.value} is registered as the policy {name!r} and calls itself {made.name!r}:"
            " make the two names equal"
        )
    return made


def _at(place: str) -> object:
    """Load the attribute at `module:attribute` or `file.py:attribute`."""
    where, _, attribute = place.rpartition(":")
    if not where or not attribute.isidentifier():
        raise ConfigError(f"the policy {place!r}; allowed: module:attribute or file.py:attribute")
    try:
        module = python_file.load(Path(where)) if where.endswith(".py") else _imported(where)
    except Exception as error:  # a stranger's code
        raise ConfigError(f"the policy {place!r} does not load: {error!r}") from error
    if not hasattr(module, attribute):
        known = [name for name in vars(module) if not name.startswith("_")]
        raise ConfigError(
            f"the policy {place!r}: {where} has no {attribute!r}{did_you_mean(attribute, known)}"
        )
    found: object = getattr(module, attribute)
    return found


def _imported(module: str) -> object:
    """Import the module; look in the working directory last."""
    folder = str(Path.cwd())
    if folder in sys.path:
        return import_module(module)
    sys.path.append(folder)
    try:
        return import_module(module)
    finally:
        with contextlib.suppress(ValueError):  # the module may have changed the list
            sys.path.remove(folder)


def _as_policy(given: object, origin: str) -> Policy:
    """Return `given` if it is a policy; else call a factory, or wrap what only has a plan."""
    made = given
    if isinstance(given, type) or (_plan_of(given) is None and _takes(given, 0)):
        try:
            made = cast("Callable[[], object]", given)()
        except Exception as error:  # a stranger's code
            raise ConfigError(f"the policy {origin} cannot be made: {error!r}") from error
    plan = _plan_of(made)
    if plan is not None and (plan is made or not hasattr(made, "name")):
        return _Wrapped(made, plan)
    if plan is not None and isinstance(getattr(made, "name", None), str):
        return cast("Policy", made)
    lacks = "method `plan(trace, device, budget)`" if plan is None else "`name` of text"
    raise ConfigError(
        f"{origin} is {kind_of(made)}, not a policy: it has no {lacks} (docs/policies.md); "
        f"allowed: {ALLOWED}"
    )


def _plan_of(given: object) -> Callable[..., Any] | None:
    """Return what plans: the method `plan`, or else the object itself; None if nothing can."""
    plan = getattr(given, "plan", given)
    # A compiled method may have no signature.
    takes = _takes(plan, 3, unknown=plan is not given)
    return cast("Callable[..., Any]", plan) if takes else None


def _takes(function: object, count: int, unknown: bool = False) -> bool:
    """Return whether a callable takes so many arguments; `unknown` if it has no signature."""
    import inspect

    try:
        signature = inspect.signature(cast("Callable[..., object]", function))
    except TypeError:  # it is no callable
        return False
    except ValueError:
        return unknown
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


class _Wrapped:
    """A plan function, or an object without a name, as a policy.

    Args:
        given: has the policy's other attributes, and its name or its type's.
        plan: makes the plans.
    """

    def __init__(self, given: object, plan: Callable[..., Any]) -> None:
        self.name, self.plan = name_of(given), plan
        for attribute in ("rollback", "second", "victims"):
            if hasattr(given, attribute):
                setattr(self, attribute, getattr(given, attribute))
