"""Tells PyInstaller to collect modules that are imported on first use, and data files."""

from PyInstaller.utils.hooks import collect_data_files, collect_submodules

hiddenimports = collect_submodules("sebp_edge", filter=lambda name: not name.startswith("sebp_edge.cli.frozen"))
# Ours are the recipes, the bundled model, the configs of known models, the choices measured on GPUs, the report's page
# and the probe of general text. PEFT makes an adapter's model card from huggingface_hub's template.
datas = collect_data_files("sebp_edge") + collect_data_files("huggingface_hub", includes=["templates/*.md"])
# Triton compiles kernels from their source.
module_collection_mode = {"sebp_edge.ops.gpu": "pyz+py"}
