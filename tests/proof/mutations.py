"""Makes 36 mistakes in a copy of the checkout, one at a time, and runs the tests that are expected to catch each.

    python tests/proof/mutations.py CHECKOUT [--only WORD...] [--python PYTHON]

A mistake that no test catches survives: that test is missing. The tests of each must pass without it, and a fragment
that is not in exactly one file is an error. Torch is imported once; each run of pytest is forked from there.
"""

import argparse
import gc
import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from checkout import link_package

FOLDERS = ("sebp_edge", "kernels/ops")
PASSED, FAILED = 0, 1  # exit codes of pytest
# Some mistakes make a loop that never ends.
MAX_SECONDS = 600


class Mutation(NamedTuple):
    """A mistake: code, what replaces it, and the tests that catch it: folders or files, and an expression for -k."""

    name: str
    code: str
    mistake: str
    tests: str
    expression: str


MUTATIONS = [
    Mutation(*fields)
    for fields in (
        # Rows and losses.
        ("active rows off by one", "positions_T <= lengths_B[:, None]", "positions_T < lengths_B[:, None]",
         "tests/sparse", "losses_and_gradients_are_the_padded_dense_ones"),
        ("labels not shifted", "shifted_BT[:, :-1] = labels_BT[:, 1:]", "shifted_BT[:, :-1] = labels_BT[:, :-1]",
         "tests/sparse", "losses_and_gradients_are_the_padded_dense_ones"),
        ("padding on the left taken for right", "and not is_right_padded(attention_mask_BT.cpu()):", "and False:",
         "tests/rows", "padding_before_real_tokens"),
        ("a prompt has loss", "spans = [(len(content.prompt), len(text))]", "spans = [(0, len(text))]",
         "tests/lessons", "only_the_completion_has_loss"),
        ("scaling of LoRA lost", "torch.addmm(out, down, lora_B.T, beta=0, alpha=scaling, out=out)",
         "torch.addmm(out, down, lora_B.T, beta=0, out=out)", "tests/ops", "outputs_and_gradients_are_pefts"),
        ("scaling of a gradient lost", "torch.addmm(up, dout, lora_B, beta=0, alpha=scaling, out=up)",
         "torch.addmm(up, dout, lora_B, beta=0, out=up)", "tests/ops", "outputs_and_gradients_are_pefts"),
        ("scaling lost in a merge", "torch.addmm(weight.float(), lora_B, lora_A, alpha=self.factors.scale)",
         "torch.addmm(weight.float(), lora_B, lora_A)", "tests/export", "merged"),
        # The training.
        ("cosine without its warm-up", "math.cos(math.pi * (step - warmup) / max(1, total_steps - warmup))",
         "math.cos(math.pi * step / max(1, total_steps))", "tests/training", "learning_rates_warm_up"),
        ("one epoch more than patience", "progress.best_epoch < self.recipe.patience",
         "progress.best_epoch <= self.recipe.patience", "tests/training", "stops_early"),
        ("the last state for the best", "best = not losses or loss < progress.best_loss", "best = True",
         "tests/training", "stops_early"),
        ("steps of AdamW not counted", "self.step.add_(1)", "self.step.fill_(1)", "tests/ops", "equals_torchs"),
        ("the seed of an adapter ignored", "torch.manual_seed(seed or 0)", "torch.manual_seed(0)",
         "tests/models", "only_for_equal_seeds"),
        ("the seed of a draw ignored", "blake2b(str(seed).encode() + digests[own])", "blake2b(digests[own])",
         "tests/lessons", "the_draw_depends_on_the_seed"),
        ("another seed learns on", "if record.seed != seed:", "if False:",
         "tests/test_starting_over.py", "another_seed_starts_over"),
        # What is judged, and kept.
        ("a split that leaks", "if sides[each.document] == name]", "if sides[each.document] == name or name == TRAIN]",
         "tests/lessons", "every_document_is_in_exactly_one_part or all_examples_of_a_document"),
        ("near-duplicates that are none", "(shared >= _NEAR_SHARE * larger)", "(shared > larger)",
         "tests/lessons", "edited_copies_are_near_duplicates"),
        ("copies are learnt twice", "elif (key := _digest(content)) in self._seen:",
         "elif (key := _digest(content)) is None:",
         "tests/reading", "duplicates_are_dropped"),
        ("the level of the gate", "_LEVEL = 0.985", "_LEVEL = 0.95",
         "tests/training", "bound or quantiles or margin or active_version"),
        ("the margin of the gate", "result.gain.lower >= self.margin", "result.gain.lower >= 0",
         "tests/training", "margin"),
        ("worse than the active version", "over_active.lower >= -TOLERANCE", "over_active.lower >= -1",
         "tests/training", "active_one_is_better"),
        ("worse than the best version", "over_best.lower >= -TOLERANCE", "over_best.lower >= -1",
         "tests/training", "worse_than_the_best"),
        ("a refit that is worse", "if loss is None or loss < judged_loss:", "if loss is None or loss > 0:",
         "tests/training", "judged_state"),
        # Memory.
        ("a budget without the process", "return Footprint(**parts, context=context, reserve",
         "return Footprint(**parts, context=0, reserve",
         "tests/memory", "the_peak_of_a_process_on_the_cpu or the_process_alone_exceeds"),
        ("a plan above its budget", "if choice.peak <= budget.size:", "if choice.footprint.minimum <= budget.size:",
         "tests/memory", "a_3b_model_and_a_text"),
        # Stops, and files.
        ("a stop that raises twice", "if self._has_raised:", "if False:",
         "tests/machine", "raised_only_once"),
        ("a stop string that is shown", "self._emit(min(found)[1])", "self._emit(len(self._pending))",
         "tests/models", "a_stop_string"),
        ("a file that is half written", "temporary.replace(path)", "path.write_text(text, encoding='utf-8')",
         "tests/store", "power_cut"),
        ("no lock", "while not lock_descriptor(descriptor, blocking=False):", "while False:",
         "tests/store", "at_the_same_time"),
        ("a rollback that goes nowhere", "write_activated(self.folder, earlier)",
         "write_activated(self.folder, [now, *earlier])", "tests/store", "rollback or rolls_back or history"),
        ("an overtaken version is activated", "if now not in (None, before):", "if False:",
         "tests/store", "only_after_the_one_that_it_was_compared_with"),
        ("forget leaves a version", "removed = {*unlisted, *(version.number", "removed = {*(version.number",
         "tests/run", "of_which_nothing_is_known"),
        ("an archive that has changed", "if found.hexdigest() != listed.sha256:", "if False:",
         "tests/store", "damaged_archive"),
        # Exact or refused.
        ("trials tolerate too much", "difference <= (FULL_PRECISION if is_full else tolerance)",
         "difference <= tolerance", "tests/patches", "tolerance"),
        ("hooks that came are not seen", '"hooks": _compare_hooks(called),', "",
         "tests/sparse", "a_model_changed_between_steps"),
        ("the largest graph for each batch", "return min(fitting, key=lambda bucket: bucket.cost",
         "return max(fitting, key=lambda bucket: bucket.cost", "tests/training", "graph or warm"),
        ("a quantised weight off by one", "out.sub_(8).mul_(_fp16(blocks, 0))", "out.sub_(7).mul_(_fp16(blocks, 0))",
         "tests/gguf", "random_blocks"),
        ("a rope factor that is not written", 'writer.add_rope_scaling_factor(float(rope["factor"]))', "pass",
         "tests/export", "read_back"),
    )
]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--only", nargs="*", default=[""], help="mutations with one of these words in their names")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--copy", type=Path, help=argparse.SUPPRESS)  # set in the process that does the work
    given = parser.parse_args()
    chosen = [one for one in MUTATIONS if any(word in one.name for word in given.only)]
    if given.copy:
        return run_all(given.copy, chosen)
    with tempfile.TemporaryDirectory(prefix="mutations-") as temporary:
        copy = Path(temporary, "checkout")
        shutil.copytree(given.checkout, copy, ignore=shutil.ignore_patterns(".git", "__pycache__", ".pytest_cache"))
        link_package(copy, Path(temporary, "site"))
        # The current folder is not the copy, whose package would be found without its ops.
        settings = {
            "PYTHONPATH": os.pathsep.join([str(Path(temporary, "site")), str(Path(__file__).parent)]),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TRITON_INTERPRET": "1",
        }
        command = [given.python, __file__, str(copy), "--copy", str(copy), "--only", *given.only]
        return subprocess.run(command, env=os.environ | settings, cwd=temporary, check=False).returncode


