"""Questions about a user's notes: made on the machine, trained on, and asked again. Internal.

question      what a question is
rules         questions that rules make of a text
"""
