"""Clears autograd's queue after a failed backward pass, which leaves the activations of a whole micro-batch there.

The engine has a queue of ready nodes for each thread and takes the newest first. When a node fails, the others stay
queued until a later pass takes them, finds that their pass is over, and drops them. On the CPU no later pass takes
them: its own nodes are newer, and it ends with the last of these. So a node is run that is older than all of them.
"""

import torch


class AutogradQueue:
    """Clears autograd's queue of this thread and `device`; must be created before the graphs that may fail."""

    def __init__(self, device: torch.device):
        self._leaf = torch.zeros(1, device=device, requires_grad=True)
        # A view: its backward pass allocates nothing, since memory may have run out.
        self._oldest = self._leaf.view(())
        self._gradient = torch.ones((), device=device)

    def clear(self) -> None:
        """Drops the remains of failed backward passes; returns when that is done."""
        torch.autograd.grad(self._oldest, self._leaf, self._gradient, retain_graph=True)
