"""Makes the dataset of a user's texts: its examples, what was left out, and the figures for the report."""

from dataclasses import dataclass

from sebp_edge.recipe import Recipe
from sebp_edge.texts.documents import Conversation, LeftOut, as_chat
from sebp_edge.texts.examples import Example, encode
from sebp_edge.texts.readers import Reading
from sebp_edge.texts.splits import MIN_DOCUMENTS


@dataclass(frozen=True)
class Dataset:
    """Examples of at most `context_length` tokens.

    Attributes:
        num_documents: the number of documents that the examples come from.
        left_out: what was not used, and why.
        is_chat: whether the chat template rendered more than half of these documents.
    """

    examples: list[Example]
    context_length: int
    num_documents: int
    left_out: list[LeftOut]
    is_chat: bool = False

    @property
    def num_tokens(self) -> int:
        """The number of tokens in all examples, without padding."""
        return sum(len(example.input_ids) for example in self.examples)

    @property
    def padding_share(self) -> float:
        """The share of padding if all examples are padded to the context length."""
        return 1 - self.num_tokens / max(1, len(self.examples) * self.context_length)


def make_dataset(reading: Reading, tokenizer, recipe: Recipe, model_limit: int | None) -> Dataset:
    """Encodes documents as examples.

    Args:
        reading: the documents.
        tokenizer: the base model's tokenizer.
        recipe: sets the context length and whether to use the chat template.
        model_limit: the maximum sequence length that the model supports; None if it has no limit.

    Raises:
        ModelError: see `encode`.
    """
    context_length = min(recipe.context_length, model_limit or recipe.context_length)
    examples, left_out = encode(reading.documents, tokenizer, context_length, chat_template=recipe.chat_template)
    used = sorted({example.document for example in examples})
    chats = [as_chat(reading.documents[number].content, chat_template=recipe.chat_template) for number in used]
    is_chat = 2 * sum(isinstance(content, Conversation) for content in chats) > len(used)
    if 0 < len(used) < MIN_DOCUMENTS:
        examples = _cut_into_sections(reading, tokenizer, recipe, context_length, examples)
    return Dataset(examples, context_length, len(used), reading.left_out + left_out, is_chat)


def _cut_into_sections(reading, tokenizer, recipe, context_length, examples) -> list[Example]:
    """Cuts a few documents into sections, which are split like documents: about a dozen if there is enough text.

    The section length is estimated from the number of loss tokens, and halved as long as there are too few sections,
    which can happen with long prompts and with conversations.
    """
    section = min(context_length, max(32, sum(example.num_loss_tokens for example in examples) // (2 * MIN_DOCUMENTS)))
    sections = examples
    if section < context_length:
        sections, _ = encode(reading.documents, tokenizer, section, chat_template=recipe.chat_template)
    while len(sections) < MIN_DOCUMENTS and section > 16:
        section //= 2
        sections, _ = encode(reading.documents, tokenizer, section, chat_template=recipe.chat_template)
    return [Example(part.input_ids, part.labels, number) for number, part in enumerate(sections)]
