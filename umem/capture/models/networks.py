"""The network that a configuration or a name describes, and data for one step of it.

Configurations are those of transformers and diffusers (`config.json`); names are those of their
classes, which then have their defaults, and of models in timm and torchvision. Nothing is
downloaded: weights have no values on fake tensors.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from ...base import extras
from ...errors import ConfigError, NotSupportedError, PlanError, did_you_mean, plain

LIBRARIES = ("transformers", "diffusers", "timm", "torchvision")
SEQUENCE = 2048  # tokens per sample by default, if the model has so many positions
IMAGE = 224  # pixels of a side, if the model does not say
LATENT = 64  # the same for latents: those of 512 pixels
# Keys of the number of positions, which a longer sequence raises.
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")
# Heads of transformers in the order in which they are tried: some models have several.
_HEADS = ("ForImageClassification", "ForSeq2SeqLM", "ForMaskedLM", "ForCausalLM", "")
# Ends of the names of classes with a label for each token; others have one for each sample.
_BY_TOKEN = ("CausalLM", "LMHeadModel", "MaskedLM", "ConditionalGeneration", "TokenClassification")
_TOKENS_OF_PROMPT = 77  # of CLIP, which most diffusion models are conditioned by


class Shape(NamedTuple):
    """The size of a step's data."""

    batch: int
    sequence: int | None = None  # tokens per sample; None: the model takes none, or its default
    image: int | None = None  # pixels of a side, of latents for diffusion; None: the model's own


class Network(NamedTuple):
    """A model with the data and the loss of a step."""

    model: nn.Module
    batch: Mapping[str, torch.Tensor]  # arguments of the model; `labels` may be for the loss only
    forward: Callable[[nn.Module, Mapping[str, torch.Tensor]], Any]
    loss: Callable[[Any, Mapping[str, torch.Tensor]], torch.Tensor]  # of what `forward` returns


@dataclass(frozen=True)
class Source:
    """Builds a network with data of any shape."""

    title: str
    build: Callable[[Shape], Network]
    sequence: int | None = None  # the default; None: the model takes none
    positions: int | None = None  # the longest sequence that the model was made for


def find(text: str, directory: Path) -> Source:
    """Return the model that a file, a folder with `config.json`, or a name describes.

    Raises:
        ConfigError: there is no such file or model, or the file describes none.
        NotSupportedError: its library is not installed.
    """
    path = directory / text
    folder = os.path.isdir(path)
    if folder or path.suffix == ".json":
        return _of_file(path / "config.json" if folder else path)
    prefix, _, rest = text.partition(".")
    if prefix in LIBRARIES:
        found = _of_name(prefix, rest)
        if found is None:
            hint = did_you_mean(rest, _names(prefix))
            raise ConfigError(f"{text!r}: {prefix} has no such model{hint}")
        return found
    installed, missing, broken = [], [], ""
    for library in LIBRARIES:
        try:
            found = _of_name(library, text)
        except NotSupportedError as error:
            if isinstance(error.__cause__, ModuleNotFoundError):
                missing.append(library)
            else:
                broken += f"; {error}"
            continue
        if found is not None:
            return found
        installed.append(library)
    more = f"; not installed: pip install {' '.join(missing)}" if missing else ""
    hint = did_you_mean(text, [name for library in installed for name in _names(library)])
    raise ConfigError(
        f"{text!r} is not a config.json, a folder with one, or a model of "
        f"{' or '.join(installed) or 'an installed library'}{hint}{more}{broken}"
    )


def _of_file(path: Path) -> Source:
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as a configuration: {error}") from None
    match config:
        case {"_class_name": str(name)}:
            library = _load("diffusers")
            kind = getattr(library, name, None)
            if kind is None:
                raise ConfigError(f"{path}: diffusers has no class {name!r}")
            return _diffusers(library, kind, config)
        case {"architecture": str(name)}:
            return _timm(_load("timm"), name, config)
        case {"model_type": str(kind)}:
            library = _load("transformers")
            if kind not in library.CONFIG_MAPPING:
                raise ConfigError(f"{path}: transformers {library.__version__} has no {kind!r}")
            with _explained(f"{path}: transformers"):
                made = library.CONFIG_MAPPING[kind].from_dict(config)
            return _transformers(library, made)
    raise ConfigError(
        f"{path} describes no model; allowed: a file with model_type (transformers), _class_name "
        "(diffusers) or architecture (timm)"
    )


