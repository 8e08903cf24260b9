"""Exports adapters to the formats of other programs, and reads back what was written.

Internal: import from `sebp_edge` or `sebp_edge.research`.

exporter               the main path: an adapter in, a verified folder out
formats, export_result
                       how each format is written and read back; what an export tells and returns
source, model_weights  the adapter and its base model; the weights with it merged in, a tensor at a time
settings               writes a merged model's config and tokenizer, and checks what other programs read in them
gguf_file              writes and reads GGUF files
gguf_tokenizer         what GGUF calls a tokenizer's rules and tokens
ollama                 recognises chat templates and writes Modelfiles
read_back              compares what other programs compute with the exported folder with what it should compute
child                  runs programs in child processes: llama_cpp and mlx_lm
"""
