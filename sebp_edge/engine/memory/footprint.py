"""The peak memory of a training, by purpose; imports no torch."""

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Footprint:
    """Peak memory of a training in bytes, by purpose."""

    weights: int
    adapter: int  # fp32 masters and the copies for computation; on the CPU also the states to restore
    gradients: int  # accumulated gradients; on a GPU also one micro-batch's own, unless they are added one by one
    optimizer: int
    # What the largest micro-batch keeps for its backward pass, and what that pass allocates at its peak; in an
    # evaluation on the CPU also what the training goes on from.
    activations: int
    loss: int  # chunks of logits, hidden states and their gradient
    # Memory of captured graphs in addition to the largest run: cuBLAS workspaces and fragmentation of torch's
    # allocator.
    graphs: int
    context: int  # memory of the process outside torch's allocator
    reserve: int  # a margin for errors of this count

    @property
    def total(self) -> int:
        """The predicted peak."""
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def minimum(self) -> int:
        """The minimum that a training needs, however small its micro-batches are."""
        return self.weights + self.adapter + self.gradients + self.optimizer
