"""Which rows of a batch carry gradient, and how they are laid out."""
