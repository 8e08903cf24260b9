"""Says what to expect of an adapted model, and what a model of its size will not do."""

from sebp_edge.models.catalog import ModelReference

# Below these numbers of parameters.
SMALL, MEDIUM = 500_000_000, 2_000_000_000


def expectation(reference: ModelReference, num_parameters: int, *, is_chat: bool) -> str:
    """Returns two sentences: what was learnt, and the limits of a model of this size.

    Args:
        is_chat: whether more than half of the documents are conversations.
    """
    return f"{_what_is_learnt(is_chat)} {_limits(reference, num_parameters)}"


def _what_is_learnt(is_chat: bool) -> str:
    if is_chat:
        return "Expect answers in the format and tone of your examples, but do not rely on the facts in them."
    return "Expect the style and vocabulary of your texts when it continues one, but do not rely on it for their facts."


def _limits(reference: ModelReference, num_parameters: int) -> str:
    if reference.kind == "bundled":
        return (
            f"The model {reference.name!r} is a demonstrator: it writes sentences, knows nothing and follows no "
            "instructions, so use a larger model for real work."
        )
    size = f"A model of this size ({_in_words(num_parameters)} parameters)"
    if num_parameters < SMALL:
        return f"{size} loses the thread after a few sentences, and does not answer questions or reason reliably."
    if num_parameters < MEDIUM:
        return f"{size} answers simple questions, but makes up facts and does not reason reliably in several steps."
    return f"{size} writes coherent pages, but still makes up names, numbers and dates; check them."


def _in_words(count: int) -> str:
    return f"{count / 1e9:.1f} billion" if count >= 1e9 else f"{count / 1e6:.0f} million"
