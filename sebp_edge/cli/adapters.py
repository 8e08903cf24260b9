"""`sebp-edge adapters list|show|report|diff|activate|...`: the adapters on this machine."""

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from sebp_edge.basics.files import check_output_file
from sebp_edge.basics.pages.render import write
from sebp_edge.basics.units import gigabytes, plural
from sebp_edge.cli.console import one_sentence_errors, out, print_json, print_note, print_table, say
from sebp_edge.cli.options import Json, Yes, name_option, parse_path, path_option
from sebp_edge.errors import OptionError, SebpEdgeError
from sebp_edge.store.adapter_store import AdapterStore
from sebp_edge.store.best_versions import read_best_versions
from sebp_edge.store.names import folder_of
from sebp_edge.store.version_report import MARK
from sebp_edge.values.documents import printable

app = typer.Typer(help="List, show, choose, move and remove adapters.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="Name of the adapter.")]
Number = Annotated[int, typer.Argument(help="Number of a version.")]
Version = Annotated[int | None, typer.Option(help="Only this version.")]


def _readable_versions(store) -> Iterator:
    """Yields all readable versions of all adapters, and whether it is the best so far; notes each unreadable one."""
    for name in store.names():
        try:
            adapter = store.adapter(name)
            versions, best = adapter.versions(), read_best_versions(adapter).best[:1]
        except SebpEdgeError as error:
            print_note(error)
            continue
        for version in versions:
            try:
                yield adapter.open(version), version in best
            except SebpEdgeError as error:
                print_note(error)


@app.command("list")
def list_adapters(as_json: Json = False) -> None:
    """List all adapters and their versions."""
    with one_sentence_errors(as_json=as_json):
        store, rows = AdapterStore(), []
        for saved, is_best in _readable_versions(store):
            if as_json:
                print_json(_to_dict(saved))
            record = saved.record
            # The active one is mostly the best.
            state = "active" if saved.active else "best so far" if is_best else ""
            created = record.created[:16].replace("T", " ")
            rows.append(
                [saved.name, str(saved.version), state, printable(record.base_model), _test(record), printable(created)]
            )
        if as_json:
            return
        if rows:
            print_table(["name", "version", "state", "base model", "test", "created (UTC)"], rows)
        elif not store.names():
            out.print("There are no adapters yet; make one with: sebp-edge adapt ./notes")


def _test(record) -> str:
    """Returns what the test showed: right answers of a quiz, next words that were guessed, or else the loss."""
    if record.quiz:
        before, after, asked = (record.quiz.get(key, "?") for key in ("right_before", "right_after", "questions"))
        return f"{before} → {after} of {asked} right"
    if record.words:
        before, after = record.words.guessed
        return f"words guessed {before} → {after} of 100"
    if record.heldout_loss_before is None or record.heldout_loss_after is None:
        return "not tested"
    return f"loss {record.heldout_loss_before:.3f} → {record.heldout_loss_after:.3f}"


@app.command()
def show(name: Name, version: Version = None, as_json: Json = False) -> None:
    """Show all versions of an adapter, or one version and its documents."""
    with one_sentence_errors(as_json=as_json):
        adapter = AdapterStore().adapter(name)
        for number in adapter.versions() if version is None else [version]:
            saved = adapter.open(number)
            record = _to_dict(saved)
            documents = [] if version is None else adapter.documents(number)
            if as_json:
                manifest = {"manifest": [document.to_dict() for document in documents]}
                print_json(record | (manifest if version is not None else {}))
                continue
            print_table(["", ""], [[key, printable(str(value))] for key, value in record.items() if key != "recipe"])
            out.print()
            if documents:
                _print_documents([("", document) for document in documents])


@app.command()
def report(
    name: Annotated[str, typer.Argument(help="Name of the adapter, or the folder of one.")],
    version: Annotated[int | None, typer.Option(help="This version; by default the active one.")] = None,
    to: Annotated[
        Path | None, path_option("The page to write; by default NAME-VERSION.html, with --json none.")
    ] = None,
    with_samples: Annotated[
        bool, typer.Option("--with-samples", help="Include the samples that adapt --keep-samples has kept: your text.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write a page about a version: losses, curves, what was read, memory, and why it was better or not.

    The page is one HTML file without scripts. It contains none of your text unless --with-samples is given. Overwrites
    an earlier page, but no other file.
    """
    with one_sentence_errors(as_json=as_json):
        found = AdapterStore().find(name, version).report(with_samples=with_samples)
        if to is None and not as_json:
            to = Path(f"{folder_of(found.name)}-{found.version}.html" if found.name else "adapter.html")
        if to is not None:
            check_output_file(to, MARK.encode(), "page of an adapter")
            write(found.to_html(), to)
        say({"event": "report"} | found.to_dict() | {"html": to and str(to)}, f"written to {to}", as_json=as_json)


@app.command()
def diff(
    name: Name,
    old: Annotated[int | None, typer.Argument(help="A version; by default the one before NEW.")] = None,
    new: Annotated[int | None, typer.Argument(help="A version; by default the newest one.")] = None,
    as_json: Json = False,
) -> None:
    """Show which documents came, went and changed from the version OLD to the version NEW."""
    with one_sentence_errors(as_json=as_json):
        found = AdapterStore().adapter(name).diff(old, new)
        if as_json:
            print_json({"event": "diff"} | found.to_dict())
            return
        rows = [("came", document) for document in found.came]
        rows += [("went", document) for document in found.went]
        rows += [("changed", after) for _, after in found.changed]
        if rows:
            _print_documents(rows)
        counts = f"{len(found.came)} came, {len(found.went)} went, {len(found.changed)} changed"
        out.print(f"{counts}, {found.unchanged} unchanged from version {found.old} to version {found.new}.")


@app.command()
def activate(name: Name, version: Number, as_json: Json = False) -> None:
    """Make a version the active one."""
    with one_sentence_errors(as_json=as_json):
        saved = AdapterStore().adapter(name).activate(version)
        say(_to_dict(saved), _active(name, version), as_json=as_json)


@app.command()
def rollback(name: Name, as_json: Json = False) -> None:
    """Make the version active again that was active before the active one."""
    with one_sentence_errors(as_json=as_json):
        saved = AdapterStore().adapter(name).rollback()
        say(_to_dict(saved), _active(name, saved.version), as_json=as_json)


@app.command()
def rename(name: Name, new_name: Annotated[str, typer.Argument(help="Its new name.")], as_json: Json = False) -> None:
    """Give an adapter another name."""
    with one_sentence_errors(as_json=as_json):
        AdapterStore().adapter(name).rename(new_name)
        renamed = {"event": "renamed", "name": name, "new_name": new_name}
        say(renamed, f"The adapter {name!r} is now {new_name!r}.", as_json=as_json)


@app.command()
def remove(name: Name, version: Version = None, yes: Yes = False, as_json: Json = False) -> None:
    """Delete an adapter, or one version of it. This cannot be undone."""
    with one_sentence_errors(as_json=as_json):
        adapter = AdapterStore().adapter(name)
        versions = adapter.versions()
        what = f"{name!r} with {plural(len(versions), 'version')}"
        if version is not None:
            adapter.version_folder(version)
            versions, what = [version], f"version {version} of {name!r}"
        if as_json and not yes:
            raise OptionError(f"This deletes {what}. Nothing was deleted; pass --yes to delete without a question.")
        if not yes and not typer.confirm(f"Delete {what}?"):
            raise typer.Exit(1)
        was_active = version is not None and version == adapter.active()
        active = adapter.remove(version)
        removed = {"event": "removed", "name": name, "versions": versions, "active": active}
        sentence = f"Deleted {what}." + (f"\n{_active(name, active)}" if was_active else "")
        say(removed, sentence, as_json=as_json)


@app.command()
def gc(
    keep: Annotated[int, typer.Option(help="How many of the newest versions of each adapter to keep.")] = 3,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Delete old versions, interrupted ones, and what killed processes left.

    Of each adapter, the active version, the one that was active before it, the best so far, and the newest three stay.
    A version of an interrupted training goes once there is a newer one.
    """
    with one_sentence_errors(as_json=as_json):
        store = AdapterStore()
        found = store.garbage(keep)
        if not as_json:
            print_table(
                ["name", "version", "reason", "size"],
                [[one.name, str(one.version), one.reason, gigabytes(one.size)] for one in found.versions],
            )
            for path in found.leftovers:
                out.print(f"left by a killed process: {str(path)!r}", markup=False)
        count = len(found.versions) + len(found.leftovers)
        if not count and not as_json:
            out.print("There is nothing to delete.")
            return
        if count and not yes:
            question = f"Deleting {'this' if count == 1 else f'these {count}'} frees {gigabytes(found.size)}."
            if as_json or not sys.stdin.isatty():
                raise OptionError(f"{question} Nothing was deleted; pass --yes to delete without a question.")
            if not typer.confirm(f"{question} Delete?"):
                raise typer.Exit(1)
        deleted = store.gc(found)
        freed = f"Deleted; {gigabytes(deleted.size)} were freed."
        say({"event": "garbage"} | deleted.to_dict(), freed, as_json=as_json)


@app.command("export")
def export_archive(
    name: Name,
    to: Annotated[Path, path_option("The new file to write.")],
    version: Version = None,
    names: Annotated[
        bool, typer.Option("--names", help="Include the names of the documents, and samples that were kept.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write one version with its record into one file, to move it to another machine."""
    with one_sentence_errors(as_json=as_json):
        saved = AdapterStore().adapter(name).export_archive(to, version, with_names=names)
        say(_to_dict(saved), f"Version {saved.version} of {saved.name!r} is in {str(to)!r}.", as_json=as_json)


@app.command("import")
def import_archive(
    file: Annotated[Path, typer.Argument(parser=parse_path, metavar="FILE", help="A file that export wrote.")],
    name: Annotated[str | None, name_option("Name of the adapter; by default the one in the file.")] = None,
    as_json: Json = False,
) -> None:
    """Add the version in a file of `sebp-edge adapters export`; it is not active."""
    with one_sentence_errors(as_json=as_json):
        saved = AdapterStore().import_archive(file, name)
        command = shlex.join(["sebp-edge", "adapters", "activate", saved.name, str(saved.version)])
        sentence = f"Saved as version {saved.version} of {saved.name!r}. Activate it with: {command}"
        say(_to_dict(saved), sentence, as_json=as_json)


def _print_documents(rows: list[tuple]) -> None:
    table = []
    for what, document in rows:
        tokens = "" if document.tokens is None else str(document.tokens)
        split = f"{document.split}, gone" if document.absent else document.split
        table.append([what, printable(document.label), tokens, split, document.hash])
    print_table(["", "document", "tokens", "split", "hash"], table)


def _to_dict(saved) -> dict:
    return {"event": "adapter"} | saved.to_dict()


def _active(name: str, version: int | None) -> str:
    if version is None:
        return f"No version of {name!r} is active now; `sebp-edge adapters activate` chooses one."
    return f"Version {version} of {name!r} is active now."
