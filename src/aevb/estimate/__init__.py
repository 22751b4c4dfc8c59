"""The estimate: from data and noise to values, log-probabilities and the bound of a plan."""
