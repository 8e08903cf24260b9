"""What rooms give each other: values without files, models or other programs.

Internal: import from `sebp_edge` or `sebp_edge.research`.

documents             what a document holds, where it is from, and what was left out
remembered            what a version remembers of a document; imports no numpy
answers               decides whether a reply gives an answer
probe_figures         what a probe shows: how many of its items a model knows, before and after
word_figures          keystrokes that ghost text saves, and next words that are guessed
preparation_progress  events while texts are read, compared and tokenised
"""
