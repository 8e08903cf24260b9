"""Words questions as a conversation with the model, or in a plain format if the model has no chat template."""

from sebp_edge.texts.documents import Completion, Content, Conversation
from sebp_edge.texts.prompts import EncodedPrompt, encode_prompt, end_of_turn


def with_answer(question: str, answer: str, tokenizer, document: str | None = None) -> Content:
    """Returns what is trained on: a question and its answer, after its document if given."""
    asked = _after(document, question)
    if not tokenizer.chat_template:
        return Completion(_plain(asked), f" {answer}")
    return Conversation(({"role": "user", "content": asked}, {"role": "assistant", "content": answer}))


def prompt_for(question: str, tokenizer, document: str | None = None) -> EncodedPrompt:
    """Returns the tokens of a question without its answer, as in `with_answer`.

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
