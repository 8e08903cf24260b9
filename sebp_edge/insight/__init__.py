"""Shows what an adaptation changed, analyzes the sparsity of gradients, examines the machine, benchmarks steps.

Internal: import from `sebp_edge` or `sebp_edge.research`.

samples         continues the beginnings of a few documents, before and after
expectations    says what to expect of an adapted model of this size
inspection      inspects texts before a training; rendered shows examples as the model gets them
forgetting      measures the loss on general text (probe/), before and after
copying         finds training text that the adapted model repeats word for word
analysis        counts the rows of gradients that are zero or small; gradients and heat_maps are parts of it
lr_range        reads a learning-rate range test
report          writes the analysis as a page
paper           repeats the SEBP paper's tables
doctor          examines the machine
local_models    describes the base models on this machine
bench           benchmarks training steps
"""
