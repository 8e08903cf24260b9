"""Learns on: decides whether an adaptation follows on from the active version, and from what it begins.

Internal: import from `sebp_edge` or `sebp_edge.research`.

comparison    the texts, model and recipe beside those of the active version; imports no torch
name_in_use   says that the name has an adapter of other texts, another model or another recipe; imports no torch
unchanged     the result if there is nothing new; imports no torch
start         the version that a training learns on from, its lessons, or why there is none
memory        what a version remembers of its texts, for the next one
"""
