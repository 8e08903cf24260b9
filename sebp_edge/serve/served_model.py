"""The model that answers while another copy of it is trained: two module trees with one set of weights.

A training of an adapter leaves the base model's weights as they are, and changes the code of its modules. The copy has
modules of its own, so it computes what it would without the training, bit for bit, with any adapter on it.
"""

import copy
from dataclasses import replace
from itertools import chain

from sebp_edge.engine.models.loading import BaseModel
from sebp_edge.engine.models.row_cache import bytes_per_token
from sebp_edge.events import Sink
from sebp_edge.recipe import Recipe
from sebp_edge.run.model_in_use import ModelInUse


def twin(base: BaseModel) -> BaseModel:
    """Returns a base model with modules of its own and the weights of `base`, which must have no adapter."""
    shared = {id(tensor): tensor for tensor in chain(base.model.parameters(), base.model.buffers())}
    return replace(base, model=copy.deepcopy(base.model, shared))


def has_room(base: BaseModel, budget: int | None, used: int, characters: int, new_tokens: int) -> bool:
    """Whether the keys and values of an answer fit into a memory budget, beside the `used` bytes.

    A copy of the modules takes none to speak of: 0.8 MB for SmolLM2-135M.

    Args:
        characters: the prompt's as JSON; counted as two to a token, where English has about four.
    """
    tokens = characters // 2 + new_tokens
    tokens = min(tokens, getattr(base.model.config, "max_position_embeddings", None) or tokens)
    return budget is None or used + tokens * bytes_per_token(base.model) <= budget


class TrainedModel(ModelInUse):
    """The model of a job, which lends its weights to the model that answers.

    Attributes:
        can_lend: whether the job leaves the weights as they are.
        is_loading: whether another thread loads them now.
    """

    def __init__(self, own: ModelInUse, served: ModelInUse):
        super().__init__(own.reference, own.recipe, own.device)
        self._served, self.can_lend, self.is_loading = served, True, False
        if served.base is not None:
            served.detach_adapter()
            self.base = twin(served.base)

    def load(self, on_event: Sink, recipe: Recipe | None = None, **options) -> BaseModel:
        """Loads the model; see `ModelInUse.load`. The model that answers has its weights from then on, or none."""
        self.is_loading = True
        try:
            base = super().load(on_event, recipe, **options)
        finally:
            self.is_loading = False
        if recipe is not None:
            self.can_lend = recipe.method == "lora"
        if not self.can_lend:
            self._served.release()
        elif self._served.base is None:
            self._served.base = twin(base)
        return base

    def release(self) -> None:
        """Frees the memory of both, until a training loads it again."""
        super().release()
        self._served.release()
        self.can_lend = False
