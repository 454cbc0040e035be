"""What a step does not keep for its backward pass and computes again, beside what it swaps."""
