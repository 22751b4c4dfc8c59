"""An independent interpreter of declarations, the reference for comparisons with the library.

It unrolls p and q over time for one row. Every unknown has its own axis (for its values, its
components, or injected noise). It computes bounds, gradients, evidences and posteriors from
densities that are written out here. It shares no code with the library: it reads the declaration as
data and the model's weights as tensors.
"""
