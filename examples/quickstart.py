"""Runs the four lines from the README, then generates text with the adapter."""

from pathlib import Path

from sebp_edge import Personalizer

personalizer = Personalizer("tiny")  # or "llama-3.2-3b", a folder with a model, any Hub id
print(personalizer.adapt(Path("examples/notes")).summary)
print(personalizer.generate("# Plot 14:", max_new_tokens=80))
