"""The command line: one-sentence errors, JSON lines, exit codes, pipes, narrow windows.

Most commands run in this process; those that need a terminal or streams of their own share a few processes.
"""

import itertools
import json
import os
import re
import shlex
import subprocess
import sys

import pytest
from builders import make_llama
from command import RECIPE, assert_one_sentence, contents, process, records, run, start, without_controls
from terminals import read_to_the_end

from sebp_edge import AdapterStore, Recipe

COMMANDS = ("adapt", "plan", "analyze", "generate", "models", "recipes", "adapters", "serve", "doctor")
RESULT_KEYS = {
    *("event", "passed", "name", "version", "adapter_path", "heldout_loss_before", "heldout_loss_after"),
    *("documents", "examples", "tokens", "left_out", "padding_share", "tokens_per_second"),
    *("peak_memory_bytes", "allocator_peak_bytes", "predicted_peak_bytes", "seconds", "phases"),
}


@pytest.fixture
def store(own_data_folder):
    return AdapterStore()


# --------------------------------------------------------------------------------------------------------------- help


def test_help_is_quick_and_imports_neither_torch_nor_transformers():
    code = """
import sys
sys.argv = ["sebp-edge", "--help"]
from sebp_edge.cli import main
try:
    main()
except SystemExit as end:
    import sebp_edge.store.adapter_store  # listing adapters needs none of them either
    print(end.code, sorted({"torch", "transformers", "peft", "numpy", "huggingface_hub"} & set(sys.modules)))
"""
    before = os.times()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.endswith("0 []\n")
    for command in COMMANDS:
        assert command in done.stdout
    assert sum(os.times()[2:4]) - sum(before[2:4]) < 5


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [["adapt", "nowhere"], ["adapt", ".", "--model", "lama", "-y"], ["generate", "the ferry", "--model", "./nowhere"]],
)
def test_a_wrong_path_or_model_is_refused_before_libraries_are_imported(arguments):
    code = "from sebp_edge.cli import main; main()"
    command = [sys.executable, "-X", "importtime", "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert re.search("There is no (file or )?folder|Unknown model", done.stderr)
    assert not re.search(r"\| +(torch|transformers)$", done.stderr, re.MULTILINE)


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize("command", [["adapt"], ["forget"], ["adapters", "gc"], ["plan"]], ids=" ".join)
def test_paragraphs_of_help_are_wrapped_once(command, columns):
    lines = [line.strip() for line in run(*command, "--help", env={"COLUMNS": str(columns)}).stdout.splitlines()]
    paragraphs = "\n".join(lines[: next(n for n, line in enumerate(lines) if line.startswith("╭"))]).split("\n\n")
    for paragraph in paragraphs:
        words = [line for line in paragraph.split("\n") if line]
        for line, following in itertools.pairwise(words):
            assert len(line) + 1 + len(following.split()[0]) > columns - 4, paragraph


@pytest.mark.parametrize(("columns", "flag"), [(48, "--help"), (80, "-h")])
@pytest.mark.parametrize(
    "command", [[], *([each] for each in COMMANDS), ["forget"], ["adapters", "report"]], ids=" ".join
)
def test_every_command_has_help_that_cuts_no_word(command, columns, flag):
    shown = run(*command, flag, env={"COLUMNS": str(columns)})
    assert shown.exit_code == 0 and "…" not in shown.stdout


def test_help_begins_with_what_an_owner_needs():
    first = run("--help").stdout.partition("Start here")[2].partition("More")[0]
    listed = [line.split()[1] for line in first.splitlines() if re.match(r"│ [a-z]", line)]
    assert listed == ["adapt", "ask", "inspect", "generate", "forget", "export"]


def test_a_shell_can_complete_commands_and_options():
    for words, expected in (("sebp-edge ad", {"adapt", "adapters"}), ("sebp-edge adapt --ep", {"--epochs"})):
        completion = {"_SEBP_EDGE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        done = run(prog_name="sebp-edge", env=completion)
        assert {*done.stdout.split()} == expected


def test_the_version_is_printed():
    assert run("--version").stdout == "sebp-edge 0.1.0\n"


# -------------------------------------------------------------------------------------------------------------- adapt


@pytest.mark.slow
def test_adapt_with_json_prints_only_json_and_ends_with_the_result(adapt, notes_folder, store):
    (notes_folder / "empty.md").touch()
    (notes_folder / os.fsdecode(b"caf\xe9.md")).write_text("A name that is not UTF-8, with a text that is.")
    with process(*adapt, "--json") as one:
        output, errors = one.communicate(timeout=200)
    assert one.returncode == 0, errors
    found = records(output)
    # Graphs are captured only on a GPU.
    left_out = ("started", "progress", "preparing", "graph_captured")
    events = [record["event"] for record in found if record["event"] not in left_out]
    assert events[:4] == ["job_started", "model_loaded", "texts_read", "training_started"]
    assert {"step", "evaluated", "saved"} < {record["event"] for record in found}
    result = found[-1]
    assert result["event"] == "result"
    assert set(result) >= RESULT_KEYS
    assert result["passed"] is True
    assert (result["name"], result["version"], result["documents"]) == ("default", 1, 25)
    assert result["left_out"] == [{"source": "empty.md", "reason": "empty"}]
    assert result["heldout_loss_after"] < result["heldout_loss_before"]
    assert result["adapter_path"] == str(store.adapter("default").open().path)
    assert str(store.adapter("default").open().path).startswith(str(store.folder))
    assert result["seconds"] == pytest.approx(sum(result["phases"].values()))
    assert set(result["phases"]) == {record["phase"] for record in found if record["event"] == "progress"}


def test_adapt_reports_what_happened_and_what_to_do_next(adapt, notes_folder, tmp_path):
    (notes_folder / "empty.md").touch()
    result = run(*adapt, "--name", "mine", "--epochs", 2, "--context", 32, "--seed", 4)
    assert result.exit_code == 0
    assert "1 left out:\n  empty.md: empty\n" in result.stdout
    assert "at most 2 epochs" in result.stdout
    assert re.search(r"step 1/\d+  loss \d\.\d+  [\d,]+ tokens/s  \d+ %(, .+ left)?\n", result.stdout)
    # Lines on a pipe are not wrapped, however long.
    verdict, why, *_, next_step, figures = result.stdout.partition("Better: ")[2].splitlines()
    assert verdict == "version 1 of 'mine' is active, since it predicts your texts better."
    predicts = r"it predicts the text \d+\.\d % better than the base model, which is more than chance\. "
    assert re.match(f"On 5 documents that it was not trained on, {predicts}", why)
    assert why.endswith("Then it was trained on all documents.")
    assert re.fullmatch(r"Try it: sebp-edge generate 'The first words' --name mine --model \S+/micro-llama", next_step)
    assert figures == "All figures: sebp-edge adapters report mine"


@pytest.mark.slow
def test_the_command_that_activates_an_adapter_anyway_does(adapt, recipe, store):
    recipe.write_text(RECIPE.replace("2e-2", "1e-4"))
    result = run(*adapt, "--epochs", 1, "--name", "my notes")
    assert result.exit_code == 3
    assert "Not better: version 1 of 'my notes' is saved, but not active." in result.stdout
    (command,) = re.findall(r"Activate it anyway: sebp-edge (.*)\n", result.stdout)
    assert command == "adapters activate 'my notes' 1"
    assert store.adapter("my notes").active() is None
    run(*shlex.split(command))
    assert store.adapter("my notes").active() == 1


# ---------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("changes", "words", "exit_code"),
    [
        ({"--model": "lama-3.2-3b"}, r"Unknown model 'lama-3\.2-3b'; did you mean 'llama-3\.2-3b'\?", 1),
        ({"--model": "./nowhere"}, r"There is no folder '\./nowhere'", 1),
        ({"--model": __file__}, "test_cli.py' is neither a folder nor a GGUF file; give the folder", 1),
        ({"--model": "someone/something"}, "someone/something is not in the cache .* HF_HUB_OFFLINE is set", 1),
        ({"--recipe": "note"}, "Unknown recipe 'note'; did you mean 'notes'?", 1),
        ({"--recipe": "nowhere.toml"}, r"nowhere\.toml cannot be read: No such file", 1),
        ({"--name": "a/b"}, "Invalid adapter name 'a/b'", 1),
        ({"--epochs": "1000000"}, "epochs must be a whole number above 0 and at most 1000", 2),
        ({"--context": "2"}, "context_length must be a whole number", 2),
        ({"--device": "cuda:99"}, "Device 'cuda:99' is not usable", 1),
        ({"--device": "cpu:"}, "Unknown device 'cpu:'", 2),
        ({"--memory": "9" * 60 + "GB"}, "The memory budget is '9+GB', but must be a size", 2),
        ({"--out": "~nobody-here/x"}, "The path '~nobody-here/x' names an unknown user", 2),
        ({"--out": "x" * 300}, "Cannot save to '.*/x+': File name too long; choose another location", 1),
        ({"--out": "x\0"}, r"'x\\x00' is not a path", 2),
    ],
)
def test_an_invalid_option_is_one_sentence(adapt, store, changes, words, exit_code):
    arguments = {"--model": adapt[3], "--recipe": adapt[5]} | changes
    assert_one_sentence(run(*adapt[:2], *(part for pair in arguments.items() for part in pair)), words, exit_code)
    assert store.names() == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("learning_rat = 1", "unknown key 'learning_rat'; did you mean 'learning_rate'?"),
        ('epochs = "three"', "epochs must be a whole number"),
        ("epochs = ", "is not valid TOML"),
    ],
)
def test_an_invalid_recipe_is_one_sentence(adapt, recipe, content, words):
    recipe.write_text(content)
    assert_one_sentence(run(*adapt), re.escape(words))


