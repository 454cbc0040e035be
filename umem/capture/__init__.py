"""Recording a program's training step on fake tensors, without a GPU."""
