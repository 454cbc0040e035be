"""The trainings of ``umem demo`` and their comparison."""
