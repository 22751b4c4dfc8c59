"""Services for the whole process: seeds, evaluation mode, shared cores, checked files."""
