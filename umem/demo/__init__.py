"""What ``umem demo`` trains and how it compares the runs; the benches reuse the workloads."""
