"""In conversations, exactly the assistant's text has loss, by a method that is sound for the chat template."""

from itertools import chain

import pytest
from builders import make_sentences, make_tokenizer
from chat_templates import DEEPSEEK_R1, GEMMA, LLAMA_3, PHI_3, QWEN_3, SMOLLM_2
from pace import at_most
from small_tokenizer import CHAT_TEMPLATE
from tokenizers import AddedToken, processors

from sebp_edge.errors import ModelError
from sebp_edge.lessons.conversations import plain_message, render_conversation, render_plain, render_prompt
from sebp_edge.lessons.examples import encode
from sebp_edge.lessons.prompts import encode_prompt
from sebp_edge.values.documents import Conversation, Document, PromptCompletion, Unreadable

IGNORE = -100

CONTROL = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>"]


def messages_of(*contents: str, system: str | None = None) -> tuple[dict[str, str], ...]:
    """Makes messages of the user and the assistant in turn."""
    turns = [
        {"role": role, "content": content} for role, content in zip(["user", "assistant"] * 9, contents, strict=False)
    ]
    return tuple(([{"role": "system", "content": system}] if system else []) + turns)


# A process for each template, which all tests share.
RENDERERS = {}


@pytest.fixture(autouse=True, scope="module")
def end_of_renderers():
    yield
    RENDERERS.clear()