def test_texts_that_cannot_be_used_are_one_sentence(adapt, tmp_path):
    for name in ("empty", "unreadable", "little"):
        (tmp_path / name).mkdir()
    (tmp_path / "unreadable" / "picture.png").write_bytes(b"\0\1\2")
    (tmp_path / "little" / "note.md").write_text("the ferry left")
    words = {
        "nowhere": "There is no file or folder",
        "empty": "no files were found",
        "unreadable": "Nothing readable was found",
        "little": "Too little text: .* tokens to train on, but at least .* are needed",
    }
    for name, expected in words.items():
        result = run("adapt", tmp_path / name, *adapt[2:], "--json")
        assert (result.exit_code, "Traceback" in result.stderr) == (1, False)
        assert re.search(expected, result.stderr)
        last = records(result.stdout)[-1]
        assert (last["event"], last["error"]) == ("error", "TextsError")
        assert f"sebp-edge: {last['message']}\n" == result.stderr


def test_patterns_choose_the_files_to_read(tmp_path):
    for name in ("a.md", "b.md", "c.txt"):
        (tmp_path / name).write_text("the ferry left")
    result = run("plan", tmp_path, "--include", "*.md", "--include", "*.rst", "--exclude", "*")
    assert_one_sentence(result, r"Nothing readable was found \(a\.md: excluded; .*")
    result = run("adapt", tmp_path, "--include", "*.rst", "--model", "tiny")
    assert_one_sentence(result, r"Nothing readable was found \(a\.md: matches no pattern to include; .*")
    assert_one_sentence(
        run("analyze", tmp_path, "--exclude", "!"), "exclude has '!', which is not a valid", exit_code=2
    )


