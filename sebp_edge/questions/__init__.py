"""Questions about a user's notes: made on the machine, trained on, and asked again.

Internal: import from `sebp_edge` or `sebp_edge.research`.

question                what a question is
asking, examples        a question -> a conversation; questions -> examples to train on, and a quiz
general_texts           general text that keeps what the model could do before
practice                bundled notes that are asked about in other words
answers                 whether a reply gives an answer
cues                    questions in keywords, about values of known types
cue_values, cue_wordings   how values are found; the wordings of a question about one
rules                   questions that rules make of a text
notes, subjects         the structure of a note; what it is about
facts                   what a rule finds
structures              facts from lines of "Key: value", lists and tables
clauses, chunks         English sentences taken apart; what follows a verb, taken apart
sentences               facts from sentences
wordings                a fact -> many wordings
values, verbs           kinds of values; forms of English verbs
word_lists              sets of words
"""
