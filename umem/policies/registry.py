"""Which policies there are, and how one is made by its name."""

from __future__ import annotations

from importlib import import_module, metadata
from typing import TYPE_CHECKING, cast

from ..errors import ConfigError
from ..values import did_you_mean

if TYPE_CHECKING:  # base needs numpy, and the names alone do not
    from .base import Policy

DEFAULT = "umem"
ENTRY_POINTS = "umem.policies"

# The name, the module and the class. A third party cannot take one of these names.
_BUILT_IN = {
    "umem": ("umem", "Umem"),
    "none": ("none", "Unmanaged"),
    "lru": ("lru", "Lru"),
    "conv_lru": ("conv_lru", "ConvLru"),
    "belady": ("belady", "Belady"),
    "ocdnn": ("ocdnn", "OcDnn"),
    "vdnn": ("vdnn", "Vdnn"),
    "vdnn_all": ("vdnn", "VdnnAll"),
    "vdnn_conv": ("vdnn", "VdnnConv"),
    "distance": ("distance", "Distance"),
    "autoswap": ("autoswap", "AutoSwap"),
    "capuchin": ("capuchin", "Capuchin"),
    "deepum": ("deepum", "DeepUm"),
    "stream_layers": ("stream_layers", "StreamLayers"),
    "optimizer_state": ("optimizer_state", "OptimizerState"),
    "lms": ("lms", "Lms"),
}


def names() -> tuple[str, ...]:
    """The built-in ones, the default first, then those that other packages brought."""
    return (*_BUILT_IN, *sorted(set(_third_parties()) - set(_BUILT_IN)))


def make(name: str) -> Policy:
    """A new policy of this name.

    Raises:
        ConfigError: there is none of this name, two packages brought one, or what a package
            brought fails to load or is no policy.
    """
    if name in _BUILT_IN:
        module, cls = _BUILT_IN[name]
        return cast("Policy", getattr(import_module(f"{__package__}.{module}"), cls)())
    found = _third_parties().get(name)
    if not found:
        known = names()
        raise ConfigError(
            f"there is no policy {name!r}{did_you_mean(name, known)}; allowed: {', '.join(known)}"
        )
    if len(found) > 1:
        sources = " and ".join(sorted(entry.value for entry in found))
        raise ConfigError(f"the policy {name!r} is registered more than once: by {sources}")
    return _load(name, found[0])


def _third_parties() -> dict[str, list[metadata.EntryPoint]]:
    found: dict[str, list[metadata.EntryPoint]] = {}
    for entry in metadata.entry_points(group=ENTRY_POINTS):
        known = found.setdefault(entry.name, [])
        if entry not in known:  # the same package seen by two folders of the path
            known.append(entry)
    return found


def _load(name: str, entry: metadata.EntryPoint) -> Policy:
    from .base import Policy

    try:
        made = entry.load()()
    except Exception as error:  # a stranger's code
        raise ConfigError(
            f"the policy {name!r} ({entry.value}) does not load: {error!r}"
        ) from error
    if not isinstance(made, Policy):
        raise ConfigError(
            f"{entry.value} gave a {type(made).__name__} for the policy {name!r}: it must have a"
            " `name` and a method `plan(trace, device, budget)` (umem/policies/base.py)"
        )
    if made.name != name:
        raise ConfigError(
            f"{entry.value} is registered as the policy {name!r} and calls itself {made.name!r}:"
            " make the two names equal"
        )
    return made
