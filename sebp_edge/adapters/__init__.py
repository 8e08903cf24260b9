"""Saved adapters: the store on disk, what is saved with each version, and what is done with versions afterwards.

`store` has all methods; `folders` and `lock` write and delete safely, `names` maps names to folders, `record` and
`documents` are what a version says of itself, `garbage` is gc's rule, `difference` compares versions, `archive` moves
them, `model_paths` says where their base models are, `forgetting` and `erasure` remove what knew a document.

Internal: import from `sebp_edge` or `sebp_edge.research`.
"""
