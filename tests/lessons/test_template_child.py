"""A stranger's chat template renders as in transformers, in a process within limits; a harmful one is refused."""

import ast
import copy
import gc
import json
import multiprocessing.spawn
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jinja2
import psutil
import pytest
from builders import make_tokenizer
from chat_templates import GEMMA, LLAMA_3, QWEN_3, SMOLLM_2
from pace import at_most
from served import SECONDS
from small_tokenizer import CHAT_TEMPLATE

from sebp_edge.cli import frozen
from sebp_edge.errors import ModelError, TextsError
from sebp_edge.lessons import template_child, templates
from sebp_edge.lessons.conversations import render_end_of_turn, render_prompt
from sebp_edge.lessons.examples import encode
from sebp_edge.lessons.prompts import encode_prompt
from sebp_edge.lessons.template_child import Renderer, TemplateRefuses
from sebp_edge.values.documents import Conversation, Document
from sebp_edge.values.model_reference import BUNDLED_FOLDER

ENDLESS = "{% for i in range(10 ** 5) %}{% for j in range(10 ** 5) %}{% endfor %}{% endfor %}"
SIMPLE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": ' Größe? <b> & "x"\n '},
    {"role": "assistant", "content": "5\n", "reasoning_content": "Hm.", "name": None},
    {"role": "user", "content": "And 日本?"},
]
CALL = {"type": "function", "function": {"name": "area", "arguments": {"b": 'größe "x" <', "a": 5}}}
TOOLS = [{"type": "function", "function": {"name": "area", "description": "Computes <an> area & more"}}]
# Prints all that a template may use.
EVERYTHING = """{%- set ns = namespace(first=true, n=0) %}{% set extra = dict(a=1) %}
{%- macro show(x) %}[{{ x | tojson }}{{ x | tojson(indent=2, sort_keys=true) }}]{% endmacro %}
{% if tools %}{{ show(tools) }}{% endif %}{{ documents is none }}{{ strftime_now("%Y")|length }}{{ bos_token }}
{% for m in messages %}
    {% if loop.index0 > 8 %}{% break %}{% endif %}
    {% set ns.n = ns.n + 1 %}
    {{ show(m) }} {{ m.thinking }} {{ m.reasoning_content is defined }} {{ 'name' in m }}
    {%- if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% endif %}
{% endfor %}{{ ns.n }}{{ extra }}{{ messages[::-1] | map(attribute='role') | join(',') }}{{ undefined_name }}
{% if add_generation_prompt %}<assistant>{% endif %}
"""


# A conversation without messages, as a child is asked to render it.
NOTHING = {"messages": [], "tools": [], "variables": {}, "cuts": [[0, False]]}


def sent(*requests) -> bytes:
    """What a child reads: a template, and then conversations."""
    return b"".join(b"%d\n%s" % (len(one), one) for one in (json.dumps(each).encode() for each in requests))


def render(source: str, messages=CHAT, tools=(), prompt: bool = False, **variables) -> str:
    [rendering] = Renderer(source).render(messages, tools, variables, [(len(messages), prompt)])
    return rendering.text


@pytest.mark.parametrize("source", [SIMPLE, EVERYTHING, LLAMA_3, SMOLLM_2, QWEN_3, GEMMA, CHAT_TEMPLATE])
def test_renders_as_transformers_does(source):
    tokenizer, renderer = make_tokenizer(), Renderer(source)
    with_calls = [
        CHAT[1],
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "15"},
    ]
    for messages, tools in ((CHAT, ()), (CHAT[1:3], ()), (with_calls, TOOLS), ([CHAT[2]], ())):
        for prompt in (False, True):
            options = {"tokenize": False, "add_generation_prompt": prompt, "chat_template": source}
            try:
                expected = tokenizer.apply_chat_template(copy.deepcopy(messages), tools=list(tools) or None, **options)
            except jinja2.exceptions.TemplateError:
                expected = None
            try:
                cuts = [(len(messages), prompt)]
                [(found, _)] = renderer.render(messages, tools, tokenizer.special_tokens_map, cuts)
            except TemplateRefuses:
                found = None
            assert found == expected


