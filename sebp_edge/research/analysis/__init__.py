"""Analyzes how sparse the gradients of a model are on its owner's texts: `Personalizer.analyze`, `sebp-edge analyze`.

Internal: import from `sebp_edge` or `sebp_edge.research`.

analysis             reads texts, loads the model, analyzes its gradients on some examples, and writes a page of it
gradient_sparsity    counts the rows and elements of dL/dY that are zero or small, and draws norms by layer and position
objectives           the losses whose gradients are analyzed
gradients            computes the gradients, a layer at a time
"""
