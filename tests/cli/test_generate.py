"""`sebp-edge generate`: prompts and chats, streamed text, signals, closed readers, no unrequested network access."""

import json
import signal
import socket

import pytest
from builders import make_llama
from command import assert_one_sentence, process, records, run
from huggingface_hub import constants

CHAT = [{"role": "system", "content": "the ferry"}, {"role": "user", "content": "where is the map"}]
SEEDED = ["--seed", "1", "--max-tokens", "12"]


@pytest.fixture
def generate_call(monkeypatch):
    """A function that runs the command without a model, and returns how `Personalizer.generate` was called."""
    from sebp_edge.personalizer import Personalizer

    calls = []
    monkeypatch.setattr(Personalizer, "generate", lambda _, prompt, **options: calls.append((prompt, options)) or "")

    def call(*arguments, **options):
        result = run("generate", *arguments, "--model", "tiny", **options)
        assert result.exit_code == 0, result.output
        return calls.pop()

    return call


def test_json_is_a_line_per_chunk_and_then_the_whole_text(model_folder):
    arguments = ["generate", "the ferry", "--model", model_folder, *SEEDED]
    plain, (started, *chunks, last) = run(*arguments), records(run(*arguments, "--json").stdout)
    assert len(chunks) > 3
    assert started["event"] == "started" and {chunk["event"] for chunk in chunks} == {"text"}
    assert (last["event"], last["result_of"], last["prompt"]) == ("result", "generate", "the ferry")
    assert last["text"] == "".join(chunk["text"] for chunk in chunks)
    assert plain.stdout == "the ferry" + last["text"] + "\n"
    assert plain.stderr == ""


def test_a_question_of_a_chat_is_not_repeated(two_layer_folder):
    chat = ["generate", "--messages", "-", "--model", two_layer_folder, *SEEDED]
    plain, (*_, last) = run(*chat, input=json.dumps(CHAT)), records(run(*chat, "--json", input=json.dumps(CHAT)).stdout)
    assert plain.stdout == last["text"] + "\n"


def test_tiny_is_said_to_be_a_demonstrator_once_above_its_text():
    arguments = ["generate", "the map", "--model", "tiny", "--device", "cpu", *SEEDED]
    result = run(*arguments)
    assert result.stdout.startswith("the map") and len(result.stdout) > len("the map\n")
    assert result.stderr.count("demonstrator") == result.stderr.count("\n") == 1
    assert "demonstrator" not in run(*arguments, "--json").output


def test_a_chat_is_a_system_prompt_with_a_prompt_or_a_file_or_the_standard_input(generate_call, tmp_path):
    file = tmp_path / "chat.json"
    file.write_text(json.dumps(CHAT), encoding="utf-8")
    assert generate_call("where is the map", "--system", "the ferry")[0] == CHAT
    assert generate_call("--messages", file)[0] == CHAT
    assert generate_call("--messages", "-", input=json.dumps(CHAT))[0] == CHAT


def test_a_chat_is_answered(two_layer_folder):
    result = run("generate", "--messages", "-", "--model", two_layer_folder, *SEEDED, "--json", input=json.dumps(CHAT))
    assert records(result.stdout)[-1]["prompt"] == CHAT
    other = run("generate", "where is the map", "--model", two_layer_folder, *SEEDED, "--json")
    assert records(result.stdout)[-1]["text"] != records(other.stdout)[-1]["text"]


def test_options_are_passed_on(generate_call):
    options = generate_call(
        "a", "--stop", "\n", "--stop", "- b", "--stop", "---", "--top-k", 5, "--repetition-penalty", 1.2
    )[1]
    assert options["stop"] == ["\n", "- b", "---"]
    assert (options["top_k"], options["repetition_penalty"]) == (5, 1.2)


@pytest.mark.parametrize("prompt", ["- buy milk = cheese", "---\ntitle: a ferry\n---\n", "-5 degrees, and a ferry"])
def test_a_prompt_may_begin_with_a_dash(generate_call, prompt):
    assert generate_call("--max-tokens", 2, prompt, "--json")[0] == prompt
    assert run("generate", "--model", "tiny", "--json", "--", prompt).exit_code == 0
    assert generate_call("--max-tokens", 2, prompt, "--system", "- a list")[0][0]["content"] == "- a list"


