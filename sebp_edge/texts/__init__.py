"""A folder of notes becomes batches: documents (readers), examples, batches."""
