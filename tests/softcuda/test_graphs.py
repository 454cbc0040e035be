"""Graphs of the software driver: conditional nodes, capture into a graph, user objects."""

from __future__ import annotations

import pytest
from softcuda.programs import (
    driver_program,
    reason_without_libraries,
    reason_without_torch,
    torch_program,
)
from support.gpu import needs_torch

pytestmark = pytest.mark.skipif(
    reason_without_libraries() is not None, reason=str(reason_without_libraries())
)
WITH_TORCH = pytest.mark.skipif(
    reason_without_torch() is not None, reason=str(reason_without_torch())
)
SEEDS = pytest.mark.parametrize("seed", ["0", "1", "2"])

GRAPHS = """
    IF, WHILE, SWITCH = range(3)
    ASSIGN_DEFAULT, MOVE, ILLEGAL_STATE, NOT_SUPPORTED = 1, 1, 401, 801
    HOST_FUNCTION = ctypes.CFUNCTYPE(None, c_void_p)
    d.softcuda_set_condition.argtypes = [c_uint64, ctypes.c_uint]
    kept = []  # functions that the driver calls

    class Params(ctypes.Structure):
        _fields_ = [("type", c_int), ("reserved", c_int * 3), ("handle", c_uint64),
                    ("kind", c_int), ("size", ctypes.c_uint),
                    ("bodies", ctypes.POINTER(c_void_p)), ("rest", c_uint64 * 30)]

    def new_graph():
        graph = c_void_p()
        ok(d.cuGraphCreate(byref(graph), 0))
        return graph

    def condition(graph, value=0, flags=0):
        handle = c_uint64()
        ok(d.cuGraphConditionalHandleCreate(byref(handle), graph, None, value, flags))
        return handle.value

    def conditional(graph, handle, kind, size=1):
        params, node = Params(type=13, handle=handle, kind=kind, size=size), c_void_p()
        ok(d.cuGraphAddNode_v2(byref(node), graph, None, None, c_size_t(0), byref(params)))
        assert node.value
        return [c_void_p(params.bodies[i]) for i in range(size)]

    def capture(graph, *functions):
        stream = new_stream()
        ok(d.cuStreamBeginCaptureToGraph(stream, graph, None, None, c_size_t(0), 0))
        for function in functions:
            kept.append(HOST_FUNCTION(lambda _, function=function: function()))
            ok(d.cuLaunchHostFunc(stream, kept[-1], None))
        ok(d.cuStreamEndCapture(stream, None))

    def run(graph, times=1):
        executable = c_void_p()
        ok(d.cuGraphInstantiateWithFlags(byref(executable), graph, c_uint64(0)))
        stream = new_stream()
        for _ in range(times):
            ok(d.cuGraphLaunch(executable, stream))
            ok(d.cuStreamSynchronize(stream))
        ok(d.cuGraphExecDestroy(executable))

    def write(text):
        return lambda: written.append(text)

    context()
    written = []
"""


@SEEDS
def test_a_graph_runs_the_nodes_of_each_capture_into_it(seed: str) -> None:
    driver_program(
        GRAPHS
        + """
    graph = new_graph()
    capture(graph, write("a"), write("b"))
    capture(graph, write("c"))
    assert written == []
    run(graph, times=2)
    assert written == list("abcabc")
    ok(d.cuGraphDestroy(graph))
    """,
        SOFTCUDA_SEED=seed,
    )


@SEEDS
def test_if_and_switch_run_the_body_that_the_value_chooses(seed: str) -> None:
    driver_program(
        GRAPHS
        + """
    for kind, size, value, expected in [
        (IF, 1, 1, ["0"]), (IF, 1, 0, []), (IF, 2, 7, ["0"]), (IF, 2, 0, ["1"]),
        (SWITCH, 3, 0, ["0"]), (SWITCH, 3, 2, ["2"]), (SWITCH, 3, 3, []),
    ]:
        written.clear()
        graph = new_graph()
        handle = condition(graph)
        capture(graph, lambda: d.softcuda_set_condition(handle, value))
        bodies = conditional(graph, handle, kind, size)
        for i, body in enumerate(bodies):
            capture(body, write(str(i)))
        capture(graph, write("end"))
        run(graph)
        assert written == [*expected, "end"], (kind, size, value, written)
    """,
        SOFTCUDA_SEED=seed,
    )


def test_while_runs_until_its_body_says_so_and_again_at_each_launch() -> None:
    driver_program(
        GRAPHS
        + """
    graph, left = new_graph(), [0]
    handle = condition(graph, 1, ASSIGN_DEFAULT)
    (body,) = conditional(graph, handle, WHILE)
    inner = condition(body)
    def count():
        left[0] = (left[0] or 3) - 1
        d.softcuda_set_condition(inner, left[0] == 1)
        d.softcuda_set_condition(handle, left[0])
    capture(body, write("turn"), count)
    (nested,) = conditional(body, inner, IF)
    capture(nested, write("one is left"))
    run(graph, times=2)
    assert written == ["turn", "turn", "one is left", "turn"] * 2, written
    """
    )


