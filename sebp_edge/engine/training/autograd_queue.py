"""Clears autograd's queue after a failed backward pass, which leaves the activations of a whole micro-batch there.

The engine keeps a queue of ready nodes per thread and runs the newest first. If a node fails, the others stay queued
until a later pass reaches them, finds that their pass is over, and drops them. On the CPU a later pass ends before it
reaches them, since its own nodes are newer. Running a node that is older than all of them clears the queue.
"""

import torch


class AutogradQueue:
    """Clears autograd's queue for this thread and `device`; create it before the autograd graphs that may fail."""

    def __init__(self, device: torch.device):
        self._leaf = torch.zeros(1, device=device, requires_grad=True)
        # The backward pass of a view allocates nothing; memory may have run out.
        self._oldest = self._leaf.view(())
        self._gradient = torch.ones((), device=device)

    def clear(self) -> None:
        """Drops what failed backward passes left in the queue."""
        torch.autograd.grad(self._oldest, self._leaf, self._gradient, retain_graph=True)
