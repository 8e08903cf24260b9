"""Trains an adapter: from its first step to its best state.

Internal: import from `sebp_edge` or `sebp_edge.research`.

trial                 trains and judges, on one split or on folds
loop                  runs one training: learning rates, steps, evaluations, the best state
evaluation            computes held-out losses and decides whether to keep an adapter
recovery              cuts micro-batches smaller when memory runs out
learner               computes losses, gradients and updates
losses                computes the losses of a micro-batch, hoisted if that is exact, else padded
graphs                captures micro-batches and updates as CUDA graphs
update, update_in_backward
                      gradient clipping and AdamW, after the backward pass or within it
leftovers             clears autograd's queue after a failed backward pass
captured_gradients    captured graphs for your own training loop
"""
