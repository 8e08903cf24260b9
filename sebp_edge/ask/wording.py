"""Words questions as a conversation with the model, or in a plain format if the model has no chat template."""

from collections.abc import Iterable, Sequence

from sebp_edge.ask.passages import Passage
from sebp_edge.lessons.prompts import EncodedPrompt, encode_prompt, end_of_turn
from sebp_edge.values.documents import Content, Conversation, PromptCompletion


def shown(passages: Iterable[Passage]) -> str:
    """Returns passages as they stand before a question, each below its place."""
    return "\n\n".join(passage.shown for passage in passages)


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
        return PromptCompletion(_plain_turns(before) + plain_question(last), f" {answer}")
    return Conversation(tuple(_messages(turns)))


def prompt_for(
    question: str, tokenizer, document: str | None = None, before: Sequence[tuple[str, str]] = ()
) -> EncodedPrompt:
    """Returns the tokens of a question without its answer, as in `with_answers`.

    Args:
        before: questions and answers that come before it.
    """
    asked = _after(document, question)
    if not tokenizer.chat_template:
        return encode_prompt(_plain_turns(before) + plain_question(asked), tokenizer, chat=False)
    return encode_prompt([*_messages(before), {"role": "user", "content": asked}], tokenizer, chat=True)


def plain_question(question: str) -> str:
    """Returns a question in the plain format, up to where its answer begins."""
    return f"Question: {question}\nAnswer:"


def end_ids(tokenizer) -> list[int]:
    """Returns the tokens that end an answer."""
    ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return ends + end_of_turn(tokenizer)


def _after(document: str | None, question: str) -> str:
    return question if document is None else f"{document}\n\n{question}"


def _messages(turns: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    return [
        {"role": role, "content": content}
        for turn in turns
        for role, content in zip(("user", "assistant"), turn, strict=True)
    ]


def _plain_turns(turns: Sequence[tuple[str, str]]) -> str:
    return "".join(f"{plain_question(asked)} {answer}\n\n" for asked, answer in turns)
