"""Findings about a training step: memory that it allocates or keeps without need."""
