"""Saved adapters: the store on disk, and the record and the documents' splits that are saved with each adapter.

Internal: import from `sebp_edge` or `sebp_edge.research`.
"""
