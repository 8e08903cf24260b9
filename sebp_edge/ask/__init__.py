"""Answers questions from documents, and names where the answer stands.

Internal: import from `sebp_edge` or `sebp_edge.research`.

terms, values      a text -> the words that are searched; dates and numbers in one form
passages, index    documents -> passages; a question -> the best of them
searched_texts     the index of texts; reads again only those that have changed
answer             whether there is an answer; a reply, or a quotation in its place
"""
