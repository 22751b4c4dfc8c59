"""Tables: from a frame with names, levels and missing cells to a model, and back."""

from aevb.tables.fitted import TableModel, load_table
from aevb.tables.schema import Column, Schema

__all__ = ["Column", "Schema", "TableModel", "load_table"]
