"""GGUF files, as llama.cpp, Ollama and LM Studio keep models: their metadata, tensors and tokenizers.

Internal: import from `sebp_edge` or `sebp_edge.research`.

file           a file's metadata and tensors, from an untrusted source
quantised      the tensors' types, and their weights as floating-point numbers
families       the model families that can be read: configs, names and forms of weights
tokenizer      the tokenizer that a file describes
"""
