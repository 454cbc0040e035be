"""Programs of other libraries in miniature, under umem."""
