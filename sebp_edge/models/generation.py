"""Text out."""

from collections.abc import Callable

import torch
from torch import nn
from transformers import TextStreamer

from sebp_edge.errors import ModelError
from sebp_edge.models.loading import padding_of, refuse_unknown_tokens


class _Pieces(TextStreamer):
    """Hands each finished piece of text to a function, as soon as it cannot change any more."""

    def __init__(self, tokenizer, on_text: Callable[[str], None]):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._on_text = on_text

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._on_text(text)


def generate_text(
    model: nn.Module,
    tokenizer,
    prompt: str,
    *,
    chat: bool,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int | None,
    on_text: Callable[[str], None] | None,
) -> str:
    """Continues `prompt`, or answers it where the model was trained on chats.

    Args:
        chat: put the prompt into the chat template, if there is one, as a user's message.
        temperature: 0 takes the likeliest token each time.
        seed: makes the text repeatable; the process's random state is left as it was.
        on_text: is given the new text piece by piece, as it is written.

    Raises:
        ModelError: the prompt leaves no room in the model's context, or has tokens that the model does not know.
    """
    encoding = _encode(tokenizer, prompt, chat).to(model.device)
    length = encoding["input_ids"].shape[1]
    limit = getattr(model.config, "max_position_embeddings", None) or length + max_new_tokens
    if length == 0 or length >= limit:
        raise ModelError(f"The prompt has {length} tokens; this model takes 1 to {limit - 1}, so give another.")
    refuse_unknown_tokens(model, encoding["input_ids"][0].tolist())
    sampling = {"do_sample": True, "temperature": float(temperature), "top_p": float(top_p), "top_k": 0}
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []), torch.no_grad():
        if seed is not None:
            torch.manual_seed(seed)
        else:
            torch.seed()
        output = model.generate(
            **encoding,
            **(sampling if temperature > 0 else {"do_sample": False}),
            max_new_tokens=min(max_new_tokens, limit - length),
            pad_token_id=padding_of(tokenizer, model),
            streamer=_Pieces(tokenizer, on_text) if on_text else None,
        )
    return tokenizer.decode(output[0, length:], skip_special_tokens=True)


def _encode(tokenizer, prompt: str, chat: bool):
    if not (chat and tokenizer.chat_template):
        return tokenizer(prompt, return_tensors="pt", split_special_tokens=True)
    message = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True)