def _of_name(library: str, name: str) -> Source | None:
    module = _load(library)
    if library == "timm":
        return _timm(module, name) if module.is_model(name) else None
    if library == "torchvision":
        return _torchvision(module, name) if name in module.models.list_models() else None
    with _explained(f"{name} of {library}"):
        kind = getattr(module, name, None) if name in dir(module) else None
    if not isinstance(kind, type):
        return None
    if library == "diffusers":
        return _diffusers(module, kind, {}) if issubclass(kind, nn.Module) else None
    is_config = issubclass(kind, module.PretrainedConfig)
    config = kind if is_config else getattr(kind, "config_class", None)
    if config is None or not (is_config or issubclass(kind, module.PreTrainedModel)):
        return None
    with _explained(f"{name} of transformers with its defaults"):
        made = config()
    return _transformers(module, made, None if is_config else kind)


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turn a library's exception into ConfigError."""
    try:
        yield
    except Exception as error:
        raise ConfigError(f"{what}: {type(error).__name__}: {plain(str(error))}") from error


def _load(library: str) -> Any:
    return extras.load(library, f"a model of {library}", library)


def _names(library: str) -> list[str]:
    """Return the names of a library's models, with those of its other classes."""
    module = _load(library)
    match library:
        case "timm":
            return list(module.list_models())
        case "torchvision":
            return list(module.models.list_models())
    return [name for name in dir(module) if name[:1].isupper()]


def _transformers(library: Any, config: Any, kind: Any = None) -> Source:
    kind = kind or _class_of(library, config)
    counts = (getattr(config, key, None) for key in _POSITIONS)
    positions = next((n for n in counts if isinstance(n, int) and n > 0), None)  # XLNet has -1
    text = kind.main_input_name == "input_ids"

    def build(shape: Shape) -> Network:
        mine = copy.deepcopy(config)
        mine.use_cache = False
        if getattr(mine, "pad_token_id", None) is None:
            mine.pad_token_id = 0  # classifiers of a text need one for several texts
        if mine.is_encoder_decoder and getattr(mine, "decoder_start_token_id", None) is None:
            mine.decoder_start_token_id = mine.pad_token_id or 0
        if positions is not None and (shape.sequence or 0) > positions:
            for key in _POSITIONS:
                if getattr(mine, key, None):
                    setattr(mine, key, shape.sequence)
        model = kind(mine)
        return Network(model, _labelled(model, shape), _with_names, _own_loss)

    title = f"{kind.__name__} of transformers {library.__version__}"
    if getattr(config, "quantization_config", None):
        title += ", its weights not quantized"
    default = min(positions or SEQUENCE, SEQUENCE) if text else None
    return Source(title, build, default, positions if text else None)


def _class_of(library: Any, config: Any) -> Any:
    """Return the class that the configuration names, or the first head that its model has."""
    for name in config.architectures or ():
        if name in dir(library):
            return getattr(library, name)
    for head in _HEADS:
        known = getattr(library, f"AutoModel{head}")._model_mapping
        if type(config) in known:
            found = known[type(config)]
            return found[0] if isinstance(found, (list, tuple)) else found
    raise ConfigError(f"{type(config).__name__} has no model in transformers")


def _labelled(model: Any, shape: Shape) -> dict[str, torch.Tensor]:
    """Return data for a model of transformers, with labels if its forward pass takes them."""
    given: dict[str, torch.Tensor]
    labels = torch.zeros(shape.batch, dtype=torch.long)
    if model.main_input_name == "input_ids":
        ids = torch.zeros(shape.batch, shape.sequence or SEQUENCE, dtype=torch.long)
        given = {"input_ids": ids}
        if type(model).__name__.endswith(_BY_TOKEN):
            labels = torch.zeros_like(ids)
    elif model.main_input_name == "pixel_values":
        config = model.config
        if not hasattr(config, "image_size"):
            config = getattr(config, "vision_config", config)
        sides = _sides(shape.image or getattr(config, "image_size", IMAGE))
        channels = getattr(config, "num_channels", 3)
        given = {"pixel_values": torch.randn(shape.batch, channels, *sides)}
    else:
        raise PlanError(
            f"{type(model).__name__} takes {model.main_input_name}; allowed: models of input_ids "
            "or pixel_values. Write a function that returns its step (umem plan FILE.py:function)"
        )
    if "labels" in inspect.signature(model.forward).parameters:
        given["labels"] = labels
    return given


