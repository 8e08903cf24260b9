"""Words questions as a conversation with the model, or in a plain format if the model has no chat template."""

from collections.abc import Sequence

from sebp_edge.texts.documents import Completion, Content, Conversation
from sebp_edge.texts.prompts import EncodedPrompt, encode_prompt, end_of_turn


def with_answers(pairs: Sequence[tuple[str, str]], tokenizer, document: str | None = None) -> Content:
    """Returns what is trained on: questions with their answers, after their document if given.

    Args:
        pairs: questions and their answers; the turns of one conversation. In the plain format only the last answer has
            loss.
    """
    (first, answer), *others = pairs
    turns = [(_after(document, first), answer), *others]
    if not tokenizer.chat_template:
        *before, (last, answer) = turns
        return Completion("".join(f"{_plain(q)} {a}\n\n" for q, a in before) + _plain(last), f" {answer}")
    messages = [
        {"role": role, "content": content}
        for turn in turns
        for role, content in zip(("user", "assistant"), turn, strict=True)
    ]
    return Conversation(tuple(messages))


def prompt_for(question: str, tokenizer, document: str | None = None) -> EncodedPrompt:
    """Returns the tokens of a question without its answer, as in `with_answers`.

    Raises:
        TextsError: the template refuses the question, or it contains a control token.
    """
    asked = _after(document, question)
    if not tokenizer.chat_template:
        return encode_prompt(_plain(asked), tokenizer, chat=False)
    return encode_prompt([{"role": "user", "content": asked}], tokenizer, chat=True)


def end_ids(tokenizer) -> list[int]:
    """Returns the tokens that end an answer."""
    ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return ends + (end_of_turn(tokenizer) if tokenizer.chat_template else [])


def _after(document: str | None, question: str) -> str:
    return question if document is None else f"{document}\n\n{question}"


def _plain(asked: str) -> str:
    return f"Question: {asked}\nAnswer:"
