"""What rooms give each other: values without files, models or other programs.

Internal: import from `sebp_edge` or `sebp_edge.research`.

documents, reading    what a document holds, where it is from; what was read, and what was left out
chats                 chats and mails: whose words they are, and the owner's documents
folder                a folder of texts, and the patterns of the files that are read
model_reference       where to find a model
example               a training sequence, its outline, and what a teacher finds probable at each of its loss tokens
draw, dataset         the splits of documents; examples of all documents in them, and what a model is asked
lessons               what trains on which documents if a version is learnt on from
remembered            what a version remembers of documents, without their texts; imports no numpy
answers               whether a reply gives an answer, and the figures of a quiz
training_facts        what a training found, from which its record, report, samples and result are made
probe_figures         what a probe shows: how many of its items a model knows, before and after
word_figures          keystrokes that ghost text saves, and next words that are guessed
preparation_progress  events while texts are read, compared and tokenised
"""
