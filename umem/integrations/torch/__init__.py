"""PyTorch: its allocators, operator hooks and the C++ extension."""
