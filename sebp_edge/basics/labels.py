"""What a label of a token without loss is."""

# As torch's cross-entropy has it.
IGNORE = -100
