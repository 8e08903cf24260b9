"""Writes what ships of the models with short names, for processes without torch:

python tests/helpers/known_shapes.py
"""

import json
from dataclasses import asdict

from sebp_edge.engine.memory.shape_reader import read_shape
from sebp_edge.engine.models.catalog import CATALOG, DEFAULT_MODEL, bundled_config, resolve
from sebp_edge.engine.models.known_models import BUNDLED
from sebp_edge.engine.models.known_tokenizer import TokenizerFacts
from sebp_edge.engine.models.loading import local_tokenizer
from sebp_edge.values.model_reference import ModelReference


def references() -> dict[str, ModelReference]:
    """Returns the model of each shape that ships, of which there is a config, by its name."""
    paths = {bundled_config(resolve(name)) for name in CATALOG} - {None}
    of_configs = {path.stem: ModelReference(path.stem, "local", str(path)) for path in sorted(paths)}
    return {DEFAULT_MODEL: resolve(DEFAULT_MODEL)} | of_configs


def main() -> None:
    shapes = {name: asdict(read_shape(reference)) for name, reference in references().items()}
    facts = asdict(TokenizerFacts.of(local_tokenizer(resolve(DEFAULT_MODEL))))
    BUNDLED.write_text(json.dumps({"shapes": shapes, "tokenizer": facts}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
