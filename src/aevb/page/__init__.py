"""Pages of runs: what a trained model is, for people to look at."""