def _sides(side: Any) -> list[int]:
    """Return the pixels of a picture's sides, of which a configuration has one or both."""
    return list(side) if isinstance(side, (list, tuple)) else [side, side]


def _with_names(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> Any:
    return model(**batch)


def _own_loss(out: Any, _batch: object) -> torch.Tensor:
    """Return the model's own loss; without one, the mean square of its first output."""
    loss = getattr(out, "loss", None)
    return loss if isinstance(loss, torch.Tensor) else out[0].float().square().mean()


def _diffusers(library: Any, kind: Any, config: Mapping[str, Any]) -> Source:
    def build(shape: Shape) -> Network:
        model = kind.from_config(config) if config else kind()
        return Network(model, _noised(model, shape), _with_names, _own_loss)

    title = f"{kind.__name__} of diffusers {library.__version__}"
    return Source(title, build)


def _noised(model: Any, shape: Shape) -> dict[str, torch.Tensor]:
    """Return noise, its time, and what else the forward pass of a diffusion model needs."""
    config, batch = model.config, shape.batch
    channels = config.get("in_channels") or 3
    side = shape.image or config.get("sample_size") or (IMAGE if channels == 3 else LATENT)
    noise = [batch, channels, *_sides(side)]
    widths = ("cross_attention_dim", "joint_attention_dim", "caption_channels")
    width = next((size for key in widths if (size := config.get(key))), 0)
    known = {
        "sample": noise,
        "hidden_states": noise,
        "timestep": [batch],
        "encoder_hidden_states": [
            batch, _TOKENS_OF_PROMPT, width[0] if isinstance(width, (list, tuple)) else width,
        ],
        "pooled_projections": [batch, config.get("pooled_projection_dim") or 0],
    }  # fmt: skip
    taken = inspect.signature(model.forward).parameters
    wanted = [
        name
        for name, parameter in taken.items()
        if parameter.default is inspect.Parameter.empty or (name in known and all(known[name]))
    ]
    if unknown := [name for name in wanted if not all(known.get(name, [0]))]:
        raise PlanError(
            f"{type(model).__name__} takes {', '.join(unknown)}, for which there is no data; write "
            "a function that returns its step (umem plan FILE.py:function)"
        )
    return {name: torch.randn(known[name]) for name in wanted}


def _timm(library: Any, name: str, config: Mapping[str, Any] | None = None) -> Source:
    """Return a model of timm, with the classes, arguments and pictures of a `config.json`."""
    config = config or {}
    options = dict(config.get("model_args") or {})
    if "num_classes" in config:
        options.setdefault("num_classes", config["num_classes"])
    pictures = (config.get("pretrained_cfg") or {}).get("input_size")

    def build(shape: Shape) -> Network:
        model = library.create_model(name, **options)
        known = pictures or model.pretrained_cfg.get("input_size", (3, IMAGE, IMAGE))
        channels, height, width = known
        if shape.image is not None:
            height = width = shape.image
        return _pictures(model, shape.batch, (channels, height, width))

    return Source(f"{name} of timm {library.__version__}", build)


def _torchvision(library: Any, name: str) -> Source:
    make = library.models.get_model_builder(name)
    backbone = "weights_backbone"  # would be downloaded
    options = {backbone: None} if backbone in inspect.signature(make).parameters else {}

    def build(shape: Shape) -> Network:
        side = shape.image or IMAGE
        return _pictures(make(**options), shape.batch, (3, side, side))

    return Source(f"{name} of torchvision {library.__version__}", build)


def _pictures(model: nn.Module, batch: int, size: tuple[int, int, int]) -> Network:
    data = {"x": torch.randn(batch, *size), "labels": torch.zeros(batch, dtype=torch.long)}
    return Network(model, data, lambda model, given: model(given["x"]), _loss_of_classes)


def _loss_of_classes(out: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the cross entropy of scores by class; of any other output, its mean square."""
    if isinstance(out, Mapping):
        out = next(iter(out.values()))
    elif isinstance(out, tuple):
        out = out[0]
    if out.ndim == 2:
        return functional.cross_entropy(out, batch["labels"])
    loss: torch.Tensor = out.float().square().mean()
    return loss
