"""What takes the place of a part of a model, each with its undo."""
