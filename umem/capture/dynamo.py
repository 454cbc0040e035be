"""torch.compile's tables of torch's functions."""

from __future__ import annotations


def fill_tables() -> None:
    """Let Dynamo take up torch's functions, which umem may then replace.

    It knows them by identity, from tables that are filled once: some when Dynamo is imported, which
    this does, some when the first function is compiled. If umem's function stood there by then,
    torch's own would be unknown for good.
    """
    import torch._dynamo.variables

    # Names of torch's own: without them, a compiled step may be in more parts.
    variables = getattr(torch._dynamo.variables, "TorchInGraphFunctionVariable", None)
    fill = getattr(variables, "_get_handlers", None)
    if fill is not None:
        fill()
