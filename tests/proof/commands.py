"""What the commands of told/*.txt print, and the help of all commands.

A line is a command; with [--json] it is run without and with that. In brackets is what happens between commands.
"""

import re
import shlex
import shutil
from pathlib import Path

from materials import sentences, write_notes, write_recipe
from placeholders import NOTES, TOLD
from recorder import run_command

EARLIER = Path(__file__).parents[1] / "store"  # where stores of earlier versions are


def record_story(name: str, folder: Path, work: Path, placeholders) -> dict:
    """Returns what the commands of a file print, in order, and which files they leave."""
    write_notes(folder / "notes", NOTES)
    write_recipe(folder / "quick.toml")
    write_recipe(folder / "weak.toml", learning_rate=1e-9, epochs=1)
    model, found = str(work / "models" / "llama"), {}
    meanings = {"<training>": "--model <model> --recipe quick.toml --device cpu", "<model>": model}
    meanings["<earlier>"] = str(EARLIER / "saved_by_0_1_0" / "model")

    def tell(line: str, told: object) -> None:
        again = sum(known.partition(" #")[0] == line for known in found)
        found[f"{line} #{again + 1}" if again else line] = told

    for line in (TOLD / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        match line.strip("[]").split(" ") if line.startswith("[") else ():
            case ["files"]:
                tell(line, placeholders.put(files_of(folder / "data")))
            case ["more", "notes"]:
                write_notes(folder / "notes", [*NOTES, *sentences(6, seed=7)])
            case ["pause", name]:
                meanings["<job>"] = pause_a_training(folder, model, name)
            case ["store", store]:
                shutil.rmtree(folder / "data", ignore_errors=True)
                shutil.copytree(EARLIER / store / "adapters", folder / "data" / "sebp-edge" / "adapters")
            case _:
                for written in dict.fromkeys((line.replace(" [--json]", ""), line.replace("[--json]", "--json"))):
                    command = written
                    for word, meaning in meanings.items():
                        command = command.replace(word, meaning)
                    code, *streams = run_command(shlex.split(command))
                    tell(written, [code, *map(placeholders.put_in_lines, streams)])
    return found


def files_of(folder: Path) -> list[str]:
    """Returns the names of all files below a folder, with their permissions; checkpoints are numbered by the time."""
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if not path.is_dir()}
    names = {re.sub(r"(/\.jobs/\w+)/\d+\.", r"\1/<count>.", name): path for name, path in found.items()}
    return sorted(f"{oct(path.stat().st_mode)[-3:]} {name}" for name, path in names.items())


def pause_a_training(folder: Path, model: str, name: str) -> str:
    """Pauses a training in the default store once it has done three steps; returns the id of its job."""
    from sebp_edge import Personalizer, Recipe
    from sebp_edge.errors import Paused

    events = []

    def pause(event) -> None:
        events.append(event)
        if sum(one.event == "step" for one in events) == 3:
            app.pause()

    app = Personalizer(model, recipe=Recipe.load(str(folder / "quick.toml")), device="cpu", on_event=pause)
    try:
        app.adapt(folder / "notes", name=name)
    except Paused:
        return next(one.id for one in events if one.event == "job_started")
    raise RuntimeError("the training was not paused")


def record_help() -> dict:
    """Returns the help of every command and group, and what the command line says without a command."""
    shown = {" ".join(path): run_command([*path, "--help"]) for path, _ in walk()}
    shown["without a command"] = run_command([])
    return {name: [code, *(output + errors).splitlines()] for name, (code, output, errors) in shown.items()}


def walk(command=None, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], object]]:
    """Returns the path of each command and group of the command line, with what typer makes of it."""
    if command is None:
        import typer

        from sebp_edge.cli.commands import app

        command = typer.main.get_command(app)
    below = getattr(command, "commands", {})
    return [(path, command)] + [each for name, one in below.items() for each in walk(one, (*path, name))]


def commands_without_transcript(story: dict) -> list[str]:
    """Returns which commands are never done, or never refused, in a story; with --json if they have it."""
    missing = []
    for path, command in walk():
        if hasattr(command, "commands") and not command.invoke_without_command:
            continue
        words = {"--json"} & {option for parameter in command.params for option in parameter.opts}
        calls = [(line.split(), shown[0]) for line, shown in story.items() if not line.startswith("[")]
        codes = {code for line, code in calls if line[: len(path)] == [*path] and words <= {*line}}
        if path != ("serve",) and not codes & {0, 3}:
            missing.append(f"{' '.join(path)}, done")
        if not codes - {0, 3}:
            missing.append(f"{' '.join(path)}, refused")
    return missing
