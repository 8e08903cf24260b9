"""Recipes are validated strictly: every error is one sentence that names the key."""

import dataclasses
import os

import pytest

from sebp_edge import Recipe
from sebp_edge.errors import OptionError, RecipeError


def recipe_file(folder, text: str | bytes, name: str = "mine.toml"):
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def refusal(load) -> str:
    with pytest.raises(RecipeError) as caught:
        load()
    return str(caught.value)


@pytest.mark.parametrize("name", [*Recipe.names(), "glue", "lm"])
def test_every_bundled_recipe_loads(name):
    recipe = Recipe.load(name)
    assert recipe.name == name
    assert recipe.description.endswith(".")


def test_the_names_begin_with_the_default():
    assert Recipe.names() == ["notes", "ask", "chat", "full", "instruct", "long", "tiny"]


def test_a_users_file_has_defaults_for_missing_keys(tmp_path):
    path = recipe_file(tmp_path, 'description = "Mine."\nr = 4\nlearning_rate = 1\n')
    for given in (path, str(path)):
        recipe = Recipe.load(given)
        assert (recipe.name, recipe.r, recipe.learning_rate) == ("mine", 4, 1.0)
        assert recipe.epochs == Recipe(name="", description="").epochs
    assert type(recipe.learning_rate) is float
    assert Recipe.load(recipe_file(tmp_path, "\ufeffr = 4\n")).r == 4  # as some editors save it
    assert Recipe.load(recipe_file(tmp_path, "")).description == ""


def test_loading_a_recipe_object_returns_it():
    recipe = Recipe.load("chat")
    assert Recipe.load(recipe) is recipe


def test_an_unknown_name_suggests_the_closest_or_all():
    assert refusal(lambda: Recipe.load("note")) == "Unknown recipe 'note'; did you mean 'notes'?"
    assert refusal(lambda: Recipe.load("zzz")).endswith("choose from notes, ask, chat, full, instruct, long, tiny.")
    assert refusal(lambda: Recipe.load("glu")).endswith("did you mean 'glue'?")


def test_an_unknown_key_suggests_the_closest(tmp_path):
    path = recipe_file(tmp_path, "lerning_rate = 0.1\n")
    assert refusal(lambda: Recipe.load(path)).endswith("unknown key 'lerning_rate'; did you mean 'learning_rate'?")
    path = recipe_file(tmp_path, 'name = "other"\n')  # the file's name is the recipe's
    assert "unknown key 'name'" in refusal(lambda: Recipe.load(path))
    path = recipe_file(tmp_path, "[training]\nepochs = 3\n")
    assert "unknown key 'training'" in refusal(lambda: Recipe.load(path))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("epochs = 2.5", "epochs must be a whole number, but is 2.5."),
        ("epochs = true", "epochs must be a whole number, but is True."),
        ("epochs = 0", "epochs must be a whole number above 0 and at most 1000, but is 0."),
        ("r = -8", "r must be a whole number above 0, but is -8."),
        ('r = "16"', "r must be a whole number, but is '16'."),
        ("context_length = 7", "context_length must be a whole number of at least 8, but is 7."),
        ("learning_rate = true", "learning_rate must be a number, but is True."),
        ("learning_rate = 0", "learning_rate must be a number above 0, but is 0.0."),
        ("learning_rate = inf", "learning_rate must be a number above 0, but is inf."),
        ("learning_rate = nan", "learning_rate must be a number above 0, but is nan."),
        ("learning_rate = []", "learning_rate must be a number, or two for small and larger models, but is []."),
        (
            "learning_rate = [1, 2, 3]",
            "learning_rate must be a number, or two for small and larger models, but is [1, 2, 3].",
        ),
        ("learning_rate = [0.1, 0]", "learning_rate must be a number above 0, but is 0.0."),
        ('learning_rate = ["a", 1]', "learning_rate must be a number, but is 'a'."),
        ("weight_decay = -0.1", "weight_decay must be a number of at least 0, but is -0.1."),
        ("warmup_ratio = 10", "warmup_ratio must be a number of at least 0 and at most 1, but is 10.0."),
        ("chat_template = 1", "chat_template must be true or false, but is 1."),
        ("description = 3", "description must be a string, but is 3."),
        (
            'load_in_4bit = true\nmethod = "full"',
            "4-bit weights cannot be trained; use method 'lora', or leave out load_in_4bit.",
        ),
        ("load_in_4bit = 4", "load_in_4bit must be true or false, but is 4."),
        ('method = "qlora"', "method must be 'lora' or 'full', but is 'qlora'."),
        ("method = [1]", "method must be 'lora' or 'full', but is [1]."),
    ],
)
def test_an_invalid_value_names_its_key_and_what_is_expected(tmp_path, line, message):
    path = recipe_file(tmp_path, line)
    assert refusal(lambda: Recipe.load(path)) == f"Recipe 'mine': {message}"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("r = " + "9" * 5000, "is not valid TOML: Exceeds the limit (4300 digits)"),
        ("r = 0x" + "f" * 6000, "r must be a whole number above 0 and at most 4611686018427387904, but is a number of"),
        ("learning_rate = " + "9" * 400, "learning_rate must be a number, but is 9999"),
        ("learning_rate = 1e39", "learning_rate must be a number above 0 and at most 1e+30, but is 1e+39."),
        ("lora_alpha = 1" + "0" * 300, "lora_alpha must be a whole number above 0 and at most 1048576, but is 1000"),
        ("description = " + "[" * 5000 + "]" * 5000, "is nested too deeply; a recipe has plain values only."),
    ],
    ids=lambda value: value[:20],
)
def test_huge_numbers_and_deep_lists_are_one_sentence(tmp_path, line, words):
    message = refusal(lambda: Recipe.load(recipe_file(tmp_path, line)))
    assert words in message
    assert len(message) < 300


