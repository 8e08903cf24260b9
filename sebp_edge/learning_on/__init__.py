"""Learns on: decides whether an adaptation follows on from the active version, and from what it begins.

Internal: import from `sebp_edge` or `sebp_edge.research`.

comparison    the texts beside those that the active version has learnt; imports no torch
unchanged     the result if there is nothing new; imports no torch
start         the version that a training learns on from, its lessons, or why there is none
memory        what a version remembers of its texts, for the next one
"""
