"""A base model in memory, and an adapter on it."""
