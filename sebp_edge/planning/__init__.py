"""What a training will take, before anything is loaded."""