def test_what_cannot_be_added_or_captured_is_refused() -> None:
    driver_program(
        GRAPHS
        + """
    graph, node = new_graph(), c_void_p()
    handle = condition(graph)
    def add(**params):
        return d.cuGraphAddNode_v2(byref(node), graph, None, None, c_size_t(0),
                                   byref(Params(**params)))
    assert add(type=0) == NOT_SUPPORTED
    for params in [dict(kind=WHILE, size=2), dict(kind=IF, size=3), dict(kind=IF, size=0),
                   dict(kind=3, size=1), dict(kind=-1, size=1)]:
        assert add(type=13, handle=handle, **params) == INVALID_VALUE, params
    assert add(type=13, kind=IF, size=1) == INVALID_VALUE
    stream = new_stream()
    assert d.cuStreamBeginCaptureToGraph(
        stream, None, None, None, c_size_t(0), 0) == INVALID_VALUE
    update = lambda flags: d.cuStreamUpdateCaptureDependencies_v2(
        stream, None, None, c_size_t(0), flags)
    assert update(0) == ILLEGAL_STATE
    ok(d.cuStreamBeginCapture_v2(stream, 0))
    ok(update(1))
    assert update(2) == INVALID_VALUE
    assert d.cuStreamEndCapture(stream, None) == INVALID_VALUE  # no one else has the graph
    ok(d.cuStreamEndCapture(stream, byref(node)))
    """
    )


def test_a_user_object_goes_with_its_last_reference() -> None:
    driver_program(
        GRAPHS
        + """
    import time
    destroyed = []
    destroy = HOST_FUNCTION(destroyed.append)

    def is_destroyed(data):  # on a thread of the driver
        end = time.monotonic() + 10
        while data not in destroyed and time.monotonic() < end:
            time.sleep(0.01)
        return destroyed.count(data) == 1

    def user_object(data, count=1):
        made = c_void_p()
        ok(d.cuUserObjectCreate(byref(made), c_void_p(data), destroy, count, 1))
        return made

    mine = user_object(1, count=2)
    assert d.cuUserObjectRelease(mine, 3) == INVALID_VALUE
    ok(d.cuUserObjectRetain(mine, 1))
    ok(d.cuUserObjectRelease(mine, 2))
    assert destroyed == []
    ok(d.cuUserObjectRelease(mine, 1))
    assert is_destroyed(1)

    graph, executable = new_graph(), c_void_p()
    shared, moved = user_object(2), user_object(3)
    ok(d.cuGraphRetainUserObject(graph, shared, 1, 0))
    ok(d.cuUserObjectRelease(shared, 1))
    ok(d.cuGraphRetainUserObject(graph, moved, 1, MOVE))
    assert d.cuUserObjectRelease(moved, 1) == INVALID_VALUE  # it is the graph's
    ok(d.cuGraphInstantiateWithFlags(byref(executable), graph, c_uint64(0)))
    ok(d.cuGraphReleaseUserObject(graph, shared, 1))
    assert d.cuGraphReleaseUserObject(graph, shared, 1) == INVALID_VALUE
    ok(d.cuGraphDestroy(graph))
    time.sleep(0.1)
    assert destroyed == [1]  # the instance keeps the others
    ok(d.cuGraphExecDestroy(executable))
    assert is_destroyed(2) and is_destroyed(3)
    """
    )


def test_memory_of_graphs_is_none_and_its_peak_can_be_reset() -> None:
    driver_program(
        """
        context()
        r, value = ctypes.CDLL("libcudart.so.13"), c_uint64(7)
        for attribute in range(4):
            ok(r.cudaDeviceGetGraphMemAttribute(0, attribute, byref(value)))
            assert value.value == 0
            result = r.cudaDeviceSetGraphMemAttribute(0, attribute, byref(value))
            assert result == (0 if attribute in (1, 3) else INVALID_VALUE), attribute
        assert r.cudaDeviceGetGraphMemAttribute(0, 4, byref(value)) == INVALID_VALUE
        assert r.cudaDeviceGetGraphMemAttribute(9, 0, byref(value)) == 101
        """
    )


def test_code_from_memory_is_not_supported() -> None:
    driver_program(
        """
        r = ctypes.CDLL("libcudart.so.13")
        for name in ("LoadData", "LoadFromFile", "Unload", "GetKernel", "GetKernelCount",
                     "GetGlobal", "GetManaged", "GetUnifiedFunction"):
            assert getattr(r, "cudaLibrary" + name)() == 801, name
        """
    )


def test_attributes_of_kernels_are_of_known_kernels_and_devices() -> None:
    driver_program(
        """
        r = ctypes.CDLL("libcudart.so.13")
        r.__getattr__("__cudaRegisterFunction")(
            None, c_void_p(64), None, b"kernel", 0, None, None, None, None, None)
        setting = lambda kernel, device: r.cudaKernelSetAttributeForDevice(
            c_void_p(kernel), 8, 1024, device)
        assert [setting(64, 0), setting(65, 0), setting(64, 3)] == [0, 98, 101]
        """
    )


@WITH_TORCH
@needs_torch("2.15")
@SEEDS
def test_torchs_conditional_nodes_compute(seed: str) -> None:
    torch_program(
        """
        load.compute()
        x, wanted = torch.zeros(4, device="cuda"), torch.tensor(True, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            graph.begin_capture_to_if_node(wanted)
            x.add_(1)
            inside = x * 10
            graph.end_capture_to_conditional_node()
            x.add_(100)
        graph.replay()
        assert (x.cpu().tolist(), inside.cpu().tolist()) == ([101.0] * 4, [10.0] * 4)
        wanted.fill_(False)
        graph.replay()
        assert (x.cpu().tolist(), inside.cpu().tolist()) == ([201.0] * 4, [10.0] * 4)

        left, go = torch.full((), 3, device="cuda"), torch.tensor(True, device="cuda")
        loop = torch.cuda.CUDAGraph()
        with torch.cuda.graph(loop):
            loop.begin_capture_to_while_node(go)
            left.sub_(1)
            x.mul_(2)
            torch.gt(left, 0, out=go)
            loop.set_conditional_handle_for_current_node(go)
            loop.end_capture_to_conditional_node()
        loop.replay()
        assert (left.item(), x.cpu().tolist()) == (0, [1608.0] * 4)
        """,
        SOFTCUDA_SEED=seed,
    )
