"""Documents -> examples in splits, and what a training learns of them. Imports no torch.

Internal: import from `sebp_edge` or `sebp_edge.research`.

templates, template_child        a conversation -> a text; strangers' templates in a child process within limits
conversations, tokens, examples  documents -> tokens -> examples of at most the context length; their labels
boilerplate                      lines that stand in many documents
concerns, learnable              what makes a gain on these texts meaningless, or a training; found before it
make_dataset                     examples of all documents in their splits
prompts                          a prompt or messages -> tokens, as in training
near_duplicates, split_history   texts -> clusters of near-duplicates; what earlier versions did with documents
splits, lesson_plans             outlines -> splits -> what is trained on
general_probe                    general text on which the cost of an adaptation is measured
"""
