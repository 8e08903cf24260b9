"""A plan: how to train within a memory budget, and what that takes. `choosing` makes it."""

from dataclasses import asdict, dataclass

from sebp_edge.engine.memory.footprint import Footprint
from sebp_edge.engine.memory.memory_options import MemoryOptions
from sebp_edge.recipe import Recipe


@dataclass(frozen=True)
class Choice:
    """One set of options for a training, with its predicted memory and time."""

    recipe: Recipe  # the recipe, with a value for everything that it leaves to the memory budget
    dtype: str  # the base model's dtype; "nf4" if its linear layers are in 4 bits
    options: MemoryOptions
    footprint: Footprint
    host_memory: int  # bytes of host memory that a training on a GPU uses in addition; 0 on the CPU
    seconds: float | None  # the estimated time of an adaptation, all of its phases included; None if unknown
    kept: str = ""  # which weights are in host memory, or are held dequantised beside 4 bits, in words
    common: str = ""  # how what texts begin with in common is computed, in words; empty if that is next to nothing
    judged: str = ""  # in how many folds it is judged, in words; empty without folds
    copying: float = 0.0  # the seconds in which a pass copies streamed weights
    num_decoded: int = 1  # how many replies are written together

    @property
    def peak(self) -> int:
        """The predicted peak, in bytes."""
        return self.footprint.total

    @property
    def description(self) -> str:
        """The options in words."""
        options = self.options
        adapter = f"LoRA of rank {self.recipe.r} on {self.dtype}" if self.recipe.method == "lora" else "all weights"
        words = [adapter, f"up to {options.max_rows:,} tokens at a time"]
        if options.checkpoints:
            plural = "s" * (options.checkpoints > 1)
            words.append(f"activations of {options.checkpoints} block{plural} recomputed")
        elif options.small_buffers:
            words.append("small buffers for logits and gradients")
        if options.offload:
            words.append("their inputs offloaded to host memory")
        if options.chunked_blocks:
            words.append("MLPs in chunks of rows")
        words += filter(None, [self.kept, self.common, self.judged])
        if options.moments_in_8_bits:
            words.append("8-bit moments")
        return ", ".join(words)

    def to_dict(self) -> dict:
        """Returns the choice as JSON-ready values."""
        recipe = {"recipe": self.recipe.name, "method": self.recipe.method, "r": self.recipe.r, "dtype": self.dtype}
        figures = {"peak": self.peak, "host_memory": self.host_memory, "seconds": self.seconds}
        # A key of the protocol stays.
        options = asdict(self.options) | {"folds_at_once": False}
        return recipe | options | figures | {"footprint": asdict(self.footprint)}


@dataclass(frozen=True)
class Plan:
    """The choice for a training, with its neighbours.

    Attributes:
        budget: the available bytes: those requested, or the free ones if they are fewer.
        requested_budget: the requested bytes, if fewer are free; else None.
        larger: the next choice for the same recipe that is faster or more precise, and needs more memory; None if there
            is none.
        smaller: the next choice that needs less memory; None if there is none.
        full: the choice for training all weights instead of an adapter within the budget; None if none fits.
        gpu: bytes of memory of the absent GPU that the plan is for; None for this machine.
    """

    model: str
    device: str
    budget: int
    requested_budget: int | None
    chosen: Choice
    larger: Choice | None
    smaller: Choice | None
    full: Choice | None
    gpu: int | None = None

    def to_dict(self) -> dict:
        """Returns the plan as JSON-ready values."""
        others = {name: getattr(self, name) for name in ("larger", "smaller", "full")}
        target = {"model": self.model, "device": self.device, "gpu": self.gpu, "budget": self.budget}
        return (
            target
            | self.chosen.to_dict()
            | {name: None if other is None else other.to_dict() for name, other in others.items()}
        )
