"""For PyInstaller: modules that are imported when they are used, and files that no import names."""

from PyInstaller.utils.hooks import collect_data_files, collect_submodules

hiddenimports = collect_submodules("sebp_edge", filter=lambda name: not name.startswith("sebp_edge.frozen"))
# Recipes, the bundled model, known models' sizes, what is fastest on a GPU, the report's page; and what PEFT, when it
# saves an adapter, writes its model card from.
datas = collect_data_files("sebp_edge") + collect_data_files("huggingface_hub", includes=["templates/*.md"])
# Triton compiles kernels from their source.
module_collection_mode = {"sebp_edge.ops.gpu": "pyz+py"}
