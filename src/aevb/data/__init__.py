"""Data: where rows come from, and how they are prepared."""