def test_an_unwritable_store_is_one_sentence_before_any_work(adapt, own_data_folder):
    own_data_folder.parent.parent.mkdir(parents=True)
    own_data_folder.parent.write_text("a file where the folder should be")
    assert_one_sentence(run(*adapt), "Cannot save to .*: Not a directory")
    assert own_data_folder.parent.read_text() == "a file where the folder should be"


# ------------------------------------------------------------------------------------------------ generate, adapters


@pytest.mark.slow
def test_an_adapter_is_listed_shown_used_and_removed(adapt, store, after_learning, tmp_path):
    assert run("adapters", "list").stdout == "There are no adapters yet; make one with: sebp-edge adapt ./notes\n"
    after_learning(store)
    run("adapters", "export", "default", "--to", tmp_path / "moved")
    run("adapters", "import", tmp_path / "moved")
    run("adapters", "activate", "default", 2)

    listed = run("adapters", "list").stdout.splitlines()
    assert [line.split("\t")[:4] for line in listed] == [
        ["default", "1", "", "micro-llama"],
        ["default", "2", "active", "micro-llama"],
    ]
    shown = contents(run("adapters", "show", "default", "--json").stdout)
    assert shown == contents(run("adapters", "list", "--json").stdout)
    assert [(one["version"], one["active"], one["base_model"]) for one in shown] == [
        (1, False, "micro-llama"),
        (2, True, "micro-llama"),
    ]
    assert "base_model\tmicro-llama\n" in run("adapters", "show", "default").stdout

    assert run("generate", "the ferry", "--model", adapt[3], "--name", "default", "--max-tokens", 2).exit_code == 0
    assert run("generate", "the ferry", "--max-tokens", 2).exit_code == 0
    assert_one_sentence(run("generate", "the " * 300, "--model", adapt[3]), "expected 1 to 127 for this model")
    assert_one_sentence(run("generate", "the", "--name", "defualt"), "There is no adapter 'defualt'; did you mean")
    assert_one_sentence(run("generate", "the", "--name", ".."), "Invalid adapter name")
    assert_one_sentence(run("generate", "the", "--adapter", "./nowhere"), "There is no adapter folder")
    assert_one_sentence(run("generate", "the", "--adapter", "./x", "--name", "y"), "leave out --name and --version", 2)
    assert_one_sentence(
        run("generate", "the", "--model", adapt[3], "--seed", 2**70), "The seed must be a whole number", 2
    )

    assert run("adapters", "remove", "default", "--version", 2, input="n\n").exit_code == 1
    assert store.adapter("default").versions() == [1, 2]
    assert_one_sentence(run("adapters", "remove", "default", "--version", 9, "-y"), r"no version 9; it has \[1, 2\]")
    assert run("adapters", "remove", "default", "--version", 2, input="y\n").exit_code == 0
    assert store.adapter("default").versions() == [1]
    (store.adapter("default").open(1).path / "sebp_edge.json").write_text("{")
    damaged = run("adapters", "list")
    assert (damaged.exit_code, damaged.stdout) == (0, "")
    assert "cannot be read" in damaged.stderr
    assert run("adapters", "remove", "default", "--yes").stdout == "Deleted 'default' with 1 version.\n"
    assert store.names() == []
    assert_one_sentence(run("adapters", "show", "default"), "There is no adapter 'default'")