def run_all(copy: Path, mutations: list[Mutation]) -> int:
    """Runs the tests of each mutation without it and with it; returns 1 unless all are caught."""
    places = {one.name: place_of(one, copy) for one in mutations}
    gc.disable()
    for name in ("torch", "transformers.models.llama.modeling_llama", "peft", "typer", "rich.console", "pytest"):
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    bad = 0
    for mutation in mutations:
        begin, path = time.perf_counter(), places[mutation.name]
        if run_tests(mutation, copy) != PASSED:
            outcome = f"ERROR: its tests fail without it, or there are none:\n{Path('pytest.log').read_text()[-800:]}\n"
        else:
            original = path.read_text(encoding="utf-8")
            path.write_text(original.replace(mutation.code, mutation.mistake), encoding="utf-8")
            outcome = {PASSED: "SURVIVED", FAILED: "caught"}.get(
                run_tests(mutation, copy), "ERROR: the tests did not run"
            )
            path.write_text(original, encoding="utf-8")
        bad += outcome != "caught"
        print(f"{mutation.name}: {outcome} ({time.perf_counter() - begin:.0f} s)", flush=True)
    print(f"{len(mutations) - bad} of {len(mutations)} mutations are caught.")
    return bool(bad)


def place_of(mutation: Mutation, copy: Path) -> Path:
    """Returns the one file with the mutation's code."""
    files = [path for folder in FOLDERS for path in sorted((copy / folder).rglob("*.py"))]
    found = [path for path in files for _ in range(path.read_text(encoding="utf-8").count(mutation.code))]
    if len(found) != 1:
        sys.exit(f"{mutation.name!r} needs another fragment: {mutation.code!r} is there {len(found)} times.")
    return found[0]


def run_tests(mutation: Mutation, copy: Path) -> int:
    """Runs a mutation's tests in a process that is forked from this one; returns pytest's exit code."""
    process = os.fork()
    if process:
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    import pytest

    signal.alarm(MAX_SECONDS)
    with Path("pytest.log").open("w") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-k", mutation.expression]
    # Plugins were imported with the libraries.
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    os._exit(int(pytest.main([*(str(copy / path) for path in mutation.tests.split()), *options])))


if __name__ == "__main__":
    sys.exit(main())
