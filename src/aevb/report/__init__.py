"""The report: one page from results on disk. It trains nothing."""
