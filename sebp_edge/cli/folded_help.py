"""Lets the tables of help fold words that are longer than their column, which typer would cut. Imported for help only.

typer has no setting for it.
"""

from rich import columns
from rich.table import Table
from typer import rich_utils


class _Folding(Table):
    def add_row(self, *cells, **options) -> None:
        super().add_row(*cells, **options)
        for column in self.columns:
            column.overflow = "fold"


rich_utils.Table = columns.Table = _Folding
