"""Answers questions from documents, and names where the answer stands.

Internal: import from `sebp_edge` or `sebp_edge.research`.

terms, values      a text -> the words that are searched; dates and numbers in one form
passages, index    documents -> passages; a question -> the best of them
"""
