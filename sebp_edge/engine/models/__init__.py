"""Base models: finds and loads them, attaches adapters, generates text.

Internal: import from `sebp_edge` or `sebp_edge.research`.

catalog, hub           resolve a model's name to the bundled model, a local folder, a GGUF file or a download
installed, hub_cache, local_models
                       the GGUF files of Ollama and LM Studio, and all models on this machine
loading, encoders      load a base model and its tokenizer, and an encoder to analyze
gguf_base              base models in GGUF files
libraries              keeps libraries from printing and from needless imports
older_names            what transformers 5 renamed in configs, for programs that read the names before
soundness              refuses damaged or hostile model folders
fingerprint            identifies a base model by its weights
architecture           what the sparse backward pass needs to know of a model
shape, model_shape     its sizes as numbers, for plans, and how they are read from a model
four_bits              base models in 4 bits: how large they are, where they run
streaming              frozen weights of blocks in host memory, copied to the device in turn
known_models, known_tokenizer
                       shapes and tokenizers as they were read once, for processes without torch
sharding               how weights are spread over processes: what is supported, and how FSDP2 gathers them
small_copy             a small copy of a decoder, with random weights
adaptation, lora, full
                       attach, save, restore and detach trained weights
generation, sampling   generate and stream texts, and the options
decoding               the decoder of all texts
shared_batches         which models' prompts are decoded together, and how many
prefix_groups, row_cache, captured_step, single_rows
                       which prompts share a prefix, their keys, values and states, CUDA graphs of a step;
                       transformers' loop for other models, and products of single rows on the CPU
"""
