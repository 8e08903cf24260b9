"""`sebp-edge forget DOCUMENT...`: makes an adapter forget documents."""

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from sebp_edge.basics.units import plural
from sebp_edge.cli import options
from sebp_edge.cli.console import NOT_BETTER, one_sentence_errors, out, print_json, print_table, quick_imports
from sebp_edge.errors import OptionError
from sebp_edge.machine.politeness import Politeness, lower_priority
from sebp_edge.run.base_models import find_base_model
from sebp_edge.store.adapter_store import AdapterStore
from sebp_edge.values.documents import printable


def forget(
    documents: Annotated[
        list[str] | None,
        typer.Argument(metavar="DOCUMENT...", help="Path of a file, or name, number or hash as in `adapters show`."),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Verify what was forgotten last, by training once more; on a CPU.")
    ] = False,
    texts: Annotated[
        list[Path] | None,
        options.path_option(
            "File or folder with the adapter's other texts, if they were moved; may be repeated.", "PATH"
        ),
    ] = None,
    name: Annotated[str, options.name_option("Name of the adapter.")] = "default",
    near_duplicates: Annotated[
        bool, typer.Option("--near-duplicates", help="Forget near-duplicates too, and texts that hold parts of it.")
    ] = False,
    include: options.Include = None,
    exclude: options.Exclude = None,
    activate_anyway: Annotated[
        bool, typer.Option("--activate-anyway", help="Activate the new version whatever the gate says.")
    ] = False,
    yes: options.Yes = False,
    model: options.AdapterModel = None,
    me: options.Me = None,
    device: options.Device = None,
    memory: options.MostMemory = None,
    polite: options.Polite = False,
    threads: options.Threads = None,
    gpu_share: options.GpuShare = None,
    as_json: options.Json = False,
) -> None:
    """Train an adapter again without DOCUMENT, and remove every version that knew it. This cannot be undone.

    With --verify and no DOCUMENT, train once more on the other documents, and compare the weights with the receipt's.

    The other documents must be unchanged. They are read where they were learnt, or from --texts if they were moved. A
    receipt is saved beside the adapter.

    Exit codes: 0 forgotten or verified, 3 forgotten but the new version is not better than the base model and not
    active, 130 interrupted, 2 invalid option, 1 not verified or any other error.
    """
    with one_sentence_errors(as_json=as_json, takes_time=True), contextlib.ExitStack() as stack:
        if verify == bool(documents):
            raise OptionError("Name a document to forget, or give --verify alone to verify what was forgotten last.")
        if not texts and (include or exclude):
            raise OptionError("--include and --exclude choose files of --texts; give --texts, too.")
        politeness = Politeness.of(polite, threads, gpu_share)
        if polite:
            lower_priority()
        with quick_imports():
            from sebp_edge.cli.progress import show_progress
            from sebp_edge.personalizer import Personalizer

        sink = stack.enter_context(show_progress(as_json))

        def ask(found) -> None:
            nonlocal sink
            stack.close()  # a progress bar would be drawn over the question
            _ask(found, yes=yes, activate_anyway=activate_anyway, as_json=as_json)
            sink = stack.enter_context(show_progress(as_json))

        store = AdapterStore()
        adapter = store.adapter(name)
        newest = adapter.active() or max(adapter.versions())
        device = device or ("cpu" if verify else None)
        base = model or find_base_model(store, adapter.open(newest).record)
        personalizer = Personalizer(
            base,
            store=store,
            me=me or (),
            device=device,
            memory_budget=memory,
            politeness=politeness,
            on_event=lambda event: sink(event),
        )
        others = options.select(texts, include, exclude) if texts else None
        if verify:
            verification = personalizer.verify_forgotten(others, name=name)
            stack.close()
            _show_verification(verification, as_json=as_json)
            return
        receipt = personalizer.forget(
            documents, others, name=name, near_duplicates=near_duplicates, activate_anyway=activate_anyway, on_found=ask
        )
    show_receipt(receipt, as_json=as_json)


