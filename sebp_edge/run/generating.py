"""Generates text with the model in use."""

from collections.abc import Callable
from contextlib import nullcontext

from sebp_edge.models.generation import generate_text
from sebp_edge.models.sampling import Sampling
from sebp_edge.questions.asking import prompt_for
from sebp_edge.research.pruning.semi_structured import semi_structured
from sebp_edge.run.call import Call
from sebp_edge.texts.prompts import Messages, encode_prompt


def generate(
    call: Call,
    prompt: str | Messages,
    sampling: Sampling,
    on_text: Callable[[str], None] | None,
    *,
    with_adapter: bool,
    sparse_kernels: bool,
) -> str:
    """Continues a text, or answers messages; see `Personalizer.generate`.

    Args:
        with_adapter: whether to use the adapter in use.
    """
    base = call.load()
    with (
        call.in_use.generating(with_adapter=with_adapter) as (decoder, rendered_as),
        semi_structured(base.model) if sparse_kernels else nullcontext(),
    ):
        if rendered_as == "question" and isinstance(prompt, str):
            encoded = prompt_for(prompt, base.tokenizer)
        else:
            encoded = encode_prompt(prompt, base.tokenizer, chat=rendered_as == "chat")
        # A model with sparse kernels computes other bits.
        options = {"decoder": None if sparse_kernels else decoder, "on_text": on_text, "check": call.check}
        return generate_text(base.model, base.tokenizer, *encoded, sampling, **options)
