"""Exports adapters to the formats of other programs, and reads back what was written.

Internal: import from `sebp_edge` or `sebp_edge.research`.

export, target         the main path: an adapter in, a verified folder out, written whole or not at all
result                 what an export reports
weights                the base model's weights with the adapter merged in, a tensor at a time
safetensors_file       writes weights as safetensors, a tensor at a time
settings               writes a merged model's config and tokenizer, and checks what other programs read in them
gguf_file              writes and reads GGUF files
tokenizer              what GGUF calls a tokenizer's rules and tokens
mlx                    writes an adapter as mlx-lm reads it
ollama                 recognises chat templates and writes Modelfiles
read_back              compares what other programs compute with the exported folder with what it should compute
llama_cpp, mlx_lm      child processes that run those programs
"""
