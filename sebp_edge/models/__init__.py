"""Base models: finds and loads them, puts adapters on them, generates text.

Internal: import from `sebp_edge` or `sebp_edge.research`.

catalog, hub           a model's name -> the bundled model, a local folder or a download
loading                loads a base model and its tokenizer
soundness, weights     refuse damaged or hostile model folders and weight files
fingerprint            identifies a base model by its weights
architecture, shape    what the sparse backward must know of a model, and its sizes
small_copy, random_weights
                       models with random weights: a small copy of a class, and one of the true shape
adaptation, lora, full
                       attach, save, restore and detach trained weights
generation, sampling, writing
                       generates text, with which options, handed out piece by piece
"""
