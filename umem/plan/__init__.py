"""Working out, without running it, what a program needs and how fast it can be."""
