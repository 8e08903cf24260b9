"""`sebp-edge models` and `sebp-edge recipes`: list the known models and recipes."""

from dataclasses import asdict

from sebp_edge.cli.console import one_sentence_errors, print_json, print_table
from sebp_edge.cli.options import Json


def models(as_json: Json = False) -> None:
    """List the models known by name; any local folder or Hub id works too."""
    with one_sentence_errors(as_json=as_json):
        from sebp_edge.models.catalog import CATALOG
        from sebp_edge.models.hub import cached_folder

        rows = []
        for name, entry in CATALOG.items():
            is_local = entry.repository is None or cached_folder(entry.repository) is not None
            record = {"name": name, "on_this_machine": is_local, **asdict(entry)}
            if as_json:
                print_json(record)
            size = f"{entry.parameters:.1f} B" if entry.parameters >= 1 else f"{entry.parameters * 1000:.0f} M"
            rows.append([name, size, "downloaded" if is_local else "not downloaded", entry.licence, entry.description])
        if not as_json:
            print_table(["name", "parameters", "weights", "licence", "description"], rows)


def recipes(as_json: Json = False) -> None:
    """List the recipes and their values."""
    with one_sentence_errors(as_json=as_json):
        from sebp_edge.recipe import Recipe

        bundled = [Recipe.load(name) for name in Recipe.names()]
        if as_json:
            for recipe in bundled:
                print_json(asdict(recipe))
            return
        columns = ["name", "method", "r", "learning rate", "epochs", "tokens/step", "context", "description"]
        print_table(
            columns,
            [
                [
                    recipe.name,
                    recipe.method,
                    str(recipe.with_defaults().r) if recipe.method == "lora" else "-",
                    f"{recipe.learning_rate:g}",
                    str(recipe.epochs),
                    str(recipe.batch_tokens),
                    str(recipe.context_length),
                    recipe.description,
                ]
                for recipe in bundled
            ],
        )
