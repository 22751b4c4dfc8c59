"""The derivation: from the graphs of p and q to a plan of the estimator, with reasons."""
