"""Trains an adapter from its first step to its best state.

Internal: import from `sebp_edge` or `sebp_edge.research`.

run                   trains and tests, on one split or on folds, then trains on all documents
gate                  decides whether an adapter is better than the base model and than the active version
quiz                  decides by right answers whether an adapter is better
comparison            compares the test losses of two states, with a confidence bound
loop                  runs one training: learning rates, steps, evaluations, the best state
checkpoint            writes how far a run is, as often as it costs little, and reads it
evaluation            computes held-out losses by document, and counts guessed words
words                 reads from logits which words are guessed
keystrokes            types a text with ghost text, and counts the keystrokes that it saves
scoring               computes losses without training
facts                 collects the facts of a run: counts, losses, curves, memory and time
probing               measures general text, language and facts, before and after
copies                finds training text that the adapted model repeats word for word
teacher               gives examples the probabilities of a teacher to learn
recovery              reduces micro-batches when memory runs out
learner               computes losses, gradients and updates
losses                computes the losses of a micro-batch, hoisted if that is exact, else padded
kernels_ahead         compiles the kernels of a training while its weights are loaded
graphs                captures micro-batches and updates as CUDA graphs
update                clips gradients and applies AdamW after the backward pass
update_in_backward    does so during the backward pass
captured_gradients    captured graphs for your own training loop
"""
