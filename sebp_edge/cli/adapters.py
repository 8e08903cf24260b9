"""`sebp-edge adapters list|show|remove`: the adapters on this machine."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

import typer

from sebp_edge.cli.console import err, one_sentence_errors, out, print_json, print_table, printable
from sebp_edge.cli.options import Json
from sebp_edge.errors import SebpEdgeError

app = typer.Typer(help="List, show and remove adapters.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="Name of the adapter.")]


def _to_dict(saved) -> dict:
    where = {"name": saved.name, "version": saved.version, "active": saved.active, "adapter_path": str(saved.path)}
    return where | asdict(saved.record)


def _readable_versions(store) -> Iterator:
    """Yields all readable versions of all adapters; prints a note about each unreadable one."""
    for name in store.names():
        try:
            versions = store.versions(name)
        except SebpEdgeError as error:
            _print_note(error)
            continue
        for version in versions:
            try:
                yield store.open(name, version)
            except SebpEdgeError as error:
                _print_note(error)


def _print_note(error: SebpEdgeError) -> None:
    err.print(f"note: {error}", style="yellow", markup=False)


@app.command("list")
def list_adapters(as_json: Json = False) -> None:
    """List all adapters and their versions."""
    with one_sentence_errors(as_json=as_json):
        from sebp_edge.adapters.store import AdapterStore

        store, rows = AdapterStore(), []
        for saved in _readable_versions(store):
            if as_json:
                print_json(_to_dict(saved))
            record = saved.record
            losses = "not tested"
            if record.heldout_loss_before is not None and record.heldout_loss_after is not None:
                losses = f"{record.heldout_loss_before:.3f} → {record.heldout_loss_after:.3f}"
            state, created = "active" if saved.active else "", record.created[:16].replace("T", " ")
            rows.append(
                [saved.name, str(saved.version), state, printable(record.base_model), losses, printable(created)]
            )
        if as_json:
            return
        if rows:
            print_table(["name", "version", "state", "base model", "held-out loss", "created (UTC)"], rows)
        elif not store.names():
            out.print("There are no adapters yet; make one with: sebp-edge adapt ./notes")


@app.command()
def show(name: Name, as_json: Json = False) -> None:
    """Show all versions of an adapter."""
    with one_sentence_errors(as_json=as_json):
        from sebp_edge.adapters.store import AdapterStore

        store = AdapterStore()
        for version in store.versions(name):
            record = _to_dict(store.open(name, version))
            if as_json:
                print_json(record)
            else:
                print_table(
                    ["", ""], [[key, printable(str(value))] for key, value in record.items() if key != "recipe"]
                )
                out.print()


@app.command()
def remove(
    name: Name,
    version: Annotated[int | None, typer.Option(help="Delete only this version.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> None:
    """Delete an adapter, or one version of it. This cannot be undone."""
    with one_sentence_errors():
        from sebp_edge.adapters.store import AdapterStore

        store = AdapterStore()
        count = len(store.versions(name))
        what = f"{name!r} with {count} version{'s' * (count != 1)}"
        if version is not None:
            what = f"version {version} of {name!r}"
        if not yes and not typer.confirm(f"Delete {what}?"):
            raise typer.Exit(1)
        store.remove(name, version)
        out.print(f"Deleted {what}.", markup=False)
