"""What a user gave, ready to train on: examples, what was left out, and the figures for the report."""

from dataclasses import dataclass

from sebp_edge.recipe import Recipe
from sebp_edge.texts.documents import Conversation, LeftOut, as_learnt
from sebp_edge.texts.examples import Example, encode
from sebp_edge.texts.readers import Reading
from sebp_edge.texts.splits import MIN_DOCUMENTS


@dataclass(frozen=True)
class Dataset:
    """Examples of at most `context_length` tokens, and where they come from.

    Attributes:
        documents: how many documents gave examples.
        left_out: what was not used, and why.
        chat: whether more than half of these documents were put into the chat template.
    """

    examples: list[Example]
    context_length: int
    documents: int
    left_out: list[LeftOut]
    chat: bool = False

    @property
    def tokens(self) -> int:
        """Real tokens of all examples."""
        return sum(len(example.input_ids) for example in self.examples)

    @property
    def padding_share(self) -> float:
        """Share of padding in examples padded to the context length."""
        return 1 - self.tokens / max(1, len(self.examples) * self.context_length)


def make_dataset(reading: Reading, tokenizer, recipe: Recipe, model_limit: int | None) -> Dataset:
    """Encodes what was read.

    Args:
        reading: the documents.
        tokenizer: the base model's.
        recipe: for its context length and its use of the chat template.
        model_limit: the longest sequence the model knows; None if it has no limit.
    """
    context_length = min(recipe.context_length, model_limit or recipe.context_length)
    examples, left_out = encode(reading.documents, tokenizer, context_length, chat_template=recipe.chat_template)
    used = sorted({example.document for example in examples})
    chats = [as_learnt(reading.documents[number].content, chat_template=recipe.chat_template) for number in used]
    chat = 2 * sum(isinstance(content, Conversation) for content in chats) > len(used)
    if 0 < len(used) < MIN_DOCUMENTS:
        examples = _as_sections(reading, tokenizer, recipe, context_length, examples)
    return Dataset(examples, context_length, len(used), reading.left_out + left_out, chat)


def _as_sections(reading, tokenizer, recipe, context_length, examples) -> list[Example]:
    """Cuts a few long documents into sections that can be split like documents: a dozen if there is text enough.

    What is learnt decides, not a prompt, and a conversation may be cut badly: so smaller sections are tried as well.
    """
    section = min(context_length, max(32, sum(example.num_loss_tokens for example in examples) // (2 * MIN_DOCUMENTS)))
    sections = examples
    if section < context_length:
        sections, _ = encode(reading.documents, tokenizer, section, chat_template=recipe.chat_template)
    while len(sections) < MIN_DOCUMENTS and section > 16:
        section //= 2
        sections, _ = encode(reading.documents, tokenizer, section, chat_template=recipe.chat_template)
    return [Example(part.input_ids, part.labels, number) for number, part in enumerate(sections)]
