"""In conversations, exactly the assistant's text has loss, by a method that is sound for the chat template.

The templates have the structure of real ones, without tools: what they print, trim, add and rewrite.
"""

import time
from itertools import chain

import pytest
from builders import CHAT_TEMPLATE, make_sentences, make_tokenizer
from tokenizers import AddedToken, processors

from sebp_edge.errors import ModelError
from sebp_edge.texts.conversations import render_conversation
from sebp_edge.texts.documents import Completion, Conversation, Document, Unreadable
from sebp_edge.texts.examples import encode

IGNORE = -100

# Prints BOS itself, always prints a system message with the date, and trims contents.
LLAMA_3 = """{{- bos_token }}
{%- set date_string = strftime_now("%d %b %Y") %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{{- "Today Date: " + date_string + "\n\n" }}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
# Prints a default system message, and trims nothing.
SMOLLM_2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Keeps thoughts, and adds empty ones if there are none, only after the last question.
QWEN_3 = """{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last_query_index=messages|length - 1, searching=true) %}
{%- for message in messages[::-1] %}
    {%- if ns.searching and message.role == "user" %}
        {%- set ns.searching = false %}
        {%- set ns.last_query_index = (messages|length - 1) - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- set thoughts = '' %}
        {%- if '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or thoughts) %}
            {{- '<|im_start|>assistant\n<think>\n' + thoughts.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- '<|im_start|>assistant\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"""
# Ends a conversation, but no turn inside it, with EOS.
PHI_3 = (
    "{% for message in messages %}{{'<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
# Requires alternating roles, and refuses system messages.
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('No system role') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{{ '<start_of_turn>' + message['role'] + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>assistant\n'}}{% endif %}"
)
# Makes the model think: the generation prompt is not a prefix of the rendered answer.
DEEPSEEK_R1 = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{{ '<|assistant|>' + message['content'].split('</think>')[-1] + '<|end|>' }}"
    "{% else %}{{ '<|user|>' + message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|><think>\n' }}{% endif %}"
)
CONTROL = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>"]


def messages_of(*contents: str, system: str | None = None) -> tuple[dict[str, str], ...]:
    """Makes messages of the user and the assistant in turn."""
    turns = [
        {"role": role, "content": content} for role, content in zip(["user", "assistant"] * 9, contents, strict=False)
    ]
    return tuple(([{"role": "system", "content": system}] if system else []) + turns)


def tokenizer_with(template: str | dict | None, *, blanks_in_offsets: bool = True):
    """Makes a tokenizer with the control tokens of all templates; `<think>` is one token, but not a special one."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": [*CONTROL, "<start_of_turn>", "<end_of_turn>"]})
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    if not blanks_in_offsets:
        bos = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
        tokenizer.backend_tokenizer.post_processor = processors.Sequence([processors.ByteLevel(), bos])
    tokenizer.chat_template = template
    return tokenizer


def parts_with_loss(messages, tokenizer) -> list[list[str]]:
    """Returns the parts with loss of each rendered text."""
    return [[text[begin:end] for begin, end in spans] for text, spans in render_conversation(messages, tokenizer)]


def encode_one(messages, tokenizer, context_length: int = 512):
    return encode([Document("chat", Conversation(messages))], tokenizer, context_length)


def loss_tokens(example) -> list[int]:
    return [label for label in example.labels[1:] if label != IGNORE]


TWO_TURNS = messages_of("the map?", "at home", "and soup?", "at six")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHAT_TEMPLATE, ["at home<|end|>", "at six<|end|>"]),
        (LLAMA_3, ["at home<|eot_id|>", "at six<|eot_id|>"]),
        (SMOLLM_2, ["at home<|im_end|>\n", "at six<|im_end|>\n"]),
        (GEMMA, ["at home<end_of_turn>\n", "at six<end_of_turn>\n"]),
    ],
)
@pytest.mark.parametrize("blanks_in_offsets", [True, False])
def test_all_turns_of_the_assistant_and_their_end_marks_have_loss(template, expected, blanks_in_offsets):
    tokenizer = tokenizer_with(template, blanks_in_offsets=blanks_in_offsets)
    assert parts_with_loss(TWO_TURNS, tokenizer) == [expected]
    [example], left_out = encode_one(TWO_TURNS, tokenizer)
    assert not left_out
    assert tokenizer.decode(loss_tokens(example)) == "".join(expected)
    rendered = tokenizer.apply_chat_template(list(TWO_TURNS), tokenize=False)
    assert tokenizer.decode(example.input_ids).removeprefix("<|bos|>") == rendered.removeprefix("<|bos|>")
    assert example.input_ids.count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize("template", [LLAMA_3, SMOLLM_2, QWEN_3, PHI_3, CHAT_TEMPLATE])
def test_a_system_message_is_kept_without_loss(template):
    tokenizer = tokenizer_with(template)
    [example], _ = encode_one(messages_of("the map?", "at home", system="so left"), tokenizer)
    assert "so left" in tokenizer.decode(example.input_ids)
    assert "at home" in tokenizer.decode(loss_tokens(example))
    assert "so left" not in tokenizer.decode(loss_tokens(example))


def test_a_template_that_rewrites_history_is_rendered_turn_by_turn():
    tokenizer = tokenizer_with(QWEN_3)
    messages = messages_of(
        "the map?", "<think>\nold\n</think>\n\nat home", "and soup?", "at six", "so?", "home", system="s"
    )
    assert parts_with_loss(messages, tokenizer) == [
        ["<think>\nold\n</think>\n\nat home<|im_end|>\n"],
        ["<think>\n\n</think>\n\nat six<|im_end|>\n"],
        ["<think>\n\n</think>\n\nhome<|im_end|>\n"],
    ]
    examples, _ = encode_one(messages, tokenizer)
    texts = [tokenizer.decode(example.input_ids) for example in examples]
    # Each text is the prompt that the model gets for that turn, followed by the turn.
    for turn, text in zip((2, 4, 6), texts, strict=True):
        asked = tokenizer.apply_chat_template(list(messages[:turn]), tokenize=False, add_generation_prompt=True)
        assert text.removeprefix("<|bos|>").startswith(asked)
    assert "old" in texts[0] and "old" not in texts[1]
    assert [example.document for example in examples] == [0, 0, 0]


def test_a_conversation_of_one_turn_is_one_text_whatever_the_user_says_after_it():
    messages = messages_of("the map?", "at home")
    for conversation in (messages, (*messages, {"role": "user", "content": "thanks"})):
        [(text, _)] = render_conversation(conversation, tokenizer_with(QWEN_3))
        assert text.endswith("<think>\n\n</think>\n\nat home<|im_end|>\n")


def test_a_template_that_ends_only_conversations_with_eos_is_rendered_turn_by_turn():
    assert parts_with_loss(TWO_TURNS, tokenizer_with(PHI_3)) == [
        ["at home<|end|>\n<|eos|>"],
        ["at six<|end|>\n<|eos|>"],
    ]


@pytest.mark.parametrize("template", [DEEPSEEK_R1, "{{ messages | length }}", "{{ messages[-1].content }}"])
def test_a_template_that_does_not_show_the_assistants_part_is_refused(template):
    with pytest.raises(ModelError, match="does not show which part"):
        encode_one(TWO_TURNS, tokenizer_with(template))


@pytest.mark.parametrize("template", [None, {"rag": SMOLLM_2}])
def test_a_model_without_a_chat_template_is_refused(template):
    with pytest.raises(ModelError, match="has no chat template"):
        encode_one(TWO_TURNS, tokenizer_with(template))


def test_the_default_of_several_templates_is_used():
    assert parts_with_loss(TWO_TURNS, tokenizer_with({"default": SMOLLM_2, "rag": CHAT_TEMPLATE})) == [
        ["at home<|im_end|>\n", "at six<|im_end|>\n"]
    ]


def test_only_the_conversation_that_the_template_refuses_is_left_out():
    tokenizer = tokenizer_with(GEMMA)
    contents = [messages_of("a", "b", system="s"), messages_of("a", "b")]
    documents = [Document(str(number), Conversation(messages)) for number, messages in enumerate(contents)]
    examples, left_out = encode(documents, tokenizer, 64)
    assert {example.document for example in examples} == {1}
    assert [item.source for item in left_out] == ["0"]
    assert left_out[0].reason == "the model's chat template refuses a conversation of system, user, assistant"


def test_errors_do_not_quote_unknown_roles():
    raising = "{% for m in messages %}{{ raise_exception('No such role: ' + m['role']) }}{% endfor %}"
    messages = ({"role": "my-secret", "content": "a"}, {"role": "assistant", "content": "b"})
    _, [item] = encode([Document("chat", Conversation(messages))], tokenizer_with(raising), 64)
    assert item.reason == "the model's chat template refuses a conversation of another role, assistant"


def test_a_conversation_may_begin_with_the_assistant_if_the_template_marks_its_text():
    messages = messages_of("a", "home", "b", "six")[1:]
    assert parts_with_loss(messages, tokenizer_with(CHAT_TEMPLATE)) == [["home<|end|>", "six<|end|>"]]
    with pytest.raises(Unreadable, match="it begins with the assistant"):
        render_conversation(messages, tokenizer_with(SMOLLM_2))


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, SMOLLM_2, QWEN_3])
@pytest.mark.parametrize("token", ["<|im_end|>", "<|eos|>", "<|end|>"])
def test_a_message_that_spells_out_a_control_token_is_left_out(template, token):
    """In a rendered conversation it would become the control token and end the turn."""
    for messages in (messages_of(f"a {token}", "b"), messages_of("a", f"{token} b")):
        _, [item] = encode_one(messages, tokenizer_with(template))
        assert item.reason == "a message spells out one of the model's control tokens"


@pytest.mark.parametrize("content", [" at home", "at home ", " at home  ", " "])
def test_spans_that_begin_or_end_with_blanks_outside_the_offsets_are_kept(content):
    bare = CHAT_TEMPLATE.replace(
        "{% generation %}{{ message.content }}<|end|>{% endgeneration %}",
        "{% generation %}{{ message.content }}{% endgeneration %}<|end|>",
    )
    messages = messages_of("the map?", content, "so?", content)
    for template in (CHAT_TEMPLATE, bare):
        for blanks_in_offsets in (True, False):
            [parts] = parts_with_loss(messages, tokenizer_with(template, blanks_in_offsets=blanks_in_offsets))
            assert [part.removesuffix("<|end|>").strip() for part in parts] == [content.strip()] * 2


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, LLAMA_3, SMOLLM_2, QWEN_3])
@pytest.mark.parametrize("bos", [True, False])
def test_a_conversation_longer_than_the_context_loses_no_loss_token(template, bos):
    tokenizer = tokenizer_with(template)
    if not bos:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    messages = messages_of(*make_sentences(8), system="the wind")
    long, _ = encode_one(messages, tokenizer, 48)
    whole, _ = encode_one(messages, tokenizer, 100_000)
    assert max(len(example.input_ids) for example in long) <= 48
    assert [*chain(*map(loss_tokens, long))] == [*chain(*map(loss_tokens, whole))]


def test_prompts_and_completions_are_rendered_with_the_template_if_the_recipe_says_so():
    tokenizer = tokenizer_with(SMOLLM_2)
    documents = [Document("qa", Completion("the map?", "at home"))]
    examples, _ = encode(documents, tokenizer, 64, chat_template=True)
    assert examples == encode_one(messages_of("the map?", "at home"), tokenizer)[0]
    [plain], _ = encode(documents, tokenizer, 64)
    assert "<|im_start|>" not in tokenizer.decode(plain.input_ids)


def test_empty_and_repeated_turns_of_the_assistant_have_loss():
    tokenizer = tokenizer_with(SMOLLM_2)
    messages = (*messages_of("the map?", ""), {"role": "assistant", "content": "at home"})
    assert parts_with_loss(messages, tokenizer) == [["<|im_end|>\n", "at home<|im_end|>\n"]]


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, SMOLLM_2])
def test_a_long_conversation_takes_seconds(template):
    content = " ".join(make_sentences(1500))
    begin = time.process_time()
    encode_one(messages_of("so?", content, "and?", content), tokenizer_with(template))
    assert time.process_time() - begin < 10


def test_texts_and_conversations_do_not_affect_each_other():
    tokenizer, content = tokenizer_with(CHAT_TEMPLATE), Conversation(TWO_TURNS)
    alone, _ = encode([Document("chat", content)], tokenizer, 512)
    text = Document("text", "<|end|> spelt out")
    mixed, _ = encode([text, Document("chat", content), text], tokenizer, 512)
    assert mixed[1].input_ids == alone[0].input_ids
    assert mixed[0].input_ids == mixed[2].input_ids == encode([text], tokenizer, 512)[0][0].input_ids
