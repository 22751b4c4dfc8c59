"""Tables: from a frame with names, levels and missing cells to a model, and back."""

from aevb.tables.columns import Column
from aevb.tables.fitted import TableModel, load_table
from aevb.tables.schema import Schema

__all__ = ["Column", "Schema", "TableModel", "load_table"]
