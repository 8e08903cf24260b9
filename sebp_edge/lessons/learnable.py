"""Refuses examples that teach a model nothing, or something that spoils what it generates."""

from collections import Counter

from sebp_edge.errors import ModelError, TextsError
from sebp_edge.lessons.prompts import end_of_turn
from sebp_edge.values.dataset import Dataset


def refuse_unlearnable(dataset: Dataset, num_read: int, tokenizer) -> None:
    """Refuses to train on the examples of a dataset.

    Args:
        num_read: the number of documents that were read, used or not.
    """
    examples = dataset.examples
    if not any(example.num_loss_tokens for example in examples):
        # Documents that gave no example come last.
        unused = () if examples else dataset.left_out[-num_read:]
        reasons = Counter(item.reason for item in unused).most_common(1)
        why = "".join(f" (for {count} of them: {reason})" for reason, count in reasons)
        raise TextsError(
            f"No token of these {num_read} documents has loss{why}, so there is nothing to train on; give texts, "
            f"or records with completions or answers{', or choose another model' if why else ''}."
        )
    start = tokenizer.bos_token_id
    if start is not None and any(list(example.input_ids[:2]) == [start, start] for example in examples):
        raise ModelError(
            "This model's tokenizer and chat template begin a text with two start tokens, which no model expects; "
            "remove one of them from the template, or choose another model."
        )
    kinds = [[example for example in examples if example.is_chat == is_chat] for is_chat in (False, True)]
    ends = set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
    for of_kind in filter(None, kinds):
        is_chat = of_kind[0].is_chat
        learnt = ends | set(end_of_turn(tokenizer)) if is_chat else ends
        if any(end in example.labels[1:] for example in of_kind for end in learnt):
            continue
        if not is_chat:
            raise ModelError(
                "This model's tokenizer has no token that ends a text, so the adapter would never learn where to stop; "
                "set eos_token in its tokenizer_config.json, or choose another model."
            )
        raise ModelError(
            "This model's chat template leaves the token that ends an answer without loss, so the adapter would never "
            "learn where to stop; choose another model, or give plain texts."
        )
