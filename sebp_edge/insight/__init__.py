"""What the gradients, the machine and a run look like."""
