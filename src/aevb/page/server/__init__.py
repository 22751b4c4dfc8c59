"""The local server of ``aevb serve``: pages of runs that follow their training.

The server process imports no torch. Two child processes compute the parts of a page.
"""
