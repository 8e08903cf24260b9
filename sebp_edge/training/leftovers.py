"""What a backward pass that failed leaves in autograd's queue, and with it the activations of a whole micro-batch.

The engine takes nodes that are ready from a queue of each thread, those made last first. When a node fails, the others
stay there until they are taken, found to belong to no pass any more, and dropped. On the CPU no later pass takes them:
its own nodes were made later, and it ends with the last of these. So one is run whose node is older than all of them.
"""

import torch


class Leftovers:
    """Clears autograd's queue of this thread and `device`; to be made before the graphs whose remains are to go."""

    def __init__(self, device: torch.device):
        self._leaf = torch.zeros(1, device=device, requires_grad=True)
        # A view: its backward pass takes no memory, where there may be none.
        self._oldest = self._leaf.view(())
        self._gradient = torch.ones((), device=device)

    def clear(self) -> None:
        """Drops what passes that failed have left; waits until that is done."""
        torch.autograd.grad(self._oldest, self._leaf, self._gradient, retain_graph=True)
