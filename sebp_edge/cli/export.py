"""`sebp-edge export NAME --to FOLDER`: writes an adapter for other programs."""

from pathlib import Path
from typing import Annotated

import typer

from sebp_edge.basics.units import percent
from sebp_edge.cli.base_model import personalizing
from sebp_edge.cli.console import one_sentence_errors, out, print_json, print_table
from sebp_edge.cli.options import AdapterModel, Json, Version, path_option
from sebp_edge.run.base_models import find_base_model
from sebp_edge.store.adapter_store import AdapterStore


def export(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the adapter, or the folder of one, with a slash.")
    ],
    to: Annotated[Path, path_option("New folder to write.", "FOLDER")],
    format: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="gguf, ollama, merged, peft, gguf-lora or mlx.")
    ] = "gguf",
    quant: Annotated[
        str | None,
        typer.Option(
            "--quant",
            metavar="QUANT",
            help="For gguf and ollama: q4_0, q4_1, q5_0, q5_1, q8_0, bf16, f16, by default q8_0; "
            "q4_k_m and the like with llama-quantize on the path; smallest, with --texts.",
        ),
    ] = None,
    version: Version = None,
    model: AdapterModel = None,
    texts: Annotated[
        list[Path] | None,
        path_option(
            "File or folder with your texts, to measure how much of the gain the files keep; can be repeated.", "PATH"
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Export an adapter for Ollama, llama.cpp, LM Studio, mlx-lm, transformers or PEFT, and read it back.

    FOLDER must not exist. It is written whole or not at all.
    """
    with one_sentence_errors(as_json=as_json, takes_time=True):
        store = AdapterStore()
        base = model or find_base_model(store, store.find(name, version).record)
        with personalizing(as_json, model=base, store=store, device="cpu") as personalizer:
            result = personalizer.export(name, to, format=format, quant=quant, version=version, texts=texts or None)
        if as_json:
            print_json({"event": "result", "result_of": "export"} | result.to_dict())
        else:
            _show(result, on_texts=bool(texts))


def _show(result, *, on_texts: bool) -> None:
    """Prints the figures and the summary; leaves out that of the base model on general text, which shows no gain."""
    if result.merged_into:
        out.print(f"merged into    {result.merged_into}", markup=False)
    if result.mean_difference is not None:
        out.print(
            f"read back      log-probabilities differ by {result.mean_difference:.1g} on average, by up to "
            f"{result.largest_difference:.1g}; the same likeliest token for {percent(result.same_likeliest)}"
        )
    if result.loss is not None:
        where = "your texts" if on_texts else "general text, not on yours (--texts measures on yours)"
        base = f"{result.loss_base:.3f} base model, " if on_texts else ""
        out.print(
            f"loss           {base}{result.loss_adapter:.3f} adapter, {result.loss:.3f} these files: how wrong each "
            f"predicts, in nats per token, on {where}"
        )
    if result.gain_kept:
        columns = ["quant", "rounded base model", "with the adapter", "gain kept"]
        rows = []
        for one in result.gain_kept:
            share = "-" if one.share is None else percent(one.share)
            rows.append([one.quant, f"{one.loss_base:.3f}", f"{one.loss:.3f}", share])
        print_table(columns, rows)
    for warning in result.warnings:
        out.print(f"[yellow]warning:[/] {warning}")
    out.print(result.summary, style="green", markup=False)
