"""Files, folders, strings and records -> documents. Imports no torch and knows no tokenizer.

Internal: import from `sebp_edge` or `sebp_edge.research`.

vaults, find_files               which files of a folder are read, and which folders nobody would call notes
not_theirs, foreign              what its owner did not write; other programs' files, which are not read
formats, exports, readers        files, strings, folders and records -> texts and chats -> documents
records                          a record -> the content of a document
edits, pictures                  replaced spans of a text; texts without data of pictures, keys and the like
"""
