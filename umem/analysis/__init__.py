"""Lower bounds, memory estimates and summaries of a recorded step."""
