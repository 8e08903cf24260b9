"""`sebp-edge generate PROMPT`: generates text with an adapter."""

import json
import re
import sys
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperCommand

from sebp_edge.cli.console import err, one_sentence_errors, out, parse_path, print_json, quick_imports
from sebp_edge.errors import Interrupted, ModelError, ModelOfflineError, OptionError, TextsError

# A prompt such as a Markdown list or front matter; an option has no space before its "=".
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
        str | None, typer.Argument(metavar="PROMPT", help="The first words, or a question to a chat adapter.")
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="A system prompt: PROMPT is then a chat.")] = None,
    messages: Annotated[
        str | None, typer.Option(metavar="FILE", help="A chat to answer, a JSON list; - is the standard input.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="The adapter; without --model 'default', if there is one.")] = None,
    version: Annotated[int | None, typer.Option(help="Of the adapter; by default the active one.")] = None,
    adapter: Annotated[
        Path | None, typer.Option(parser=parse_path, metavar="FOLDER", help="The folder of an adapter saved elsewhere.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The base model; by default the adapter's.")] = None,
    load_in_4bit: Annotated[
        bool | None, typer.Option("--4bit/--no-4bit", help="Load it in 4 bits; by default as the adapter was trained.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="The most tokens to write.")] = 120,
    temperature: Annotated[float, typer.Option(min=0, help="0 always takes the likeliest token.")] = 0.7,
    top_p: Annotated[float, typer.Option(min=0.01, max=1, help="Share of probability to draw from.")] = 0.9,
    top_k: Annotated[int | None, typer.Option(min=1, help="Draw from so many of the likeliest tokens.")] = None,
    repetition_penalty: Annotated[
        float, typer.Option(min=0.1, max=10, help="Above 1, what was written becomes less likely.")
    ] = 1.0,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Ends before this; may be given several times.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Makes the text repeatable.")] = None,
    device: Annotated[str | None, typer.Option(help="cuda, mps or cpu.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line, for each piece of text.")] = False,
) -> None:
    """Continue PROMPT in the voice that was learnt."""
    with one_sentence_errors(as_json=as_json):
        request = _prompt_or_messages(prompt, system, messages)
        with quick_imports():
            from sebp_edge.adapters.store import AdapterStore
            from sebp_edge.models.catalog import DEFAULT_MODEL
            from sebp_edge.personalizer import Personalizer
            from sebp_edge.recipe import Recipe

        if adapter is not None and (name is not None or version is not None):
            raise OptionError("--adapter names a folder by itself; leave out --name and --version.")
        store = AdapterStore()
        chosen = adapter or name or ("default" if version is not None else None)
        if chosen is None and model is None and store.active_version("default") is not None:
            chosen = "default"
        if chosen is None and model is None:
            err.print(f"No adapter 'default' is active, so this is the base model {DEFAULT_MODEL!r}.", style="dim")
        record = store.find(chosen, version)[1] if chosen else None
        base = model or (_find_base_model(record) if record else DEFAULT_MODEL)
        trained_in_4bit = record is not None and record.recipe.get("load_in_4bit", False)
        precision = {"load_in_4bit": trained_in_4bit if load_in_4bit is None else load_in_4bit}
        personalizer = Personalizer(base, recipe=Recipe.load("notes").replace(**precision), store=store, device=device)
        if not as_json and isinstance(request, str) and out.is_terminal:
            out.print(request, end="", style="bold", markup=False)
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
                on_text=_print_event if as_json else lambda piece: typer.echo(piece, nl=False),
            )
        except Interrupted:
            if not as_json:
                typer.echo()
            raise
        if as_json:
            print_json({"event": "result", "prompt": request, "text": text})
        else:
            typer.echo()


def _print_event(piece: str) -> None:
    print_json({"event": "text", "text": piece})


def _prompt_or_messages(prompt: str | None, system: str | None, messages: str | None) -> str | list:
    """The prompt or the chat for `Personalizer.generate`."""
    if messages is not None:
        if prompt is not None or system is not None:
            raise OptionError("--messages is a whole chat; leave out PROMPT and --system.")
        return _read_messages(messages)
    if prompt is None:
        raise OptionError("There is no prompt; give PROMPT, or a chat with --messages.")
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


def _find_base_model(record) -> str:
    """The name of an adapter's base model; refuses to download it, because others may have written the record."""
    from sebp_edge.models.catalog import resolve
    from sebp_edge.models.hub import local_folder

    reference = resolve(record.model) if "/" in record.base_model else None
    if reference is None or reference.kind == "local":
        # For a model in a folder of the user's, adapters record the folder's name, never its path.
        raise ModelError(
            f"The adapter was made for the model in a folder {record.base_model!r}; give that folder with --model."
        )
    if local_folder(reference) is None:
        raise ModelOfflineError(
            f"The adapter was made for {record.model!r}, which is not on this machine; to download it, pass "
            f"--model {record.model}."
        )
    return record.model
