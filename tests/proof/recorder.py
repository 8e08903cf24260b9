"""Records what a configuration computes, prints and writes, as hashes of what does not depend on time and machine."""

import inspect
import io
import json
import re
import sys
import tarfile
from hashlib import sha256
from pathlib import Path

# Files whose content is not compared, with the reason.
NOT_COMPARED = {
    "documents.json": "its layout may change; what it says is compared as `adapters show` lists the documents",
    "archive.json": "sizes and checksums of an archive's files, which have times in them",
}
# Keys whose values depend on time.
TIMES = {"seconds", "seconds_left", "training_seconds", "tokens_per_second", "created", "time", "job"}
# Keys whose values depend on what this process, or other programs, use of the memory.
MEMORY = {*("budget", "context", "reserve", "peak", "predicted"), *("peak_memory_bytes", "predicted_peak_bytes")}
# Times, dates, rates and memory in sentences and pages.
MEASURED = re.compile(
    r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d[\d.+:Z]*)?|"
    r"\d[\d.,]* ?(s|ms|min|h|seconds?|minutes?|tokens/s|tokens per second|bytes|[kMG]B)\b"
)


# Activates an adapter whatever the gate says.
ANYWAY = "--activate-anyway"


class Recorder:
    """What one configuration leaves; `found` has a hash of each thing, by kind: adapters, losses, JSON lines ..."""

    def __init__(self, folder: Path, work: Path):
        self.folder = folder
        self.found: dict[str, dict[str, str]] = {}
        self._work = work
        self._commands = 0

    def model(self, name: str) -> str:
        """Returns the folder of a small random model."""
        return str(self._work / "models" / name)

    def command(self, *arguments: str) -> None:
        """Runs the command line in this process; records its exit code, JSON lines, losses and messages."""
        self._commands += 1
        label = f"{self._commands} {' '.join(arguments[: 2 if arguments[0] == 'adapters' else 1])}"
        code, output, errors = run_command(arguments)
        is_json = [line.startswith("{") for line in output.splitlines()]
        self.json_lines(label, [json.loads(line) for line in output.splitlines() if line.startswith("{")])
        text = "".join(line + "\n" for line, skip in zip(output.splitlines(), is_json, strict=True) if not skip)
        self.message(label, f"exit code {code}\n{text}{errors}")

    def message(self, label: str, text: str) -> None:
        """Records what a person reads."""
        self._note("messages", label, self._stable(text))

    def json_lines(self, label: str, lines: list[dict]) -> None:
        """Records each line by its number and event, and all losses in it; those about progress are left out."""
        lines = [self._stable(line) for line in lines if line["event"] not in ("preparing", "progress")]
        for number, line in enumerate(lines):
            if line["event"] == "error":
                print(f"{self.folder.name}, {label}: {line['message']}", flush=True)
            self._note("json lines", f"{label}, line {number}: {line['event']}", line)
        self._note("losses", label, losses_in(lines))

    def tensors(self, label: str, tensors: dict) -> None:
        """Records the bits of tensors by name."""
        for name, tensor in tensors.items():
            self._note("adapter", f"{label}: {name}", tensor.detach().contiguous().numpy().tobytes())

    def documents(self) -> None:
        """Records the list of documents of each version in the default store."""
        _, output, _ = run_command(["adapters", "list", "--json"])
        for saved in map(json.loads, output.splitlines()):
            name, version = saved["name"], str(saved["version"])
            shown = json.loads(run_command(["adapters", "show", name, "--version", version, "--json"])[1])
            self._note("documents", f"{name} {version}", self._stable(shown["manifest"]))

    def files(self) -> None:
        """Records each file of the folder: its name, its permissions, and its content unless it may differ."""
        for path in sorted(self.folder.rglob("*")):
            if path.is_file():
                kind = "adapter" if path.suffix in (".safetensors", ".gguf") else "files"
                content = self._content(path.name, path.read_bytes())
                self._note(kind, path.relative_to(self.folder).as_posix(), [oct(path.stat().st_mode), content])

    def _content(self, name: str, content: bytes):
        """Returns what is compared of a file."""
        if Path(name).name in NOT_COMPARED:
            return "not compared"
        if name.endswith(".json"):
            return self._stable(json.loads(content))
        if name.endswith(".tar"):
            with tarfile.open(fileobj=io.BytesIO(content)) as archive:
                members = [(one.name, one.mode, archive.extractfile(one).read()) for one in archive if one.isfile()]
            return [(inner, mode, self._content(inner, data)) for inner, mode, data in members]
        if name.endswith(".safetensors"):  # the order of the keys in its header is random
            begin = 8 + int.from_bytes(content[:8], "little")
            return [json.loads(content[8:begin]), sha256(content[begin:]).hexdigest()]
        if name.endswith(".gguf"):
            return sha256(content).hexdigest()
        return self._stable(content.decode(errors="backslashreplace"))

    def _stable(self, value, left_out=TIMES | MEMORY):
        """Returns a value without what is different in each run; a plan for an absent GPU depends on no memory here."""
        if isinstance(value, dict):
            left_out = TIMES if value.get("gpu") else left_out
            return {key: self._stable(one, left_out) for key, one in value.items() if key not in left_out}
        if isinstance(value, list | tuple):
            return [self._stable(one, left_out) for one in value]
        if isinstance(value, str):
            return MEASURED.sub("#", value.replace(str(self.folder), "HERE").replace(str(self._work), "WORK"))
        return value

    def _note(self, kind: str, key: str, value) -> None:
        content = value if isinstance(value, bytes) else json.dumps(value, sort_keys=True).encode()
        self.found.setdefault(kind, {})[key] = sha256(content).hexdigest()[:16]
        with (self._work / "found" / f"{self.folder.name}.txt").open("a", encoding="utf-8") as log:
            log.write(f"{kind} | {key} | {'bits' if isinstance(value, bytes) else content.decode()}\n")


def losses_in(value, key: str = "") -> list:
    """Returns all values whose key says that they are losses, in order."""
    if isinstance(value, dict):
        return [loss for name, one in value.items() for loss in losses_in(one, name)]
    if isinstance(value, list):
        return [loss for one in value for loss in losses_in(one, key)]
    return [value] if "loss" in key and isinstance(value, float) else []


def anyway() -> str:
    """The argument of `adapt` that activates an adapter whatever the gate says, by the name that this checkout has."""
    from sebp_edge import Personalizer

    names = inspect.signature(Personalizer.adapt).parameters
    return next(name for name in ("activate_anyway", "keep_anyway") if name in names)


def run_command(arguments) -> tuple[int, str, str]:
    """Runs `sebp-edge` in this process; returns its exit code, output and errors."""
    from sebp_edge.cli import main

    arguments = [each if each != ANYWAY else f"--{anyway().replace('_', '-')}" for each in arguments]
    streams = sys.stdin, sys.stdout, sys.stderr, sys.argv
    output, errors = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    sys.stdin, sys.stdout, sys.stderr, sys.argv = io.StringIO(), output, errors, ["sebp-edge", *arguments]
    code = 0
    try:
        main()
    except SystemExit as exit:
        code = exit.code
    finally:
        sys.stdin, sys.stdout, sys.stderr, sys.argv = streams
    return code, output.buffer.getvalue().decode(), errors.buffer.getvalue().decode()
