"""`sebp-edge doctor`: shows what this machine has and what can run on it."""

from dataclasses import asdict

import typer
from rich.markup import escape

from sebp_edge.cli.console import one_sentence_errors, out, print_json, quick_imports
from sebp_edge.cli.options import Json


def doctor(as_json: Json = False) -> None:
    """Show what this machine has and what can run on it. Exit code 1 if there is a problem."""
    with one_sentence_errors(as_json=as_json):
        with quick_imports():
            from sebp_edge.cli.doctor_checks import examine

        findings = examine()
        for finding in findings:
            if as_json:
                print_json({"event": "finding", **asdict(finding)})
                continue
            mark = "[yellow]![/]" if finding.problem else "[green]✓[/]"
            out.print(f"{mark} [bold]{finding.subject:<13}[/] {escape(finding.state)}")
            if finding.problem:
                out.print(f"  {'':<13} {escape(finding.problem)}", style="yellow")
        if any(finding.problem for finding in findings):
            raise typer.Exit(1)
