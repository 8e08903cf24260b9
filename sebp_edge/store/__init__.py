"""Saved adapters: the store on disk, one adapter of it, a saved version, and what is done with versions afterwards.

Internal: import from `sebp_edge` or `sebp_edge.research`.

adapter_store              all adapters: finds, imports, collects garbage, checks that a new one can be saved
adapter                    one adapter: saves, opens, activates, renames and removes versions, and asks about them
erasure                    removes the versions that knew a document
difference, archive        what changed between two versions; a version in one file
saved                      a version; record, training_report, version_report: what it says of itself, and its page
version_documents          its list of documents, and the splits in that
known_texts, where         the texts that it has learnt; where these are on this machine
activation, salt           which versions have been active; the salt of names, and the numbers that they have had
garbage, model_paths       what gc deletes; where base models are
best_versions              which version may be the best so far
stored_jobs                trainings that can be resumed, which are found, held by a process, and deleted
folders, names, lock       written whole, deleted in one step; names of folders; one change at a time
new_folder                 a folder outside the store, written whole or not at all
"""
