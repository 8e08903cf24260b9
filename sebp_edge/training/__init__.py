"""Carries out a schedule: from an adapter's first step to its best state.

trial                 trains and judges, on one split or on folds
loop                  one training: learning rates, steps, evaluations, the best state
evaluation            held-out losses, and the gate
recovery              cuts micro-batches smaller when memory runs out
learner               computes losses, gradients and updates
losses                the losses of a micro-batch, hoisted where that is exact, else padded
graphs                micro-batches and updates as captured CUDA graphs
update, update_in_backward
                      gradient clipping and AdamW, after the backward pass or within it
leftovers             what a failed backward pass leaves in autograd's queue
captured_gradients    captured graphs in a training loop of one's own
"""
