"""Traces: the allocations, accesses and frees of a program. See docs/trace_format.md."""
