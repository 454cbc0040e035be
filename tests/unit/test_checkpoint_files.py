"""Checkpoint files: the contents of good ones, and the errors for bad ones."""

from __future__ import annotations

import json
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from umem.errors import CheckpointError  # noqa: E402
from umem.offload.checkpoint import file_tensor, files, safetensors  # noqa: E402
from umem.offload.checkpoint.file_tensor import FileTensor  # noqa: E402

NAMES = {name: getattr(torch, of) for name, of in safetensors._DTYPES.items() if hasattr(torch, of)}


def content(header: object, data: bytes, pad: int = 0) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * pad
    return len(text).to_bytes(8, "little") + text + data


def row(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write(path: Path, tensors: dict[str, torch.Tensor], pad: int = 0) -> Path:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    of = {dtype: name for name, dtype in NAMES.items()}
    for name, tensor in tensors.items():
        value = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        header[name] = row(of[tensor.dtype], list(tensor.shape), len(data), len(data) + len(value))
        data += value
    path.write_bytes(content(header, data, pad))
    return path


def read(path: Path) -> dict[str, torch.Tensor]:
    found = {}
    for name, stored in files.tensors_of(path).items():
        found[name] = torch.empty(stored.shape, dtype=stored.dtype)
        stored.copy_to(found[name])
    return found


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit by bit, so that NaNs are equal."""
    flat = [t.contiguous().view(-1).view(torch.uint8) for t in (a, b)]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*flat)


shapes = st.lists(st.integers(0, 5), max_size=4)


@settings(max_examples=60)
@given(
    tensors=st.dictionaries(
        st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(sorted(NAMES)), shapes),
        max_size=5,
    ),
    pad=st.integers(0, 9),
    chunk=st.sampled_from([16, 48, 1 << 20]),
)
def test_safetensors_of_any_dtypes_and_shapes(
    tmp_path_factory: pytest.TempPathFactory,
    tensors: dict[str, tuple[str, list[int]]],
    pad: int,
    chunk: int,
) -> None:
    made = {}
    for i, (name, (dtype, shape)) in enumerate(tensors.items()):
        size = torch.Size(shape).numel() * NAMES[dtype].itemsize
        values = (torch.arange(size) * 7 + i) % (2 if dtype == "BOOL" else 251)
        made[name] = values.to(torch.uint8).view(NAMES[dtype]).view(shape)
    path = write(tmp_path_factory.mktemp("st") / "model.safetensors", made, pad)
    before, file_tensor.CHUNK_BYTES = file_tensor.CHUNK_BYTES, chunk
    try:
        found = read(path)
    finally:
        file_tensor.CHUNK_BYTES = before
    assert found.keys() == made.keys()
    assert all(same(found[name], made[name]) for name in made)


def test_the_formats_own_library_agrees(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    made = {"a": torch.randn(3, 4), "b": torch.arange(5), "c": torch.ones(2, dtype=torch.bfloat16)}
    library.save_file(made, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    found = read(tmp_path / "theirs.safetensors")
    assert all(same(found[name], made[name]) for name in made)
    ours = library.load_file(write(tmp_path / "ours.safetensors", made))
    assert all(same(ours[name], made[name]) for name in made)


GOOD = {"a": row("F32", [2, 3], 0, 24), "b": row("I64", [2], 24, 40)}


@pytest.mark.parametrize(
    ("header", "data", "reason"),
    [
        (GOOD, bytes(39), "cut off"),
        (GOOD, bytes(41), "more data in the file than the header lists"),
        (GOOD | {"b": row("I64", [2], 16, 32)}, bytes(40), "'b' overlaps"),
        (GOOD | {"b": row("I64", [2], 32, 48)}, bytes(48), "'b' begins after a gap"),
        (GOOD | {"b": row("I64", [3], 24, 40)}, bytes(40), "needs 24 bytes, .* gives it 16"),
        (GOOD | {"b": row("I64", [2], 40, 24)}, bytes(40), "needs 16 bytes, .* gives it -16"),
        (GOOD | {"b": row("F4", [2], 24, 25)}, bytes(25), "dtype 'F4'; allowed: BOOL"),
        (GOOD | {"b": row("I64", [-2], 24, 40)}, bytes(40), r"shape \[-2\]"),
        (GOOD | {"b": row("I64", [2.0], 24, 40)}, bytes(40), r"shape \[2.0\]"),
        (GOOD | {"b": row("I64", [True], 24, 32)}, bytes(32), r"shape \[True\]"),
        (GOOD | {"b": {"dtype": "I64"}}, bytes(40), "'b' needs dtype, shape and data_offsets"),
        (GOOD | {"b": 3}, bytes(40), "'b' needs dtype"),
        (GOOD | {"b": {**row("I64", [2], 24, 40), "data_offsets": [24]}}, bytes(40), "two of them"),
        (b'{"a": {}, "a": {}}', b"", "'a' is in the header twice"),
        (GOOD | {"b": {**row("I64", [2], 24, 40), "shape": 2}}, bytes(40), "shape 2"),
        (GOOD | {"b": row("I64", [1] * 65, 24, 32)}, bytes(32), r"shape \[1, 1"),
        (b'{"a": ', b"", "not JSON"),
        (b"{" + b"[" * 100000, b"", "not JSON"),
        (b'{"a": "\xff"}', b"", "not JSON"),
    ],
)
def test_headers_that_cannot_be(tmp_path: Path, header: object, data: bytes, reason: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content(header, data))
    with pytest.raises(CheckpointError, match=reason) as caught:
        files.tensors_of(path)
    assert str(path) in str(caught.value)


def test_a_name_twice_among_many_is_found_in_linear_time(tmp_path: Path) -> None:
    names = [*(f"n{i}" for i in range(10_000)), "n9999"]
    header = "{" + ",".join(f'"{name}":0' for name in names) + "}"
    path = tmp_path / "model.safetensors"
    path.write_bytes(content(header.encode(), b""))
    begin = time.process_time()
    with pytest.raises(CheckpointError, match="'n9999' is in the header twice"):
        files.tensors_of(path)
    assert time.process_time() - begin < 1  # quadratic: 3 seconds, and hours for a longer header


@settings(max_examples=150)
@given(at=st.integers(0, 200), value=st.integers(0, 255), cut=st.integers(0, 200))
def test_a_damaged_file_is_an_error_or_has_all_its_bytes(
    tmp_path_factory: pytest.TempPathFactory, at: int, value: int, cut: int
) -> None:
    whole = bytearray(content(GOOD, bytes(range(40))))
    whole[at % len(whole)] = value
    path = tmp_path_factory.mktemp("st") / "model.safetensors"
    path.write_bytes(whole[: len(whole) - (cut if cut < 60 else 0)])
    try:
        found = read(path)
    except CheckpointError:
        return
    assert cut == 0 or cut >= 60
    assert sum(tensor.nbytes for tensor in found.values()) == 40


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("a.safetensors", b"", "it has no header"),
        ("a.safetensors", bytes(7), "it has no header"),
        ("a.safetensors", (1 << 40).to_bytes(8, "little") + b"{}", "cut off inside its header"),
        ("a.pt", b"some words that are no checkpoint", "not a checkpoint; allowed: a .safetensors"),
        ("a.pt", b"PK\x03\x04 and nothing", "cannot read it"),
        ("a.index.json", b"{", "not JSON"),
        ("a.index.json", b"[]", "no weight_map"),
        ("a.index.json", b'{"weight_map": {"a": "../b.safetensors"}}', "of the same directory"),
        ("a.index.json", b'{"weight_map": {"a": 3}}', "'a' is in 3"),
        (
            "a.index.json",
            b'{"weight_map": {"a": "' + b"x" * 256 + b'"}}',
            "missing in its directory: xxx",
        ),
    ],
)
def test_files_that_are_no_checkpoint(tmp_path: Path, name: str, data: bytes, reason: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=reason):
        files.tensors_of(tmp_path / name)


def test_paths_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        files.tensors_of(tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match="no checkpoint in this directory"):
        files.tensors_of(tmp_path)
    with pytest.raises(CheckpointError, match="File name too long"):
        files.tensors_of(tmp_path / ("x" * 256))


def sharded(folder: Path) -> dict[str, torch.Tensor]:
    made = {"a": torch.randn(3, 4), "b": torch.randn(5), "c": torch.randn(2, 2)}
    write(folder / "model-1.safetensors", {"b": made["b"]})
    write(folder / "model-2.safetensors", {"a": made["a"], "c": made["c"]})
    index = {"metadata": {"total_size": 84}, "weight_map": {
        "a": "model-2.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors",
    }}  # fmt: skip
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return made


def test_a_directory_and_its_index_are_all_their_files(tmp_path: Path) -> None:
    made = sharded(tmp_path)
    for path in (tmp_path, tmp_path / "model.safetensors.index.json"):
        found = read(path)
        assert all(same(found[name], made[name]) for name in made)


def test_a_single_file_counts_beside_the_index_of_an_older_checkpoint(tmp_path: Path) -> None:
    sharded(tmp_path)
    made = {"a": torch.randn(3, 4)}
    write(tmp_path / "model.safetensors", made)
    found = read(tmp_path)
    assert found.keys() == made.keys()
    assert same(found["a"], made["a"])


def test_an_index_and_its_files_have_to_agree(tmp_path: Path) -> None:
    made = sharded(tmp_path)
    write(tmp_path / "model-1.safetensors", {"x": made["b"]})
    with pytest.raises(CheckpointError, match=r"'b' is not in model-1\.safetensors"):
        files.tensors_of(tmp_path)
    write(tmp_path / "model-1.safetensors", {"b": made["b"], "x": made["b"]})
    with pytest.raises(CheckpointError, match=r"'x' of model-1\.safetensors is not in the index"):
        files.tensors_of(tmp_path)
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"missing in its directory: model-1\.safetensors"):
        files.tensors_of(tmp_path)


def test_torch_files_with_views_and_strides(tmp_path: Path) -> None:
    base = torch.arange(1000.0).view(10, 100)
    made = {
        "base": base, "turned": base.t(), "rows": base[2:4], "column": base[:, 3],
        "image": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "wide": torch.ones(1, 4).expand(3, 4), "empty": torch.empty(0, 3), "one": torch.tensor(3),
        "half": torch.ones(3, dtype=torch.bfloat16), "own": torch.nn.Parameter(torch.ones(2, 2)),
    }  # fmt: skip
    torch.save(made, tmp_path / "model.pt")
    found = read(tmp_path / "model.pt")
    assert found.keys() == made.keys()
    assert all(same(found[name], made[name].detach()) for name in made)
    image = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    files.tensors_of(tmp_path / "model.pt")["image"].copy_to(image)
    assert torch.equal(image, made["image"])


class Plain:
    """A class that no state_dict has."""


@pytest.mark.parametrize(
    ("held", "reason"),
    [
        ([torch.ones(3)], "it holds a list; allowed: a state_dict"),
        ({"model": {"a": torch.ones(3)}}, "'model' is a dict; allowed: only a state_dict"),
        ({1: torch.ones(3)}, "1 is a Tensor"),
        ({"a": torch.ones(3).to_sparse()}, "layout torch.sparse_coo"),
        ({"a": torch._neg_view(torch.ones(3))}, "stored as its conjugate or its negative"),
        ({"a": torch.ones(3, dtype=torch.complex64).conj()}, "'a' is stored as its conjugate"),
        ({"a": Plain()}, "cannot read it"),
    ],
)
@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")  # torch's, since 2.14
def test_torch_files_of_something_else(tmp_path: Path, held: object, reason: str) -> None:
    torch.save(held, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=reason):
        files.tensors_of(tmp_path / "model.pt")


def test_torch_files_that_are_cut_off_or_old(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"a": torch.ones(1000)}, path)
    whole = path.read_bytes()
    for size in (len(whole) - 1, len(whole) // 2, 10):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="cannot read it"):
            files.tensors_of(path)
    torch.save({"a": torch.ones(1000)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"before torch 1\.6"):
        files.tensors_of(path)


def test_a_big_endian_torch_file(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1000)}, tmp_path / "little.pt")
    with (
        zipfile.ZipFile(tmp_path / "little.pt") as little,
        zipfile.ZipFile(tmp_path / "big.pt", "w") as big,
    ):
        for name in little.namelist():
            big.writestr(name, b"big" if name.endswith("byteorder") else little.read(name))
    with pytest.raises(CheckpointError, match="big-endian"):
        files.tensors_of(tmp_path / "big.pt")


def test_a_file_that_becomes_shorter(tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors", {"a": torch.randn(1000)})
    stored = files.tensors_of(path)["a"]
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(CheckpointError, match="replaced or written while it was read"):
        stored.copy_to(torch.empty(1000))
    with pytest.raises(CheckpointError, match="was truncated"):  # after it was opened
        replace(stored, version=None).copy_to(torch.empty(1000))
    path.unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        stored.copy_to(torch.empty(1000))


def test_a_file_that_is_written_while_a_tensor_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place and to the same size, as `rsync --inplace` does, after its first bytes are read."""
    path = write(tmp_path / "model.safetensors", {"a": torch.zeros(1000)})
    stored, fill = files.tensors_of(path)["a"], FileTensor._fill

    def filled(self: FileTensor, file: Any, view: memoryview) -> None:
        fill(self, file, view)
        content = path.read_bytes()
        path.write_bytes(content[:-2000] + b"1" * 2000)

    monkeypatch.setattr(FileTensor, "_fill", filled)
    with pytest.raises(CheckpointError, match="replaced or written while it was read"):
        stored.copy_to(torch.empty(1000))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz])
def test_the_small_floats_of_amds_gpus(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.arange(8.0).to(dtype)
    path = write(tmp_path / "model.safetensors", {"a": values})
    target = torch.empty(8, dtype=dtype)
    files.tensors_of(path)["a"].copy_to(target)
    assert torch.equal(target.view(torch.uint8), values.view(torch.uint8))


@pytest.mark.parametrize("name", ["latest.pt", "latest.safetensors"])
def test_a_file_that_is_replaced_between_two_tensors(tmp_path: Path, name: str) -> None:
    """Else some weights would be those of another file."""
    path = write(tmp_path / name, {"a": torch.zeros(9), "b": torch.zeros(9)})
    stored, target = files.tensors_of(path), torch.empty(9)
    stored["a"].copy_to(target)
    (tmp_path / "new").mkdir()
    write(tmp_path / "new" / name, {"a": torch.ones(9), "b": torch.ones(9)}).replace(path)
    with pytest.raises(CheckpointError, match="replaced or written while it was read"):
        stored["b"].copy_to(target)
    with pytest.raises(CheckpointError, match="replaced or written while it was read"):
        stored["b"].place(target)
    files.tensors_of(path)["b"].copy_to(target)
    assert bool((target == 1).all())