def test_marks_are_spans_of_the_text_and_unsound_ones_are_none():
    marked = "{% for m in messages %}-{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    [(text, spans)] = Renderer(marked).render(CHAT[1:3], (), {}, [(2, False)])
    assert [text[begin:end] for begin, end in spans] == [message["content"] for message in CHAT[1:3]]
    # What a macro marks is rendered before it has a place.
    within = (
        "{% macro a(m) %}..{% generation %}{{ m }}{% endgeneration %}{% endmacro %}{% set x = a('yes') %}abc{{ x }}"
    )
    [(text, spans)] = Renderer(within).render(CHAT, (), {}, [(4, False)])
    assert (text, spans) == ("abc..yes", None)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 1 / 0 }}",
        "{{ messages.content.missing }}",
        "{{ messages | sum }}",
        "{{ raise_exception(messages[1].content) }}",
        "{% if %}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ namespace(__x=1) }}",
        "{{ '\\ud800' }}",
        "{{ 'a' * 10 ** 10 }}",
        "{{ messages | tojson(indent=10 ** 8) }}",
        "{% for i in range(10 ** 5) %}{{ 'a' * 1000 }}{% endfor %}",
        "{% set ns = namespace(a=[1]) %}{% for i in range(90) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
    ],
)
def test_a_template_that_fails_is_refused(source):
    with pytest.raises(TemplateRefuses, match=r"^(refuses|takes too much time or memory for)$"):
        render(source)


@pytest.fixture
def in_a_frozen_app(monkeypatch):
    monkeypatch.setattr(sys, "frozen", True, raising=False)


@pytest.mark.slow
def test_a_template_that_does_not_end_is_ended_and_gets_few_chances():
    renderer = Renderer(ENDLESS, seconds=0.3)
    for _ in range(template_child.MAX_EXCEEDED):
        with pytest.raises(TemplateRefuses, match="takes too much time"):
            renderer.render(CHAT, (), {}, [(4, False)])
        assert not renderer._process.is_running
    with at_most(1):
        for _ in range(100):
            with pytest.raises(TemplateRefuses, match="takes too much time"):
                renderer.render(CHAT, (), {}, [(4, False)])