def test_an_adapter_for_another_base_model_is_one_sentence(store, after_learning, tokenizer, tmp_path):
    after_learning(store)
    make_llama(num_hidden_layers=3).save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    assert_one_sentence(
        run("generate", "the", "--name", "default", "--model", tmp_path / "other"),
        "made for micro-llama, not for other; use it with",
    )


def test_models_and_recipes_are_listed():
    models = run("models").stdout.splitlines()
    assert [line.split("\t")[0] for line in models][:2] == ["tiny", "smollm2-135m"]
    assert {record["name"]: record["on_this_machine"] for record in records(run("models", "--json").stdout)}["tiny"]
    assert models[0] == "tiny\t8 M\tbundled"
    recipes = records(run("recipes", "--json").stdout)
    assert recipes[0]["name"] == "notes"
    assert {recipe["name"] for recipe in recipes} == set(Recipe.names())
    assert [line.split("\t") for line in run("recipes").stdout.splitlines()] == [
        [recipe["name"], recipe["description"]] for recipe in recipes
    ]


def test_a_model_or_a_recipe_is_shown_by_its_name(tmp_path):
    assert "licence\tLlama 3.2\n" in run("models", "llama-3.2-1b").stdout
    assert [one["name"] for one in records(run("models", "TINY", "qwen3-4b", "--json").stdout)] == ["tiny", "qwen3-4b"]
    (tmp_path / "damaged.gguf").write_bytes(b"GGU")
    assert "problem\t'damaged.gguf' is not a usable GGUF file" in run("models", tmp_path / "damaged.gguf").stdout
    assert_one_sentence(run("models", "ollama:nowhere"), "Ollama has no model 'ollama:nowhere'")
    assert_one_sentence(run("models", "x" * 5000), "There is no folder 'x+'; give folders with models")
    assert "learning_rate\t0.0004\n" in run("recipes", "ask").stdout
    assert [one["name"] for one in records(run("recipes", "lm", "chat", "--json").stdout)] == ["lm", "chat"]
    assert_one_sentence(run("recipes", "aks"), "Unknown recipe 'aks'; did you mean 'ask'?")


