"""The estimate: data, noise, values and log-probabilities, and the bound that a plan makes of them."""