@pytest.mark.parametrize(
    ("arguments", "words", "exit_code"),
    [
        ([], "No prompt was given; give PROMPT, or a chat with --messages", 2),
        ([""], "The prompt is empty", 1),
        (["ferry \udcff"], r"The prompt is not valid Unicode \(character 6\); give it in UTF-8", 1),
        (["the", "--messages", "-"], "--messages is the whole chat; leave out PROMPT and --system", 2),
        (["--system", "the", "--messages", "-"], "--messages is the whole chat", 2),
        (["--messages", "nowhere.json"], "The file 'nowhere.json' cannot be read: No such file", 1),
        (["--messages", "."], r"The file '\.' cannot be read: Is a directory", 1),
        (["--messages", "-"], "The standard input must be a JSON list of messages", 1),
    ],
    ids=str,
)
def test_an_invalid_prompt_is_one_sentence(model_folder, arguments, words, exit_code):
    assert_one_sentence(run("generate", *arguments, "--model", model_folder, input="secret"), words, exit_code)


@pytest.mark.parametrize("content", ["", "{}", '{"role": "user"', "[" * 100_000, b"\xff[]"], ids=lambda c: str(c)[:9])
def test_a_messages_file_without_a_list_is_one_sentence(tmp_path, content):
    file = tmp_path / "chat.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert_one_sentence(run("generate", "--messages", file, "--model", "tiny"), "must be a JSON list of messages")


@pytest.fixture
def endless(tmp_path, tokenizer):
    """Arguments for a text that takes far longer than the test."""
    folder = tmp_path / "endless"
    make_llama(max_position_embeddings=2**16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return ["generate", "the ferry", "--model", folder, "--temperature", 0, "--max-tokens", 60_000]


@pytest.mark.slow
@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c_is_one_sentence_and_the_text_so_far_stays(endless, as_json):
    with process(*endless, *["--json"] * as_json) as one:
        first = "".join(one.stdout.readline() for _ in range(2)) if as_json else one.stdout.read(1)
        one.send_signal(signal.SIGINT)
        rest, errors = one.communicate(timeout=200)
    assert one.returncode == 130
    assert errors == "sebp-edge: Interrupted; the text is incomplete.\n"
    assert first
    assert rest.endswith("\n")
    if as_json:
        _, *chunks, last = records(first + rest)
        assert {chunk["event"] for chunk in chunks} == {"text"}
        assert (last["event"], last["error"]) == ("error", "Interrupted")


@pytest.mark.slow
def test_a_reader_that_goes_away_ends_it_quietly(endless):
    with process(*endless, "--json") as one:
        assert [json.loads(one.stdout.readline())["event"] for _ in range(2)] == ["started", "text"]
        one.stdout.close()
        assert one.wait(timeout=200) == 141
        assert one.stderr.read() == ""


# ------------------------------------------------------------------------------------------------------------ network


@pytest.fixture
def connections(monkeypatch):
    """The attempted connections: huggingface_hub is online, but nobody answers."""
    hosts = []

    def refuse(*arguments, **options):
        hosts.append(arguments)
        raise OSError("no network here")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)  # every connection begins with it
    return hosts


def adapter_of(folder, **values):
    """Makes an adapter's folder, as somebody else may have."""
    record = dict.fromkeys(("documents", "examples", "tokens", "seed"), 1)
    record |= dict.fromkeys(("heldout_loss_before", "heldout_loss_after"))
    record |= {"fingerprint": "0" * 32, "recipe": {"method": "lora", "name": "notes"}}
    record |= {"created": "2026-11-22T12:00:00+00:00", "sebp_edge": "0.1.0"} | values
    folder.mkdir()
    (folder / "sebp_edge.json").write_text(json.dumps(record))
    return folder


@pytest.mark.parametrize("model", ["somebody/their-model", "smollm2-135m"])
def test_a_model_named_only_by_a_record_is_not_downloaded(tmp_path, connections, model):
    folder = adapter_of(tmp_path / "foreign", base_model="somebody/their-model", model=model)
    result = run("generate", "the ferry", "--adapter", folder)
    assert_one_sentence(
        result, f"made for '{model}', which is not on this machine; to download it, pass --model {model}"
    )
    assert connections == []


def test_a_model_named_by_the_user_may_be_downloaded(tmp_path, connections):
    folder = adapter_of(tmp_path / "foreign", base_model="somebody/their-model", model="somebody/their-model")
    result = run("generate", "the ferry", "--adapter", folder, "--model", "somebody/their-model")
    assert_one_sentence(result, "the Hub cannot be reached")
    assert connections


def test_a_folder_named_by_a_record_is_not_opened(tmp_path, model_folder, connections, monkeypatch):
    monkeypatch.chdir(model_folder.parent)
    folder = adapter_of(tmp_path / "foreign", base_model="a/b", model=f"./{model_folder.name}")
    assert_one_sentence(run("generate", "the ferry", "--adapter", folder), "give that folder with --model")
    assert connections == []
