"""Planning of recomputation: the choice of activations to drop and rebuild."""
