"""Lets the tables of help fold words that typer would cut, which has no setting for it. Imported for help only."""

from rich import columns
from rich.table import Table
from typer import rich_utils


class _Folding(Table):
    def add_row(self, *cells, **options) -> None:
        super().add_row(*cells, **options)
        for column in self.columns:
            column.overflow = "fold"


rich_utils.Table = columns.Table = _Folding