def _ask(found, *, yes: bool, activate_anyway: bool, as_json: bool) -> None:
    """Says what will be removed, and asks for a yes; exits if the answer is no."""
    if not as_json:
        _show_found(found, activate_anyway=activate_anyway)
    if yes:
        return
    if as_json or not sys.stdin.isatty():
        raise OptionError(
            f"This removes {plural(len(found.versions), 'version')} of {found.name!r} for good. Nothing was changed; "
            "pass --yes to go on without a question."
        )
    if not typer.confirm("Forget, for good?"):
        raise typer.Exit(1)


def _show_found(found, *, activate_anyway: bool) -> None:
    near = "forgotten too" if found.with_near_duplicates else "still known; --near-duplicates forgets it too"
    rows = [["to forget", document] for document in found.documents]
    rows += [[f"near-duplicate, {near}", document] for document in found.near_duplicates]
    print_table(["document", "hash", ""], [[printable(document.label), document.hash, what] for what, document in rows])
    out.print(f"Removed: {_listed(found.versions)} of {found.name!r}.", markup=False)
    if found.unlisted:
        out.print(f"Of {_listed(found.unlisted)} it is not known what they were trained on.")
    if found.lost:
        out.print(_describe_lost(len(found.lost)))
    if found.remaining is None:
        return
    others, version = len(found.remaining.reading.documents), found.remaining.version
    documents = "document" if others == 1 else f"{others} documents"
    out.print(f"First, a new version is trained on the other {documents} of version {version}.")
    if new := found.remaining.num_new:
        documents, are, them = ("document", "is", "it") if new == 1 else ("documents", "are", "them")
        out.print(
            f"{new} {documents} that version {version} has not learnt {are} left out; `sebp-edge adapt` learns {them}."
        )
    if gone := found.remaining.num_gone:
        documents = "1 document that it knows is" if gone == 1 else f"{gone} documents that it knows are"
        out.print(f"{documents} not there any more, and forgotten too.")
    if not activate_anyway:
        out.print("If the new version is not better than the base model, it will not be active.")


def _listed(versions: tuple[int, ...]) -> str:
    return f"version{'s' * (len(versions) != 1)} {', '.join(map(str, versions))}"


def _describe_lost(count: int) -> str:
    documents, go, them = ("document", "goes", "it") if count == 1 else ("documents", "go", "them")
    return (
        f"{count} other {documents}, learnt after the active version, {go} with these; `sebp-edge adapt` learns {them} "
        "again."
    )


def show_receipt(receipt, *, as_json: bool) -> None:
    """Prints a receipt; exits with NOT_BETTER if the new version is not active."""
    if as_json:
        print_json({"event": "result", "result_of": "forget"} | receipt.to_dict())
    else:
        _show(receipt)
    if receipt.replaced_by not in (None, receipt.active):
        raise typer.Exit(NOT_BETTER)


def _show_verification(verification, *, as_json: bool) -> None:
    """Prints what was found; exits with 1 if the receipt was not found to be true."""
    if as_json:
        print_json({"event": "result", "result_of": "verify"} | verification.to_dict())
    else:
        state, style = ("Verified", "green") if verification.verified else ("Not verified", "bold yellow")
        out.print(f"{state}: {verification.explanation}", style=style, markup=False)
        out.print(f"Receipt: {verification.receipt}", markup=False)
    if not verification.verified:
        raise typer.Exit(1)


def _show(receipt) -> None:
    removed = _listed(receipt.versions_removed) if receipt.versions_removed else "no version"
    out.print(f"Forgotten: {removed} of {receipt.name!r} removed.", style="green", markup=False)
    if receipt.lost:
        out.print(_describe_lost(receipt.lost))
    out.print(receipt.exact, markup=False)
    if receipt.active is None:
        again = (
            f"; `sebp-edge adapters activate` can activate version {receipt.replaced_by}" if receipt.replaced_by else ""
        )
        out.print(f"No version is active now{again}.", markup=False)
    else:
        out.print(f"Version {receipt.active} is active now.")
    out.print(receipt.not_reached)
    out.print(f"Receipt: {receipt.path}", markup=False)
