"""What the library needs of the process it runs in: seeded generators, evaluation mode, shared cores, files that are checked."""
