"""The paper's experiments on local files: `glue` and `lm` read the published formats, train, and refuse the rest."""

import json
import re

import pytest
import torch
from builders import make_sentences, make_tokenizer
from transformers import BertConfig, BertModel

import glue
import lm
from sebp_edge.errors import TextsError

RECIPE = 'method = "full"\nlearning_rate = 5e-3\nepochs = 6\nbatch_tokens = 8\ncontext_length = 48\n'


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A folder with a tiny random BERT without a head, like a pretrained one."""
    folder = tmp_path_factory.mktemp("encoder")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
        BertModel(BertConfig(vocab_size=320, max_position_embeddings=64, **sizes)).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "quick.toml").write_text(RECIPE)
    return tmp_path / "quick.toml"


@pytest.fixture
def task(tmp_path):
    """A folder with texts of small letters and of capitals."""
    folder = tmp_path / "task"
    folder.mkdir()
    for name, count in (("train", 61), ("dev", 23)):
        texts = make_sentences(count, seed=count, words=6)
        rows = [f"{text if n % 2 else text.upper()}\t{n % 2}" for n, text in enumerate(texts)]
        (folder / f"{name}.tsv").write_text("\n".join(["sentence\tlabel", *rows, ""]))
    return folder


def run_glue(*arguments):
    glue.main([str(argument) for argument in (*arguments, "--device", "cpu")])


def refusal(capsys, *arguments):
    with pytest.raises(SystemExit) as caught:
        run_glue(*arguments)
    assert capsys.readouterr().out == ""
    assert str(caught.value).startswith("glue: ")
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --------------------------------------------------------------------------------------------------------------- glue


@pytest.mark.slow
def test_an_encoder_learns_a_task_as_it_does_without_sebp(encoder, task, recipe, capsys):
    outputs = []
    for more in ((), ("--dense",)):
        run_glue("--model", encoder, "--data", task, "--recipe", recipe, *more)
        outputs.append(re.sub(r", [\d.]+ s;", "", capsys.readouterr().out))
    assert outputs[0] == outputs[1]
    assert "61 texts for training, 23 for evaluation, 2 classes, padded to 48 tokens\nbefore: accuracy 0." in outputs[0]
    losses = [float(loss) for loss in re.findall(r"epoch \d: loss ([\d.]+)", outputs[0])]
    assert losses[-1] < 0.5 * losses[0]
    assert float(re.findall(r"accuracy ([\d.]+)", outputs[0])[-1]) > 0.9


FORMATS = {
    "SST-2": ("a.tsv", 'sentence\tlabel\n"so good , \t1\r\nbad\t0\n\n', [('"so good , ',), ("bad",)], ["1", "0"]),
    "CoLA": ("a.tsv", "gj04\t1\t\tThey sailed.\ncj99\t0\t*\tMore.\n", [("They sailed.",), ("More.",)], ["1", "0"]),
    "MRPC": ("a.tsv", "\ufeffQuality\t#1 ID\t#1 String\t#2 String\n1\t7\tOne.\tTwo.\n", [("One.", "Two.")], ["1"]),
    "RTE": ("a.tsv", "index\tsentence1\tsentence2\tlabel\n0\tA.\tB.\tentailment\n", [("A.", "B.")], ["entailment"]),
    "QNLI": ("a.tsv", "index\tquestion\tsentence\tlabel\n0\tA?\tB.\tentailment\n", [("A?", "B.")], ["entailment"]),
    "QQP": ("a.tsv", "id\tquestion1\tquestion2\tis_duplicate\n0\tA?\tB?\t0\n", [("A?", "B?")], ["0"]),
    "WNLI": ("a.tsv", "index\tsentence1\tsentence2\tlabel\n0\tA.\tB.\t1\n", [("A.", "B.")], ["1"]),
    "MNLI": (
        "a.tsv",
        "index\tgenre\tsentence1\tsentence2\tlabel1\tlabel2\tgold_label\n0\tfiction\tA.\tB.\tneutral\tx\tneutral\n",
        [("A.", "B.")],
        ["neutral"],
    ),
    "STS-B": (
        "a.tsv",
        "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n"
        '0\tmain-news\theadlines\t2013\t1\tnone\tnone\tA "plane.\tA jet.\t4.750\n'
        "1\tmain-news\theadlines\t2013\t2\tnone\tnone\tB.\tC.\t0\n",
        [('A "plane.', "A jet."), ("B.", "C.")],
        [4.75, 0.0],
    ),
    "STS-B as JSONL": ("a.jsonl", '{"sentence1": "A.", "sentence2": "B.", "label": 5.0}\n', [("A.", "B.")], [5.0]),
    "JSONL": ("a.jsonl", '{"premise": "A\\u2028.", "hypothesis": "B.", "label": 2}\n', [("A\u2028.", "B.")], ["2"]),
}


@pytest.mark.parametrize("name", FORMATS)
def test_glues_own_formats_are_read(name, tmp_path):
    file, content, texts, labels = FORMATS[name]
    (tmp_path / file).write_bytes(content.encode())
    found = glue.read(tmp_path / file)
    assert [text.texts for text in found] == texts
    assert [text.label for text in found] == labels


@pytest.mark.slow
def test_regression_is_scored_by_correlation(encoder, task, recipe, capsys):
    for path in task.glob("*.tsv"):
        _, *rows = path.read_text().splitlines()
        scored = [
            f"{text}\tthe ferry left\t{3 * int(label) + 0.5}" for text, label in (row.split("\t") for row in rows)
        ]
        path.write_text("\n".join(["sentence1\tsentence2\tscore", *scored]))
    run_glue("--model", encoder, "--data", task, "--recipe", recipe)
    output = capsys.readouterr().out
    assert "61 texts for training, 23 for evaluation, numeric labels, padded to 48 tokens\nbefore: Pearson " in output
    assert float(re.findall(r"Pearson ([\d.-]+)", output)[-1]) > 0.9


@pytest.mark.parametrize(
    ("predicted", "labels", "expected"),
    [
        ([1, 0, 1, 0], [1, 0, 1, 0], "accuracy 1.000, F1 1.000, Matthews 1.000"),
        ([1, 1, 1, 0, 0, 0], [1, 1, 0, 1, 0, 0], "accuracy 0.667, F1 0.667, Matthews 0.333"),
        ([0, 0], [1, 0], "accuracy 0.500, F1 0.000, Matthews 0.000"),
    ],
)
def test_scores_are_glues(predicted, labels, expected):
    assert glue.scores(predicted, labels, 2) == expected
    assert glue.scores(predicted, labels, 3) == expected.split(",")[0]


def test_every_invalid_task_is_one_sentence(encoder, task, tmp_path, capsys):
    model = ("--model", encoder)
    data = ("--data", task)
    assert "There is no folder" in refusal(capsys, *model, "--data", tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    assert "with 'train' in its name" in refusal(capsys, *model, "--data", tmp_path / "empty")
    assert "did you mean 'glue'?" in refusal(capsys, *model, *data, "--recipe", "glu")
    assert "does not contain an encoder with its tokenizer" in refusal(capsys, "--model", tmp_path / "empty", *data)
    train = task / "train.tsv"
    for content, words in {
        "": "is not valid TSV in UTF-8",
        "sentence\tlabel\n": "is not valid TSV in UTF-8",
        "text\tlabel\na\t1\n": "lacks the columns of a task; expected one of sentence1 and sentence2, ",
        "sentence\tlabel\ngood\t1\nbad\n": "Row 2 of ",
        "sentence\tlabel\ngood\t1\n": "has 1 different labels, but 2 to 20 are needed",
        "sentence\tscore\ngood\t1.5\nbad\tnan\n": "Row 2 of ",
        "sentence\tscore\ngood\t1.5\nbad\t2\n": "Some labels are numbers and some are classes",
        "sentence\tlabel\ngood\ta\nbad\tb\n": "has the label '0', which is not in the train file",
    }.items():
        train.write_text(content)
        assert words in refusal(capsys, *model, *data), content
    train.write_bytes(b"sentence\tlabel\n\xff\t1\n")
    assert "is not valid TSV in UTF-8 (UnicodeDecodeError)" in refusal(capsys, *model, *data)
    train.unlink()
    for content in ("[1]\n", "{\n"):
        (task / "train.jsonl").write_text(content)
        assert "is not valid JSONL in UTF-8" in refusal(capsys, *model, *data)


# ----------------------------------------------------------------------------------------------------------------- lm

QUESTIONS = {
    "WinoGrande": {"sentence": "Jo called Al as _ was ill.", "option1": "Jo", "option2": "Al", "answer": "2"},
    "ARC": {
        "question": {"stem": "Why?", "choices": [{"text": "so", "label": "A"}, {"text": "no", "label": "B"}]},
        "answerKey": "B",
    },
    "ARC, as a table": {"question": "Why?", "choices": {"text": ["so", "no"], "label": ["1", "2"]}, "answerKey": "2"},
    "HellaSwag": {"ctx": "A man is on a roof. he", "endings": ["sings.", "works."], "label": 1},
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_questions_are_read_as_published(name, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(QUESTIONS[name]) + "\n\n")
    (text,) = lm.read(tmp_path / "a.jsonl")
    question, first, second, answer = text.split("\n")
    assert question in ("Jo called Al as _ was ill.", "Why?", "A man is on a roof. he")
    assert answer == f"Answer: {second.removeprefix('- ')}" != f"Answer: {first.removeprefix('- ')}"


@pytest.mark.parametrize("line", ["{", "[1]", "{}", '{"ctx": "a", "endings": [], "label": 1}', '{"question": "a"}'])
def test_an_invalid_question_names_its_line(line, tmp_path):
    good = json.dumps(QUESTIONS["HellaSwag"])
    (tmp_path / "a.jsonl").write_text(f"{good}\n{line}\n")
    with pytest.raises(TextsError, match=r"Line 2 of .* is not a question with its answer in the format of WinoGrande"):
        list(lm.read(tmp_path / "a.jsonl"))


@pytest.mark.slow
def test_lm_trains_all_weights_through_the_sdk(model_folder, recipe, tmp_path, capsys):
    recipe.write_text(RECIPE.replace("batch_tokens = 8", "batch_tokens = 200"))
    texts = make_sentences(40)
    (tmp_path / "lines.txt").write_text("\n".join(texts[:20]))
    questions = [{"ctx": text, "endings": ["It was late.", "So we left."], "label": 0} for text in texts[20:]]
    (tmp_path / "more.jsonl").write_text("\n".join(map(json.dumps, questions)))
    files = [tmp_path / "lines.txt", tmp_path / "more.jsonl"]
    arguments = ["--model", model_folder, "--recipe", recipe, "--out", tmp_path / "out", "--device", "cpu"]
    lm.main([*map(str, arguments), "--data", *map(str, files)])
    output = capsys.readouterr().out
    assert output.startswith("40 texts, ")
    before, after = map(float, re.search(r"held-out loss ([\d.]+) -> ([\d.]+)", output).groups())
    assert after < before
    assert (tmp_path / "out" / "model.safetensors").is_file()


# ------------------------------------------------------------------------------------------------------------ recipes
