"""Generates text from a prompt's tokens."""

from collections.abc import Callable

from transformers import PreTrainedModel

from sebp_edge.engine.models.decoding import Decoder
from sebp_edge.engine.models.sampling import Sampling
from sebp_edge.engine.models.text_stream import TextStream
from sebp_edge.errors import Interrupted


def generate_text(
    model: PreTrainedModel,
    tokenizer,
    input_ids: list[int],
    end_ids: list[int],
    sampling: Sampling,
    *,
    decoder: Decoder | None = None,
    on_text: Callable[[str], None] | None = None,
    check: Callable[[], None] = lambda: None,
) -> str:
    """Continues a prompt; returns the new text.

    Args:
        input_ids: the prompt's tokens.
        end_ids: tokens that end the text, besides those of the model's generation config.
        decoder: of this model, which keeps what prompts begin with between calls.
        on_text: receives the new text in parts as it is generated; no part is empty.
        check: is called after each token; may raise to end the generation.

    Raises:
        TextsError, ModelError, NonFiniteLogits: see `Decoder.decode`.
        Interrupted: `check` or Ctrl-C raised a KeyboardInterrupt; its `text` is the text so far.
    """
    text_stream = TextStream(tokenizer, sampling.stop, on_text or (lambda text: None))
    decoder = decoder or Decoder(model)
    try:
        decoder.decode(
            [input_ids], end_ids, sampling, on_token=lambda number, token: text_stream.add(token), check=check
        )
    except KeyboardInterrupt as stop:
        text_stream.end()
        raise Interrupted("Interrupted; the text is incomplete.", text=text_stream.text) from stop
    text_stream.end()
    return text_stream.text


def answer_all(
    model: PreTrainedModel,
    tokenizer,
    prompts: list[list[int]],
    end_ids: list[int],
    max_new_tokens: int,
    check: Callable[[], None] = lambda: None,
) -> list[str]:
    """Returns the new text of each prompt, the likeliest token each time; see `Decoder.decode`."""
    replies = Decoder(model).decode(prompts, end_ids, Sampling(max_new_tokens, temperature=0), check=check)
    return [tokenizer.decode(tokens, skip_special_tokens=True).strip() for tokens in replies]