def test_a_recipe_that_trains_for_a_quantisation_is_refused(tmp_path):
    message = (
        "Recipe 'mine' has merge_for, and adapters are not trained for a quantisation any more; leave it out, and "
        "export with --quant q8_0, which keeps the gain."
    )
    assert refusal(lambda: Recipe.load(recipe_file(tmp_path, 'merge_for = "q4_0"'))) == message
    values = vars(Recipe(name="mine", description=""))
    assert refusal(lambda: Recipe.of_record(values | {"merge_for": "q4_0"})) == message
    assert Recipe.of_record(values | {"merge_for": None}) == Recipe(**values)


@pytest.mark.parametrize("line", ['method = "full"\n[sparsity]\npattern = "2:4"', "sparsity = {}", 'sparsity = ""'])
def test_a_recipe_that_prunes_is_refused(tmp_path, line):
    path = recipe_file(tmp_path, line)
    message = (
        "Recipe 'mine' has sparsity, and recipes do not prune any more; leave it out, or prune in your own training "
        "loop with sebp_edge.research.nm_sparse."
    )
    assert refusal(lambda: Recipe.load(path)) == message
    values = vars(Recipe(name="mine", description=""))
    assert refusal(lambda: Recipe.of_record(values | {"sparsity": {"pattern": "2:4"}})) == message
    assert Recipe.of_record(values | {"sparsity": None}) == Recipe(**values)


@pytest.mark.parametrize("line", ["load_in_fp8 = true", "load_in_fp8 = false"])
def test_a_recipe_that_asks_for_fp8_is_refused(tmp_path, line):
    message = (
        "Recipe 'mine' has load_in_fp8, and base models are not held in FP8 any more; leave it out, since bf16 takes "
        "no more memory."
    )
    assert refusal(lambda: Recipe.load(recipe_file(tmp_path, line))) == message
    values = vars(Recipe(name="mine", description=""))
    assert refusal(lambda: Recipe.of_record(values | {"load_in_fp8": True})) == message
    assert Recipe.of_record(values | {"load_in_fp8": False}) == Recipe(**values)


def test_an_invalid_path_is_one_sentence():
    assert "cannot be read: embedded null byte." in refusal(lambda: Recipe.load("\0.toml"))


@pytest.mark.parametrize("line", ["weight_decay = 0", "warmup_ratio = 0", "warmup_ratio = 1", "context_length = 8"])
def test_limits_themselves_are_allowed(tmp_path, line):
    Recipe.load(recipe_file(tmp_path, line))


def test_unreadable_files_are_named(tmp_path):
    missing = tmp_path / "missing.toml"
    assert refusal(lambda: Recipe.load(missing)) == (
        f"The recipe file {missing} cannot be read: No such file or directory."
    )
    (tmp_path / "folder.toml").mkdir()
    assert "cannot be read: Is a directory." in refusal(lambda: Recipe.load(tmp_path / "folder.toml"))
    (tmp_path / "device.toml").symlink_to(os.devnull)
    assert "cannot be read: it is not a regular file." in refusal(lambda: Recipe.load(tmp_path / "device.toml"))
    assert "cannot be read: 'utf-8' codec" in refusal(lambda: Recipe.load(recipe_file(tmp_path, b"\xff")))
    assert "'mine' is not valid TOML: " in refusal(lambda: Recipe.load(recipe_file(tmp_path, "r = = 4")))


def test_replace_validates_values_and_ignores_none():
    recipe = Recipe.load("notes")
    assert recipe.replace(epochs=None, context_length=None) == recipe
    assert recipe.replace(epochs=7, context_length=None) == dataclasses.replace(recipe, epochs=7)
    with pytest.raises(OptionError, match="epochs must be"):
        recipe.replace(epochs=0)


def test_a_recipe_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Recipe.load("notes").epochs = 5
