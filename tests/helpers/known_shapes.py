"""Writes what ships of the models with short names, for processes without torch:

python tests/helpers/known_shapes.py
"""

import json
from dataclasses import asdict
from pathlib import Path

from sebp_edge.engine.memory.shape_reader import read_shape
from sebp_edge.engine.models.catalog import CATALOG, DEFAULT_MODEL, bundled_config, resolve_config
from sebp_edge.engine.models.known_models import BUNDLED
from sebp_edge.engine.models.known_tokenizer import TokenizerFacts
from sebp_edge.engine.models.loading import local_tokenizer


def configs() -> dict[str, Path | str]:
    """Returns the config of each shape that ships, by its name."""
    paths = {bundled_config(resolve_config(name)) for name in CATALOG} - {None}
    return {DEFAULT_MODEL: DEFAULT_MODEL} | {path.stem: path for path in sorted(paths)}


def main() -> None:
    shapes = {name: asdict(read_shape(resolve_config(config))) for name, config in configs().items()}
    facts = asdict(TokenizerFacts.of(local_tokenizer(resolve_config(DEFAULT_MODEL))))
    BUNDLED.write_text(json.dumps({"shapes": shapes, "tokenizer": facts}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
