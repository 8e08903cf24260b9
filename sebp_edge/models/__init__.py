"""Base models: finds and loads them, puts adapters on them, generates text."""