def test_doctor_prints_one_finding_per_line(tmp_path, monkeypatch):
    subjects = ["python", "libraries", "device", "driver", "kernels", "memory", "model cache", "adapters"]
    result = run("doctor", "--json")
    findings = records(result.stdout)
    assert [finding["subject"] for finding in findings] == subjects
    assert result.exit_code == int(any(finding["problem"] for finding in findings))
    lines = run("doctor").stdout.splitlines()
    assert [line[2:15].strip() for line in lines if line[0] in "✓!"] == subjects


# ------------------------------------------------------------------------------------------------------- on a terminal


@pytest.mark.slow
def test_a_training_within_a_budget_reports_planned_and_used_memory(adapt):
    result = run(*adapt, "--memory", "900GB")
    assert result.exit_code == 0
    assert re.search(r"note: The memory budget is 900.0 GB, of which other programs leave \d+\.\d GB", result.stderr)
    assert re.search(r"plan: LoRA of rank 4 .*; about \S+ [GM]B of \S+ GB", result.stdout)
    assert re.search(r"dry run: \S+ [GM]B with a micro-batch of \d+ tokens, predicted \S+ [GM]B", result.stdout)
    assert "GB that other programs leave" in run("plan", *adapt[1:], "--memory", "900GB").stdout


def test_a_plan_shows_memory_by_purpose(adapt):
    arguments = ["plan", *adapt[1:], "--memory", "8GB"]
    _, record = records(run(*arguments, "--json").stdout)
    assert (record["event"], record["budget"], record["method"], record["larger"]) == ("plan", 8e9, "lora", None)
    assert record["peak"] == sum(record["footprint"].values())
    assert record["seconds"] > 0
    lines = run(*arguments).stdout.splitlines()
    assert {line.split("\t")[0] for line in lines} > {"weights", "activations", "context", "reserve"}
    assert any("of 8.0 GB" in line for line in lines)


@pytest.mark.slow
def test_a_plan_for_an_absent_gpu_says_so_and_gives_no_time(adapt):
    arguments = ["plan", *adapt[1:], "--model", "llama-3.2-3b", "--gpu", "8GB"]
    _, record = records(run(*arguments, "--json").stdout)
    assert (record["device"], record["gpu"], record["budget"]) == ("cuda", 8e9, 8e9)
    assert (record["dtype"], record["seconds"], record["footprint"]["weights"]) == ("bfloat16", None, 6_425_499_648)
    assert record["footprint"]["context"] > 5e8
    assert record["peak"] < 8e9
    text = run(*arguments).stdout
    assert "an NVIDIA GPU with 8.0 GB and bf16 (Ampere or later)" in text
    assert "about" not in text
    _, record = records(run(*arguments[:-1], "24GB", "--memory", "9GB", "--json").stdout)
    assert (record["gpu"], record["budget"]) == (24e9, 9e9)


