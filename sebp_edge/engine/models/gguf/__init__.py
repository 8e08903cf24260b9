"""GGUF files, as llama.cpp, Ollama and LM Studio keep models: their metadata, tensors and tokenizers.

Internal: import from `sebp_edge` or `sebp_edge.research`.

file           a file's metadata and tensors, from an untrusted source
quantised      the tensors' types, and their weights as floating-point numbers
families       what files call a model family's tensors and settings, to read and to write them
reader         a file's config and weights
writer         a model's tensors and settings in files
rotary         rotary embeddings in files
tokenizer      the tokenizer that a file describes
"""
