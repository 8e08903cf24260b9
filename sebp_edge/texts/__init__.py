"""Turns texts into examples, and examples into schedules.

Internal: import from `sebp_edge` or `sebp_edge.research`.

documents, records               what a document holds; a record -> the content of a document
patterns, vaults, folders        which files of a folder are read
not_theirs, foreign              what its owner did not write; other programs' files, which are not read
no_notes                         folders that nobody would call notes
edits, pictures                  replaced spans of a text; texts without data of pictures, keys and the like
chats                            chats and mails -> whose words they are, and the owner's documents
formats, exports, readers        files, strings, folders and records -> texts and chats -> documents
templates, template_child        a conversation -> a text; strangers' templates in a child process within limits
conversations, tokens, examples  documents -> tokens -> examples of at most the context length; their outlines
boilerplate                      lines that stand in many documents
concerns, learnable              what makes a gain on these texts meaningless, or a training; found before it
dataset                          examples of all documents, with the figures for the report
prompts                          a prompt or messages -> tokens, as in training
near_duplicates, split_history   texts -> clusters of near-duplicates; what earlier versions did with documents
remembered                       what a version remembers of a document; imports no numpy
splits, lessons, schedule        outlines -> splits -> what is trained on -> epochs, steps and micro-batches
general_probe                    general text on which the cost of an adaptation is measured
progress                         events while texts are read, compared and tokenised
batches                          a micro-batch -> packed active tokens, or a padded batch
word_figures                     keystrokes that ghost text saves, and next words that are guessed
teacher_tokens                   what a teacher finds probable at each loss token of an example
"""
