"""Programs of other libraries in miniature, and what umem makes of them."""
