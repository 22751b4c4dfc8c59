"""An independent interpreter of declarations, to compare the library with.

It unrolls p and q over time for one row, gives every unknown an axis of its own (its values, its
components, or injected noise), and computes bounds, gradients, evidences and posteriors from
densities written out here. It shares no code with the library: it reads the declaration as data and
the model's weights as tensors.
"""
