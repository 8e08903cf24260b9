"""Which rows of a batch carry gradient, and how they are laid out.

Internal: import from `sebp_edge` or `sebp_edge.research`.

row_plan                RowPlan: the active rows and loss rows of a padded batch
batch_rows              the rows that each layer computes, in decoders and encoders
active_tokens, buckets  the packed active rows, and the few fixed sizes that they are padded to with filler
share_beginnings        what sequences begin with in common, computed once; beginnings chooses it
schedule                outlines of examples -> epochs, steps and micro-batches
batches                 a micro-batch -> packed active tokens, or a padded batch
soft_targets            tokens that share the loss of a row with its target
row_rule                the protocol of rules that drop rows which carry gradient, for sparsify(rows=...)
"""
