"""From batches to the best state."""
