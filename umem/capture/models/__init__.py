"""Setup steps of models that other libraries define, from a configuration or a name."""
