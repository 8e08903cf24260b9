"""Analyzes gradients, examines the machine, and benchmarks training steps."""