@pytest.mark.slow
def test_a_plan_in_4_bits_for_another_machine_names_what_to_install(adapt):
    text = run("plan", *adapt[1:], "--model", "llama-3.2-3b", "--gpu", "5GB").stdout
    assert "It needs pip install 'sebp-edge[4bit]' there." in text


@pytest.mark.parametrize(
    ("arguments", "words", "exit_code"),
    [
        (["8 gigs"], r"The GPU memory is '8 gigs', but must be a size with a unit, such as '8GB'", 2),
        (["8GB", "--memory", "10GB"], r"memory budget is 10.0 GB, but the GPU has 8.0 GB; lower the budget", 2),
        (["8GB", "--device", "cpu"], "--gpu plans for another machine and --device for this one", 2),
        (["1GB"], r"but the GPU has 1.0 GB; take a GPU with 2.0 GB or choose a model of at most", 1),
        (["8GB", "--memory", "1GB"], r"but the memory budget is 1.0 GB; raise the budget to 2.0 GB", 1),
    ],
)
def test_an_impossible_gpu_is_one_sentence(adapt, arguments, words, exit_code):
    assert_one_sentence(run("plan", *adapt[1:], "--model", "llama-3.2-3b", "--gpu", *arguments), words, exit_code)


@pytest.mark.slow
def test_a_budget_that_is_too_small_or_invalid_is_one_sentence(adapt, store):
    for command in ("plan", "adapt"):
        arguments = [command, *adapt[1:], "--memory"]
        assert_one_sentence(run(*arguments, "1MB"), "budget is 1 MB; raise the budget to")
        assert_one_sentence(run(*arguments, ""), "'', but must be a size with a unit, such as '8GB'", 2)
    assert store.names() == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
def test_no_line_is_wider_than_a_narrow_terminal(adapt, store):
    columns = 50
    commands = (*([*adapt, "--name", "narrow"], ["adapters", "list"], ["models"], ["recipes"]),)
    for number, (arguments, lines) in enumerate(zip(commands, on_terminal(commands, columns), strict=True)):
        assert max(map(len, lines)) <= columns
        words = " ".join(" ".join(lines).split())
        assert "Traceback" not in words
        expected = ["Then it was trained on all documents.", "micro-llama", "llama-3.2-3b[-instruct]", "notes"]
        assert expected[number] in words
        assert ("starting" in words) == (arguments[0] == "adapt")
    assert store.adapter("narrow").versions() == [1]


# What the command line imported earlier has found no terminal.
RUN_ALL = """
import json, sys
for name in [name for name in sys.modules if name.startswith("sebp_edge.cli")]:
    del sys.modules[name]
from sebp_edge.cli import main
for arguments in json.loads(sys.argv[1]):
    sys.argv[1:] = arguments
    try:
        main()
    except SystemExit as end:
        print("ended with", end.code, flush=True)
"""


def on_terminal(commands, columns):
    """Returns the lines of each command on a terminal of this width, without control sequences."""
    import fcntl
    import pty
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    one = start([RUN_ALL, json.dumps(commands)], env=environment | {"TERM": "xterm-256color"}, **streams)
    os.close(theirs)
    drawn = read_to_the_end(ours)
    assert one.wait(timeout=200) == 0, drawn
    *pages, rest = drawn.split("ended with 0")
    assert not rest.strip()
    return [without_controls(page) for page in pages]


@pytest.mark.parametrize(
    "arguments",
    [
        ("adapt", ".", "--name", ""),
        ("plan", ".", "--device="),
        ("generate", "the ferry", "--model", ""),
        ("export", "notes", "--to", "out", "--model="),
    ],
)
def test_an_empty_name_is_not_the_default(arguments):
    result = run(*arguments)
    assert result.exit_code == 2
    assert "the value is empty; leave the option out" in result.stderr


@pytest.mark.parametrize("command", ["adapt", "plan", "analyze"])
def test_an_empty_path_is_not_the_current_folder(command):
    result = run(command, "")
    assert result.exit_code == 2
    assert "the path is empty" in result.stderr
