"""Saved adapters: the store on disk, and the record that is saved with each adapter."""
