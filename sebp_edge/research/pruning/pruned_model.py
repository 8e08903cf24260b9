"""Full fine-tuning with N:M sparsity, as the recipe's table `[sparsity]` asks for it."""

from pathlib import Path

from sebp_edge.models import adaptation
from sebp_edge.models.adaptation import Adaptation
from sebp_edge.models.compressed import COMPRESSED, write_compressed
from sebp_edge.models.full import FullWeights, saved_tensors
from sebp_edge.models.loading import BaseModel
from sebp_edge.recipe import Pattern, PruningRecipe, Recipe
from sebp_edge.research.pruning.pruning import Pruning


def attach(base: BaseModel, recipe: Recipe, seed: int) -> Adaptation:
    """Attaches the fresh weights that a recipe trains, N:M sparsity included; see `adaptation.attach`."""
    if recipe.sparsity is not None:
        return PrunedModel(base, recipe.sparsity)
    return adaptation.attach(base, recipe, seed)


class PrunedModel(FullWeights):
    """All weights of the base model, trainable; a training prunes some, and these are saved compressed."""

    def __init__(self, base: BaseModel, sparsity: PruningRecipe):
        super().__init__(base)
        self._sparsity = sparsity
        base.model.requires_grad_(True)

    def training_hook(self) -> Pruning:
        """Returns the pruning of one training."""
        return Pruning(self.model, self._sparsity)

    def _write_weights(self, folder: Path) -> None:
        write_compressed(folder / COMPRESSED, dict(saved_tensors(self.model)), Pattern.parse(self._sparsity.pattern))
