"""`sebp-edge jobs`: the trainings that run, are paused or were interrupted."""

from typing import Annotated

import typer

from sebp_edge.basics.units import gigabytes, percent
from sebp_edge.cli.base_model import open_store
from sebp_edge.cli.console import one_sentence_errors, out, print_json, print_note, print_table
from sebp_edge.cli.options import Json
from sebp_edge.values.documents import printable

app = typer.Typer(invoke_without_command=True)


@app.callback()
def jobs(context: typer.Context, as_json: Json = False) -> None:
    """List the trainings that run, are paused, or were stopped or killed; `adapt --resume JOB` goes on with one."""
    if context.invoked_subcommand is not None:
        return
    with one_sentence_errors(as_json=as_json):
        stored = open_store().jobs
        found = [job.to_dict() for job in stored.list()]
        for sentence in stored.damaged():
            print_note(sentence)
        for job in found if as_json else ():
            print_json({"event": "stored_job"} | job)
        if as_json:
            return
        if not found:
            out.print("No training runs, is paused or was interrupted.")
            return
        rows = [
            [
                *(job[key] for key in ("id", "adapter", "kind", "state")),
                percent(job["progress"], 0),
                gigabytes(job["size"]),
                printable(job["begun"][:16].replace("T", " ")),
            ]
            for job in found
        ]
        print_table(["job", "adapter", "command", "state", "done", "size", "begun (UTC)"], rows)


@app.command()
def remove(
    job: Annotated[str, typer.Argument(metavar="JOB", help="Job, as `sebp-edge jobs` lists it.")], as_json: Json = False
) -> None:
    """Delete a job with its checkpoint; versions that it has saved stay."""
    with one_sentence_errors(as_json=as_json):
        open_store().jobs.remove(job)
        if as_json:
            print_json({"event": "removed_job", "id": job})
        else:
            out.print(f"The job {job} is deleted.")
