"""Services for the whole process: seeded generators, evaluation mode, shared cores, checked
files.
"""
