"""The declaration: notation, graph, conditional distributions and networks."""
