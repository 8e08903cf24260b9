"""Analyzes how sparse the gradients of a model are on its owner's texts: `Personalizer.analyze`, `sebp-edge analyze`.

Internal: import from `sebp_edge` or `sebp_edge.research`.

measuring            reads texts, loads the model and analyzes it
analysis             analyzes some examples of a dataset
gradient_sparsity    counts the rows of dL/dY that are zero or small
objectives           the losses whose gradients are analyzed
gradients            computes the gradients, a layer at a time
elements             the paper's threshold on elements
heat_maps            norms by layer and position
report               writes an analysis as a page
"""