def tokenizer_with(template: str | dict | None, *, blanks_in_offsets: bool = True):
    """Makes a tokenizer with the control tokens of all templates; `<think>` is one token, but not a special one."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": [*CONTROL, "<start_of_turn>", "<end_of_turn>"]})
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    if not blanks_in_offsets:
        bos = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
        tokenizer.backend_tokenizer.post_processor = processors.Sequence([processors.ByteLevel(), bos])
    tokenizer.chat_template = template
    tokenizer.sebp_edge_renderers = RENDERERS
    return tokenizer


def parts_with_loss(messages, tokenizer) -> list[list[str]]:
    """Returns the parts with loss of each rendered text."""
    return [[text[begin:end] for begin, end in spans] for text, spans in render_conversation(messages, tokenizer)]


def encode_one(messages, tokenizer, context_length: int = 512):
    return encode([Document("chat", Conversation(messages))], tokenizer, context_length)


def encode_each(conversations, tokenizer):
    documents = [Document(str(number), Conversation(messages)) for number, messages in enumerate(conversations)]
    return encode(documents, tokenizer, 64)


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


@pytest.mark.parametrize("template", ["{{ messages | length }}", "{{ messages[-1].content }}"])
def test_a_template_that_does_not_show_the_assistants_part_is_refused(template):
    with pytest.raises(ModelError, match="does not show which part"):
        encode_one(TWO_TURNS, tokenizer_with(template))


def test_only_a_conversation_whose_assistant_is_not_shown_is_left_out():
    shown = "{% if messages[0].role == 'system' %}{{ messages | length }}{% else %}" + SMOLLM_2 + "{% endif %}"
    conversations = [messages_of("a", "b", system="s"), messages_of("a", "b")]
    examples, [item] = encode_each(conversations, tokenizer_with(shown))
    assert {example.document for example in examples} == {1}
    assert item.reason == "the model's chat template does not show which part of it is the assistant's"


@pytest.mark.parametrize("template", [None, {"rag": SMOLLM_2}])
def test_a_model_without_a_chat_template_is_refused(template):
    with pytest.raises(ModelError, match="has no chat template"):
        encode_one(TWO_TURNS, tokenizer_with(template))


def test_the_default_of_several_templates_is_used():
    assert parts_with_loss(TWO_TURNS, tokenizer_with({"default": SMOLLM_2, "rag": CHAT_TEMPLATE})) == [
        ["at home<|im_end|>\n", "at six<|im_end|>\n"]
    ]


def test_only_the_conversation_that_the_template_refuses_is_left_out():
    conversations = [messages_of("a", "b", system="s"), messages_of("a", "b")]
    examples, [item] = encode_each(conversations, tokenizer_with(GEMMA))
    assert {example.document for example in examples} == {1}
    assert (item.source, item.reason) == (
        "0",
        "the model's chat template refuses a conversation of system, user, assistant",
    )


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
    documents = [Document("qa", PromptCompletion("the map?", "at home"))]
    examples, _ = encode(documents, tokenizer, 64, chat_template=True)
    assert examples == encode_one(messages_of("the map?", "at home"), tokenizer)[0]
    [plain], _ = encode(documents, tokenizer, 64)
    assert "<|im_start|>" not in tokenizer.decode(plain.input_ids)


def test_empty_and_repeated_turns_of_the_assistant_have_loss():
    tokenizer = tokenizer_with(SMOLLM_2)
    messages = (*messages_of("the map?", ""), {"role": "assistant", "content": "at home"})
    assert parts_with_loss(messages, tokenizer) == [["<|im_end|>\n", "at home<|im_end|>\n"]]


@pytest.mark.slow
@pytest.mark.parametrize("template", [CHAT_TEMPLATE, SMOLLM_2])
def test_a_long_conversation_takes_seconds(template):
    content = " ".join(make_sentences(1500))
    with at_most(10):
        encode_one(messages_of("so?", content, "and?", content), tokenizer_with(template))


def test_texts_and_conversations_do_not_affect_each_other():
    tokenizer, content = tokenizer_with(CHAT_TEMPLATE), Conversation(TWO_TURNS)
    alone, _ = encode([Document("chat", content)], tokenizer, 512)
    text = Document("text", "<|end|> spelt out")
    mixed, _ = encode([text, Document("chat", content), text], tokenizer, 512)
    assert mixed[1].input_ids == alone[0].input_ids
    assert mixed[0].input_ids == mixed[2].input_ids == encode([text], tokenizer, 512)[0][0].input_ids


CALL = {"type": "function", "function": {"name": "area", "arguments": {"a": 5}}}
WITH_CALL = (
    *messages_of("how large?"),
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": 'it is "15"'},
    {"role": "assistant", "content": "so 15"},
)
TOOLS = ({"type": "function", "function": {"name": "area", "description": "so large"}},)
# Prints tools, calls and their results as Llama 3.1 and Qwen do.
TOOL_USE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{% if m.role == 'tool' %}{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}"
    "{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, SMOLLM_2, LLAMA_3, QWEN_3, PHI_3])
def test_messages_of_weight_0_have_no_loss(template):
    first, answer, *others = messages_of("the map?", "at home", "and soup?", "at six")
    examples, _ = encode_one((first, answer | {"weight": 0}, *others), tokenizer_with(template))
    tokenizer = tokenizer_with(template)
    [learnt] = [tokenizer.decode(loss_tokens(example)) for example in examples]
    assert "at six" in learnt and "at home" not in learnt
    assert "at home" in tokenizer.decode(examples[0].input_ids)


def test_calls_of_tools_have_loss_and_their_results_are_context():
    tokenizer = tokenizer_with(TOOL_USE)
    [(text, spans)] = render_conversation(WITH_CALL, tokenizer, TOOLS)
    call = '{"name": "area", "arguments": {"a": 5}}<|im_end|>'
    assert [text[begin:end] for begin, end in spans] == [call, "so 15<|im_end|>"]
    assert '"description": "so large"' in text and r'"it is \"15\""' in text
    [example], _ = encode([Document("chat", Conversation(WITH_CALL, TOOLS))], tokenizer, 512)
    assert tokenizer.decode(loss_tokens(example)) == call + "so 15<|im_end|>"


def test_reasoning_has_loss():
    answer = {"role": "assistant", "content": "15", "reasoning_content": "5 by 3"}
    assert parts_with_loss((*messages_of("how large?"), answer), tokenizer_with(TOOL_USE)) == [
        ["<think>5 by 3</think>15<|im_end|>"]
    ]


# Prompts open a thought, and answers without one have an empty one, which a variable of the template puts there.
THINKING = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.role == 'assistant' %}{% if m.reasoning_content %}"
    "{{ '<think>\n' + m.reasoning_content + '</think>' }}{% else %}{{ '<think></think>' }}{% endif %}{% endif %}"
    "{{ m.content + '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|><think>' }}"
    "{{ '</think>' if enable_thinking is defined and not enable_thinking else '\n' }}{% endif %}"
)
# Prompts begin answers without a thought.
NO_THINKING = THINKING.replace("and not enable_thinking else '\n'", "or true else ''")


@pytest.mark.parametrize(
    ("template", "messages", "parts"),
    [
        (THINKING, TWO_TURNS, [["at home<|end|>", "at six<|end|>"]]),
        (THINKING, messages_of("a", "a"), [["a<|end|>"]]),
        (THINKING, messages_of("a", ""), [["<|end|>"]]),
        (THINKING, messages_of("a", "b", system="s"), [["b<|end|>"]]),
        (THINKING, (*messages_of("a", "b"), {"role": "assistant", "content": "c"}), [["b<|end|>", "c<|end|>"]]),
        (
            THINKING,
            (*messages_of("a"), {"role": "assistant", "content": "b", "reasoning_content": "c"}, *TWO_TURNS[:2]),
            [["c</think>b<|end|>", "at home<|end|>"]],
        ),
        (DEEPSEEK_R1, TWO_TURNS, [["at home<|end|>", "at six<|end|>"]]),
        (
            QWEN_3,
            (*TWO_TURNS[:2], {"role": "assistant", "content": "or not"}),
            [["<think>\n\n</think>\n\nat home<|im_end|>\n"], ["or not<|im_end|>\n"]],
        ),
    ],
)
def test_answers_without_thoughts_of_thinking_models_have_loss(template, messages, parts):
    assert parts_with_loss(messages, tokenizer_with(template)) == parts


@pytest.mark.parametrize("template", [THINKING, DEEPSEEK_R1, QWEN_3, SMOLLM_2])
@pytest.mark.parametrize("system", [None, "s"])
def test_a_prompt_begins_what_was_learnt(template, system):
    messages, tokenizer = (
        messages_of("the map?", "at home", "and soup?", "at six", system=system),
        tokenizer_with(template),
    )
    [*_, (text, [*_, (begin, _)])] = render_conversation(messages, tokenizer)
    prompt = render_prompt(messages[:-1], tokenizer)
    assert text.startswith(prompt) and len(prompt) == begin


def test_a_thought_for_which_a_template_has_no_place_is_named():
    thought = (*messages_of("a"), {"role": "assistant", "content": "b", "reasoning_content": "c"})
    _, [item] = encode_one(thought, tokenizer_with(NO_THINKING))
    assert item.reason == "the model's chat template begins answers without a thought, and this one has one"
    _, [item] = encode_one(thought, tokenizer_with(DEEPSEEK_R1))
    assert item.reason == 'the model\'s chat template has no place for "reasoning_content"'


@pytest.mark.parametrize(
    ("template", "messages", "tools", "what"),
    [
        (SMOLLM_2, WITH_CALL, (), "calls of tools"),
        (SMOLLM_2, messages_of("a", "b"), TOOLS, "descriptions of tools"),
        (QWEN_3, WITH_CALL, (), "calls of tools"),
        ("{{ messages[0].content }}", messages_of("a", "b"), (), "answers of the assistant"),
        (QWEN_3, (*messages_of("a", "b"), *WITH_CALL[2:]), (), "messages of the role tool"),
        (
            SMOLLM_2,
            (*messages_of("a"), {"role": "assistant", "content": "b", "reasoning_content": "c"}),
            (),
            '"reasoning',
        ),
        (
            CHAT_TEMPLATE,
            (*messages_of("a"), {"role": "assistant", "content": "b", "tool_calls": [CALL]}),
            (),
            "calls of",
        ),
    ],
)
def test_a_conversation_of_which_the_template_leaves_out_a_part_is_left_out(template, messages, tools, what):
    _, [item] = encode([Document("chat", Conversation(messages, tools))], tokenizer_with(template), 512)
    assert item.reason.startswith(f"the model's chat template has no place for {what}")


def test_a_system_message_that_the_template_ignores_is_not_lost_without_a_word():
    ignoring = "{% for m in messages if m.role != 'system' %}" + "<{{ m.role }}>{{ m.content }}" + "{% endfor %}"
    ignoring += "{% if add_generation_prompt %}<assistant>{% endif %}"
    _, [item] = encode_one(messages_of("a", "b", system="be brief"), tokenizer_with(ignoring))
    assert item.reason == "the model's chat template has no place for messages of the role system"


def test_a_conversation_of_very_many_turns_is_refused_at_once():
    messages = messages_of(*["so"] * 18) * 180
    with pytest.raises(Unreadable, match="so many turns"):
        render_conversation(messages, tokenizer_with(SMOLLM_2))
    assert len(parts_with_loss(messages, tokenizer_with(CHAT_TEMPLATE))[0]) == 18 * 90


# What Anna wrote to Bob, to whom she writes first.
OF_PEOPLE = (
    {"role": "user", "content": ""},
    {"role": "assistant", "author": "Anna", "content": "at home"},
    {"role": "user", "author": "Bob", "content": "and soup?"},
    {"role": "assistant", "author": "Anna", "content": "at six\nor so"},
)


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, LLAMA_3, SMOLLM_2, GEMMA, PHI_3, QWEN_3])
def test_chat_templates_are_not_told_the_authors_of_peoples_messages(template):
    without = tuple({key: value for key, value in message.items() if key != "author"} for message in OF_PEOPLE)
    tokenizer = tokenizer_with("{% for message in messages %}{{ message.author or '' }}{% endfor %}" + template)
    assert render_conversation(OF_PEOPLE, tokenizer) == render_conversation(without, tokenizer)
    examples, left_out = encode_one(OF_PEOPLE, tokenizer)
    assert not left_out
    learnt = "".join(tokenizer.decode(loss_tokens(example)) for example in examples)
    assert learnt.count("at home") == 1
    assert "soup" not in learnt


def test_peoples_messages_need_no_chat_template():
    tokenizer = tokenizer_with(None)
    [example], left_out = encode_one(OF_PEOPLE, tokenizer)
    assert not left_out
    # Each reply ends as a text does, so that a generated one ends.
    text = "Me: at home<|eos|>\n\nThem: and soup?\n\nMe: at six\nor so<|eos|>"
    assert tokenizer.decode(example.input_ids).removeprefix("<|bos|>") == text
    assert tokenizer.decode(loss_tokens(example)) == " at home<|eos|> at six\nor so<|eos|>"
    for number in range(len(OF_PEOPLE)):
        if OF_PEOPLE[number]["role"] == "user":
            prompt = encode_prompt(list(OF_PEOPLE[: number + 1]), tokenizer, chat=True)
            assert list(example.input_ids[: len(prompt.input_ids)]) == prompt.input_ids
            assert example.input_ids[-1] in prompt.end_ids
    message = encode_prompt("and soup?", tokenizer, chat=True).input_ids
    assert tokenizer.decode(message).removeprefix("<|bos|>") == plain_message("and soup?")
    with pytest.raises(ModelError, match="has no chat template"):
        encode_one(TWO_TURNS, tokenizer)


def test_without_a_chat_template_turns_begin_with_nobodys_name():
    messages = (
        {"role": "user", "content": "Are you coming?"},
        {"role": "assistant", "author": "Anna", "content": "Yes,\nat eight."},
    )
    text, spans = render_plain(messages)
    assert text == "Them: Are you coming?\n\nMe: Yes,\nat eight."
    assert [text[begin:end] for begin, end in spans] == [" Yes,\nat eight."]
    assert render_plain(({"role": "user", "content": ""}, messages[1]))[0] == "Me: Yes,\nat eight."
