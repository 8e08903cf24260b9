"""Saved adapters: the store on disk, and the record that is saved with each adapter.

Internal: import from `sebp_edge` or `sebp_edge.research`.
"""
