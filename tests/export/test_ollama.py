"""Modelfiles: chat templates are recognised, and Go renders what the model's Jinja template renders."""

import json
import shutil
import subprocess

import pytest
from builders import make_tokenizer
from export_sources import make_adapter, make_source

from sebp_edge import Personalizer
from sebp_edge.errors import ExportError
from sebp_edge.export.ollama import FORMATS, RAW, modelfile

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_3 = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
LLAMA_3_1 = (
    "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}{{ bos_token }}"
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}"
    "{% else %}{% set system = '' %}{% endif %}<|start_header_id|>system<|end_header_id|>\n\n"
    "Cutting Knowledge Date: December 2023\nToday Date: {{ date_string }}\n\n{{ system }}<|eot_id|>"
    + LLAMA_3.removeprefix("{{ bos_token }}")
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set first = '' %}{% endif %}{% for message in messages %}"
    "<start_of_turn>{{ 'model' if message.role == 'assistant' else 'user' }}\n{{ first if loop.first else '' }}"
    "{{ message.content }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
GEMMA_2 = "{% if messages[0].role == 'system' %}{{ raise_exception('No system role') }}{% endif %}" + GEMMA
PHI_3 = (
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content + '\n\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}{% for message in messages %}"
    "{% if message.role == 'user' %}[INST]SPACE{{ system if loop.WHERE else '' }}{{ message.content }}END"
    "{% else %}SPACE{{ message.content }}</s>{% endif %}{% endfor %}"
)


def mistral(space, end, where):
    return MISTRAL.replace("SPACE", space).replace("END", end).replace("WHERE", where)


TEMPLATES = {
    "chatml": CHATML,
    "llama-3": LLAMA_3,
    "llama-3.1": LLAMA_3_1,
    "gemma": GEMMA,
    "phi-3": PHI_3,
    "mistral-1": mistral(" ", " [/INST]", "first"),
    "mistral-3": mistral(" ", "[/INST]", "last"),
    "mistral-3-first": mistral(" ", "[/INST]", "first"),
    "mistral-tekken": mistral("", "[/INST]", "last"),
    "mistral-tekken-first": mistral("", "[/INST]", "first"),
}
USER, AGAIN = ({"role": "user", "content": text} for text in ("What is {{ this }}?", "And the rest?"))
SYSTEM, ANSWER = {"role": "system", "content": "Say “yes”."}, {"role": "assistant", "content": "A %s.\n\nB."}
CHATS = [[USER], [SYSTEM, USER], [USER, ANSWER, AGAIN], [SYSTEM, USER, ANSWER, AGAIN], [SYSTEM, AGAIN, ANSWER, USER]]
PROGRAM = """package main

import ("bytes"; "encoding/json"; "os"; "text/template")

type message struct{ Role, Content string }
type chat struct { Template string; Messages []message }

func main() {
	var chats []chat
	if err := json.NewDecoder(os.Stdin).Decode(&chats); err != nil { panic(err) }
	texts := []string{}
	for _, one := range chats {
		var text bytes.Buffer
		parsed := template.Must(template.New("").Parse(one.Template))
		if err := parsed.Execute(&text, map[string]any{"Messages": one.Messages}); err != nil { panic(err) }
		texts = append(texts, text.String())
	}
	json.NewEncoder(os.Stdout).Encode(texts)
}
"""


def tokenizer_with(template):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def template_of(text):
    return text.partition('TEMPLATE """')[2].partition('"""')[0]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_of_each_format_is_recognised(name):
    text = modelfile(tokenizer_with(TEMPLATES[name]), "x.gguf", needs_chat=True)
    assert template_of(text) == FORMATS[name].template
    assert text.startswith("FROM ./x.gguf\n")
    assert text.endswith(f'PARAMETER stop "{FORMATS[name].stop}"\n')
    assert "SYSTEM" not in text


def test_every_format_is_tested():
    assert TEMPLATES.keys() == FORMATS.keys()


def test_go_renders_what_jinja_renders(tmp_path):
    if shutil.which("go") is None:
        pytest.skip("needs Go's text/template: apt install golang-go")
    (tmp_path / "main.go").write_text(PROGRAM)
    cases = [(name, chat) for name in TEMPLATES for chat in CHATS]
    asked = [{"Template": FORMATS[name].template, "Messages": chat} for name, chat in cases]
    options = {"input": json.dumps(asked), "capture_output": True, "text": True, "check": True}
    rendered = json.loads(subprocess.run(["go", "run", tmp_path / "main.go"], **options).stdout)
    for (name, chat), text in zip(cases, rendered, strict=True):
        expected = tokenizer_with(TEMPLATES[name]).apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True, date_string="26 Jul 2024"
        )
        assert text == expected.removeprefix("<|bos|>"), name


def test_a_template_that_refuses_system_messages_is_recognised():
    text = modelfile(tokenizer_with(GEMMA_2), "x.gguf", needs_chat=True)
    assert template_of(text) == FORMATS["gemma"].template


def test_a_default_system_message_is_written():
    default = "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are kind.<|im_end|>\n{% endif %}"
    text = modelfile(tokenizer_with(default + CHATML), "x.gguf", needs_chat=True)
    assert 'SYSTEM """You are kind."""' in text


@pytest.mark.parametrize("template", [None, *TEMPLATES.values()])
def test_an_adapter_that_was_not_trained_on_chats_continues_texts(template):
    text = modelfile(tokenizer_with(template), "x.gguf", needs_chat=False)
    assert text == 'FROM ./x.gguf\nTEMPLATE """{{ .Prompt }}"""\n'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("record", "template", "expected"),
    [
        ({}, CHATML, RAW),
        ({"chat": True}, CHATML, FORMATS["chatml"].template),
        ({"recipe": {"name": "know", "method": "lora", "questions": "rules"}}, CHATML, FORMATS["chatml"].template),
        ({"recipe": {"name": "know", "method": "lora", "questions": "rules"}}, None, f"Question: {RAW}\nAnswer:"),
    ],
)
def test_ollama_renders_prompts_as_the_adapter_was_trained(tmp_path, no_memory, record, template, expected):
    model = make_source(tmp_path / "model", "llama", tokenizer_with(template))
    adapter = make_adapter(tmp_path / "adapter", model, **record)
    result = Personalizer(model, device="cpu").export(adapter, tmp_path / "out", format="ollama")
    assert template_of((tmp_path / "out" / "Modelfile").read_text()) == expected
    assert ("it was not trained to chat" in result.summary) == (expected == RAW)


@pytest.mark.parametrize(
    "template", [CHATML.replace("<|im_end|>", "<|over|>"), "!" + CHATML, "{{ raise_exception('never') }}"]
)
def test_another_template_is_refused_if_the_adapter_needs_it(template):
    with pytest.raises(ExportError, match="has no known form"):
        modelfile(tokenizer_with(template), "x.gguf", needs_chat=True)
    assert template_of(modelfile(tokenizer_with(template), "x.gguf", needs_chat=False)) == RAW
