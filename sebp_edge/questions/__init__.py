"""Reading: bundled notes with questions, which train a model to answer below a passage, and test whether it does.

Internal: import from `sebp_edge` or `sebp_edge.research`.

practice       the bundled notes, and the questions about them
asking         questions below passages, as a conversation with the model
examples       practice notes -> examples to train on
quiz           practice notes -> the questions that the gate asks
general_texts  general text, chat and questions, which tell what the model could do before
probes         language and facts that tell what the model could before
probe_figures  how many of them a model knows, before and after
answers        whether a reply gives an answer
"""
