"""The files of a checkpoint: one file, or several with an index."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, plain
from . import safetensors, torch_file
from .file_tensor import FileTensor, version_of

# Names in a directory, as Hugging Face's libraries write them; the first that exists is used, as
# there: a single file may stand beside the index of an older checkpoint.
_IN_DIRECTORY = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)  # fmt: skip
ALLOWED = (
    "a .safetensors file, a file of torch.save(state_dict), a .index.json of several such files, "
    f"or a directory with one of {', '.join(_IN_DIRECTORY)}"
)


def tensors_of(path: Path) -> dict[str, FileTensor]:
    """Return all tensors of a checkpoint by name, without reading their values.

    Raises:
        CheckpointError: there is no checkpoint, a file of it is missing, or one is malformed.
    """
    if os.path.isdir(path):
        found = next((path / name for name in _IN_DIRECTORY if os.path.isfile(path / name)), None)
        if found is None:
            raise CheckpointError(f"{path}: no checkpoint in this directory; allowed: {ALLOWED}")
        path = found
    return _of_index(path) if path.name.endswith(".json") else _of_file(path)


def _of_file(path: Path) -> dict[str, FileTensor]:
    try:
        with path.open("rb") as file:
            version, magic = version_of(os.fstat(file.fileno())), file.read(9)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}; allowed: {ALLOWED}") from error
    read = None
    if magic.startswith(torch_file.MAGIC):
        read = torch_file.read_places
    elif magic[8:] == b"{":
        read = safetensors.read_header
    if read is not None:
        return {name: replace(tensor, version=version) for name, tensor in read(path).items()}
    if path.suffix == ".safetensors":
        raise CheckpointError(f"{path}: not a safetensors file, or cut off: it has no header")
    raise CheckpointError(
        f"{path}: not a checkpoint; allowed: {ALLOWED}. Files that torch.save wrote before "
        "torch 1.6 are converted by torch.save(torch.load(path), path)"
    )


def _of_index(path: Path) -> dict[str, FileTensor]:
    places = _weight_map(path)
    files = sorted(set(places.values()))
    missing = [name for name in files if not os.path.isfile(path.parent / name)]
    if missing:
        raise CheckpointError(
            f"{path}: it names files that are missing in its directory: {plain(', '.join(missing))}"
        )
    shards = {name: _of_file(path.parent / name) for name in files}
    found = {}
    for name, file in places.items():
        if name not in shards[file]:
            raise CheckpointError(f"{path}: {name!r} is not in {file}")
        found[name] = shards[file][name]
    for file, held in shards.items():
        for name in held:
            if name not in places:
                raise CheckpointError(f"{path}: {name!r} of {file} is not in the index")
    return found


def _weight_map(path: Path) -> Mapping[str, str]:
    """Return the name of the file that each tensor is in."""
    try:
        index: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the index is not JSON ({error})") from error
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{path}: the index has no weight_map from names to files")
    for name, file in places.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(
                f"{path}: {name!r} is in {file!r}; allowed: a file name of the same directory"
            )
    return places