def test_one_child_renders_many_conversations_and_ends_with_its_renderer():
    renderer = Renderer(SIMPLE)
    renderer.render(CHAT, (), {}, [(4, False)])
    child = psutil.Process(renderer._process._child.pid)

    def render_some(renderer: Renderer) -> None:
        for _ in range(20):
            renderer.render(CHAT, (), {}, [(4, False)])

    threads = [threading.Thread(target=render_some, args=(renderer,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert renderer._process._child.pid == child.pid
    del renderer, threads
    gc.collect()
    assert not psutil.pid_exists(child.pid)


@pytest.mark.slow
def test_a_child_that_has_ended_is_started_again():
    renderer = Renderer(SIMPLE)
    first = renderer.render(CHAT, (), {}, [(4, False)])
    os.kill(renderer._process._child.pid, signal.SIGTERM)
    assert renderer.render(CHAT, (), {}, [(4, False)]) == first
    assert copy.deepcopy(renderer).render(CHAT, (), {}, [(4, False)]) == first


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no sessions")
def test_signals_of_the_terminal_do_not_reach_the_child_and_stop_a_rendering():
    renderer = Renderer(ENDLESS, seconds=300)

    def interrupt():
        while renderer._process is None:  # until it has taken the template
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        renderer.render(CHAT, (), {}, [(4, False)])
    thread.join()
    assert not renderer._process.is_running
    renderer = Renderer(SIMPLE)
    renderer.render(CHAT, (), {}, [(4, False)])
    assert os.getsid(renderer._process._child.pid) != os.getsid(0)


@pytest.mark.parametrize("is_idle", [True, False])
def test_a_child_whose_parent_does_not_end_it_ends(is_idle):
    """A killed parent does not, and neither does one that has nothing to render for a while."""
    code = "from sebp_edge.lessons import templates; templates.IDLE_SECONDS = 0.3; templates.serve()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as child:
        child.stdin.write(sent(ENDLESS) if is_idle else sent(ENDLESS, NOTHING))
        child.stdin.flush()
        assert child.wait(SECONDS) == 1


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows neither forks nor gives orphans another parent")
def test_a_fork_renders_in_a_process_of_its_own_whatever_other_threads_do():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = SIMPLE
    render_prompt(CHAT[1:2], tokenizer)
    [renderer] = tokenizer.sebp_edge_renderers.values()
    with renderer._lock:  # as if another thread rendered
        pid = os.fork()
        if pid == 0:
            signal.alarm(SECONDS)
            os._exit(0 if "Be brief." in render_prompt(CHAT[:2], tokenizer) else 1)
        assert os.waitpid(pid, 0)[1] == 0
    assert renderer._process.is_running


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows gives orphans no other parent")
def test_a_rendering_ends_soon_after_its_parent_was_killed():
    code = "import subprocess, sys; child = subprocess.Popen([sys.executable, sys.argv[1]], stdin=subprocess.PIPE, "
    code += "stdout=subprocess.PIPE); child.stdin.write(sys.stdin.buffer.read()); child.stdin.flush(); "
    code += "child.stdout.readline(); print(child.pid, flush=True); child.wait()"
    command = [sys.executable, "-c", code, templates.__file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        parent.stdin.write(sent(ENDLESS, NOTHING))
        parent.stdin.close()
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    _, alive = psutil.wait_procs([child], timeout=10)
    assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]


def test_the_child_imports_only_jinja2():
    """It would start slowly otherwise."""
    tree = ast.parse(Path(templates.__file__).read_text(encoding="utf-8"))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in imported} <= sys.stdlib_module_names | {"jinja2"}


def test_only_the_bundled_template_is_rendered_in_this_process():
    bundled = Renderer((BUNDLED_FOLDER / "chat_template.jinja").read_text(encoding="utf-8"))
    [(text, spans)] = bundled.render(CHAT[1:3], (), {"bos_token": "<s>"}, [(2, True)])
    assert bundled._process is None
    assert text.startswith("<s><|user|>") and len(spans) == 1
    other = Renderer(bundled.source + " ")
    other.render(CHAT[1:3], (), {"bos_token": "<s>"}, [(2, True)])
    assert other._process is not None


@pytest.fixture
def set_python():
    before = multiprocessing.spawn.get_executable()
    yield multiprocessing.set_executable
    multiprocessing.set_executable(before)


def test_a_python_that_is_none_is_one_sentence(set_python, request):
    set_python("/nowhere/python")
    with pytest.raises(ModelError, match="cannot be started: No such file or directory"):
        render(SIMPLE)
    set_python("/bin/cat")
    with pytest.raises(ModelError, match="'/bin/cat' must be Python"):
        render(SIMPLE)
    request.getfixturevalue("in_a_frozen_app")
    with pytest.raises(ModelError, match="this frozen app cannot start"):
        render(SIMPLE)


@pytest.mark.usefixtures("in_a_frozen_app")
def test_a_frozen_app_is_the_child_before_it_is_the_app(monkeypatch):
    """PyInstaller runs this hook of the package before the app."""
    folder = Path(frozen.__file__).parent
    assert ast.literal_eval((folder / "rthooks.dat").read_text()) == {"sebp_edge": ["pyi_rth_sebp_edge.py"]}
    hook = folder / "rthooks" / "pyi_rth_sebp_edge.py"
    monkeypatch.setattr(sys, "_MEIPASS", "", raising=False)
    _, *arguments = template_child._command()
    asked = sent(SIMPLE, NOTHING | {"messages": CHAT, "cuts": [[4, False]]})
    done = subprocess.run([sys.executable, hook, *arguments], input=asked, capture_output=True, check=True)
    ready, answer = map(json.loads, done.stdout.splitlines())
    assert ready is True
    assert answer[0][0].startswith("<system>Be brief.<user>")
    assert subprocess.run([sys.executable, hook], capture_output=True, check=True).stdout == b""


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{{ messages | tojson(indent=10 ** 8) }}"])
def test_a_hostile_template_ends_neither_a_training_nor_a_generation(template):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    examples, [item] = encode([Document("chat", Conversation(tuple(CHAT[1:3])))], tokenizer, 64)
    assert not examples
    assert item.reason == "the model's chat template refuses a conversation of user, assistant"
    with pytest.raises(TextsError, match="it refuses these messages") as caught:
        encode_prompt("Größe?", tokenizer, chat=True)
    assert "Größe" not in str(caught.value)
    assert render_end_of_turn(tokenizer) == ""
    tokenizer.chat_template = [1, 2]
    with pytest.raises(ModelError, match="is not a text"):
        encode_prompt("Größe?", tokenizer, chat=True)
