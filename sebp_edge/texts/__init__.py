"""Texts become examples, and examples a schedule.

documents, formats, readers      strings, files, folders and records -> documents
conversations, tokens, examples  documents -> tokens -> examples of at most a context's length
dataset                          all of that, with the figures for the report
prompts                          a prompt or messages -> tokens, as in training
splits, schedule                 examples -> splits -> epochs, steps and micro-batches
batches                          a micro-batch -> packed active tokens, or a padded batch
"""
