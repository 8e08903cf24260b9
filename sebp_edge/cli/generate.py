"""`sebp-edge generate PROMPT`: generates text with an adapter."""

import json
import re
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperCommand

from sebp_edge.cli.base_model import choose_model, personalizer_class
from sebp_edge.cli.console import one_sentence_errors, out, print_chunk, print_json, print_note
from sebp_edge.cli.options import AdapterModel, Device, Json, Threads, Version, name_option, path_option
from sebp_edge.errors import Interrupted, OptionError, TextsError
from sebp_edge.machine.politeness import Politeness

DEMONSTRATOR = "'tiny' is a demonstrator: it writes sentences, not sense; for real use, adapt another --model."
# A prompt such as a Markdown list or front matter; options have no space before "=".
_BEGINS_WITH_DASH = re.compile(r"-[^=]*\s|---")


class PromptCommand(TyperCommand):
    """A command that also accepts a prompt that begins with a dash."""

    def parse_args(self, ctx, args: list[str]) -> list[str]:
        if "--" in args:
            return super().parse_args(ctx, args)
        options, texts = [], []
        for before, argument in zip(["", *args], args, strict=False):
            is_text = _BEGINS_WITH_DASH.match(argument) and not self._takes_value(ctx, before)
            (texts if is_text else options).append(argument)
        return super().parse_args(ctx, [*options, "--", *texts] if texts else args)

    def _takes_value(self, ctx, name: str) -> bool:
        options = (parameter for parameter in self.get_params(ctx) if parameter.param_type_name == "option")
        return any(name in option.opts and not option.is_flag for option in options)


def generate(
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="Text to continue, or a question for a chat adapter.")
    ] = None,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="System prompt; PROMPT is then a user message.")
    ] = None,
    messages: Annotated[
        str | None, typer.Option(metavar="FILE", help="Chat to answer, as a JSON list; - reads standard input.")
    ] = None,
    name: Annotated[
        str | None, name_option("Name of the adapter; without --model, by default 'default' if it exists.")
    ] = None,
    version: Version = None,
    adapter: Annotated[Path | None, path_option("Folder of an adapter outside the store.", "FOLDER")] = None,
    model: AdapterModel = None,
    load_in_4bit: Annotated[
        bool | None, typer.Option("--4bit/--no-4bit", help="Load the model in 4 bits; by default as in training.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of new tokens.")] = 120,
    temperature: Annotated[float, typer.Option(min=0, help="0 always takes the likeliest token.")] = 0.7,
    top_p: Annotated[float, typer.Option(min=0.01, max=1, help="Sample from this share of the probability.")] = 0.9,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample from the k likeliest tokens.")] = None,
    repetition_penalty: Annotated[
        float, typer.Option(min=0.1, max=10, help="Above 1 makes tokens that already occurred less likely.")
    ] = 1.0,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Stop before this text; can be repeated.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed; by default a new one each time.")] = None,
    device: Device = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Generate text with an adapter: continue PROMPT, or answer a chat."""
    with one_sentence_errors(as_json=as_json, takes_time=True):
        request = _prompt_or_messages(prompt, system, messages)
        if adapter is not None and (name is not None or version is not None):
            raise OptionError("--adapter already names a folder; leave out --name and --version.")
        wanted = adapter or name or ("default" if version is not None else None)
        settings, chosen = choose_model(wanted, version, model, load_in_4bit)
        make = personalizer_class(settings["model"])
        personalizer = make(**settings, device=device, politeness=Politeness.of(threads=threads))
        # A text is continued, so it is a part of what is written; a question of a chat is not.
        is_continued = chosen is None or personalizer.store.find(chosen, version).record.prompts == "text"
        begin = [partial(out.print, request, end="", style="bold", markup=False)] * (is_continued and prompt is request)
        if personalizer.reference.kind == "bundled":
            begin.insert(0, partial(print_note, DEMONSTRATOR))

        def show(chunk: str) -> None:
            while begin and not as_json:
                begin.pop(0)()
            print_chunk(chunk, as_json=as_json)

        try:
            text = personalizer.generate(
                request,
                adapter=chosen,
                version=version,
                max_new_tokens=max_tokens,
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                repetition_penalty=repetition_penalty,
                stop=stop or (),
                seed=seed,
                on_text=show,
            )
        except Interrupted:
            if not as_json:
                typer.echo()
            raise
        if as_json:
            print_json({"event": "result", "result_of": "generate", "prompt": request, "text": text})
        else:
            show("\n")


def _prompt_or_messages(prompt: str | None, system: str | None, messages: str | None) -> str | list:
    """Returns the prompt or the messages for `Personalizer.generate`."""
    if messages is not None:
        if prompt is not None or system is not None:
            raise OptionError("--messages is the whole chat; leave out PROMPT and --system.")
        return _read_messages(messages)
    if prompt is None:
        raise OptionError("No prompt was given; give PROMPT, or a chat with --messages.")
    if system is None:
        return prompt
    return [{"role": "system", "content": system}, {"role": "user", "content": prompt}]


def _read_messages(file: str) -> list:
    name = "standard input" if file == "-" else f"file {file!r}"
    try:
        found = json.loads(sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes())
    except OSError as error:
        raise TextsError(f"The {name} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list):
        raise TextsError(f'The {name} must be a JSON list of messages: [{{"role": "user", "content": "..."}}].')
    return found
