"""umem on a real GPU: microbenchmarks of the driver, and trainings against plain torch."""
