"""Storage spans of hints: the tensors in a target, and the bytes that they use."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umem.errors import ConfigError
from umem.residency.spans import parts, stream_of

ITEM = 4


@dataclass
class Storage:
    address: int = 1 << 30
    size: int = 1 << 20

    def data_ptr(self) -> int:
        return self.address

    def nbytes(self) -> int:
        return self.size


class OnGpu:
    """A wrapper, such as a DTensor, that asks like an array of a GPU and cannot answer."""

    def __init__(self, *inner: object) -> None:
        self.inner, self.mesh = inner[0], "no tensor"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner", "mesh"], None

    def untyped_storage(self) -> Storage:
        return Storage(0)

    @property
    def __cuda_array_interface__(self) -> object:
        raise RuntimeError("it requires a gradient")


def test_a_wrapper_is_what_it_wraps() -> None:
    inner = Tensor()
    (part,) = parts({"w": OnGpu(inner)}, "pin")
    assert (part.name, part.tensor) == ("w.inner", inner)


@dataclass(eq=False)
class Tensor:
    shape: tuple[int, ...] = (16,)
    strides: tuple[int, ...] = (1,)
    offset: int = 0
    storage: Storage = field(default_factory=Storage)

    def untyped_storage(self) -> Storage:
        return self.storage

    def stride(self) -> tuple[int, ...]:
        return self.strides

    def storage_offset(self) -> int:
        return self.offset

    def element_size(self) -> int:
        return ITEM


class Module:
    handle, size = object(), 8  # as cuda.core's buffers have

    def __init__(self, **members: Tensor) -> None:
        self.members = members

    def named_parameters(self) -> list[tuple[str, Tensor]]:
        return [(name, t) for name, t in self.members.items() if not name.startswith("_")]

    def named_buffers(self) -> list[tuple[str, Tensor]]:
        return [(name, t) for name, t in self.members.items() if name.startswith("_")]


class Wrapper(Tensor):
    def __init__(self, inner: Tensor) -> None:
        super().__init__(storage=Storage(address=0))
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None


dims = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), max_size=4)


@given(dims=dims, offset=st.integers(0, 20))
@settings(max_examples=300)
def test_the_span_is_from_the_first_byte_to_the_last(
    dims: list[tuple[int, int]], offset: int
) -> None:
    shape, strides = tuple(n for n, _ in dims), tuple(s for _, s in dims)
    touched = {
        offset + sum(i * s for i, s in zip(index, strides, strict=True))
        for index in itertools.product(*map(range, shape))
    }
    (part,) = parts(Tensor(shape, strides, offset), "x")
    assert part.address == (1 << 30) + min(touched) * ITEM
    assert part.nbytes == (max(touched) - min(touched) + 1) * ITEM
    if part.dense:
        assert touched == set(range(min(touched), max(touched) + 1))


@given(shape=st.lists(st.integers(1, 5), max_size=4), data=st.data())
def test_any_order_of_dimensions_is_dense(shape: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    strides, step = [0] * len(shape), 1
    for dim in order:
        strides[dim] = step
        step *= shape[dim]
    (part,) = parts(Tensor(tuple(shape), tuple(strides)), "x")
    assert part.dense
    assert part.nbytes == step * ITEM


def test_bytes_after_the_storage_are_no_part() -> None:
    short = Storage(size=10 * ITEM)
    assert parts(Tensor((16,), storage=short), "x")[0].nbytes == 10 * ITEM
    assert parts(Tensor((16,), offset=12, storage=short), "x")[0].nbytes == 0
    assert parts(Tensor((0,)), "x")[0].nbytes == 0
    assert parts(Tensor(storage=Storage(0, 0)), "x")[0].address == 0


def test_names_and_shared_tensors() -> None:
    one, two, three = (Tensor(storage=Storage(1 << (20 + i))) for i in range(3))
    found = parts({"a": Module(w=one, _mask=two), "b": [one, (three,)]}, "x")
    assert [part.name for part in found] == ["a.w", "a._mask", "b.1.0"]
    assert [part.tensor for part in found] == [one, two, three]
    assert [part.name for part in parts(one, "x")] == [""]
    empty = [Tensor((0,)), Tensor((0,))]
    assert len(parts(empty, "x")) == 2


def test_members_have_the_names_of_their_keys_and_those_of_tensors_a_position() -> None:
    target = {("b", 1): Tensor((1,)), 1: Tensor((2,)), Tensor(): Tensor((3,))}
    assert [part.name for part in parts(target, "x")] == ["('b', 1)", "1", "2"]


def test_a_wrapper_is_what_it_holds() -> None:
    inner = Tensor()
    (part,) = parts([Wrapper(inner)], "x")
    assert (part.name, part.tensor, part.nbytes) == ("0.inner", inner, 16 * ITEM)


class Array:
    def __init__(self, name: str, **interface: object) -> None:
        setattr(self, name, interface)


@pytest.mark.parametrize("name", ["__cuda_array_interface__", "__array_interface__"])
def test_arrays_of_other_frameworks(name: str) -> None:
    whole = Array(name, shape=(4, 8), typestr="<f4", data=(4096, False), strides=None)
    column = Array(name, shape=(4, 2), typestr="<f4", data=(8192, False), strides=(32, 4))
    backwards = Array(name, shape=(8,), typestr="<i8", data=(16384 + 56, False), strides=(-8,))
    empty = Array(name, shape=(0, 8), typestr="|u1", data=(0, False))
    found = parts({"a": [whole, column], "b": (backwards, empty)}, "x")
    assert [(part.name, *part.span, part.dense) for part in found] == [
        ("a.0", 4096, 128, True),
        ("a.1", 8192, 3 * 32 + 8, False),
        ("b.0", 16384, 64, True),
        ("b.1", 0, 0, True),
    ]


@pytest.mark.parametrize("dtype", ["<U5", "<M8[25s]", "|S3", "|V7", "<c16"])
def test_items_of_unusual_types(dtype: str) -> None:
    array = np.zeros(6, dtype)
    (part,) = parts([array], "x")
    assert part.span == (array.ctypes.data, array.nbytes)


@pytest.mark.parametrize(
    ("said", "stream"),
    [({}, 0), ({"stream": 1}, 0), ({"stream": 77}, 77), ({"stream": None}, 0), ({"stream": 2}, 2)],
)
def test_the_stream_that_an_array_names(said: dict[str, int], stream: int) -> None:
    assert stream_of(Array("__cuda_array_interface__", **said)) == stream
    assert stream_of(Array("__array_interface__", **said)) == 0


def test_buffers_of_cuda_core() -> None:
    buffer = type("Buffer", (), {"handle": 4096, "size": 256})()
    assert [part.span for part in parts([buffer, buffer], "x")] == [(4096, 256)]


@pytest.mark.parametrize(
    "target",
    [3, "weights", b"weights", None, [Tensor(), 3], {"a": None}, np.array([None, 3], object)],
)
def test_what_is_no_tensor_is_refused(target: object) -> None:
    with pytest.raises(ConfigError, match=r"umem\.pin\(\.\.\.\) was given .*; allowed: a tensor"):
        parts(target, "pin")


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (3, "given an int; allowed"),
        ([Tensor(), {"a": 3}], r"given an int at 1\.a; allowed"),
        ({"layers": [Tensor(), "x"]}, r"given a str at layers\.1; allowed"),
    ],
)
def test_the_place_of_what_is_refused_is_named(target: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parts(target, "prefetch")
