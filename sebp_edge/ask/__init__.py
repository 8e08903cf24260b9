"""Answers questions from documents, names where the answer stands, and teaches a model to answer below a passage.

Internal: import from `sebp_edge` or `sebp_edge.research`.

terms, values      a text -> the words that are searched; dates and numbers in one form
passages, index    documents -> passages; a question -> the best of them
searched_texts     the index of texts; reads again only those that have changed
answer             whether there is an answer; a reply, or a quotation in its place
sentences          passages -> sentences; the one that holds what is asked
standing           whether a reply stands in a passage
wording            questions below passages, as a conversation with the model
practice           the bundled notes, and the questions about them
practice_examples  practice notes -> examples to train on; apart, since choosing a recipe needs no numpy
make_quiz          practice notes -> the questions that the gate asks
general_texts      general text, chat and questions; probes of what the model could before
"""
