"""Training steps that drop activations in their forward pass and rebuild them in backward."""
