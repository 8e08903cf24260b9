"""What this machine has, and what this process takes of it. Nothing here knows of models or trainings.

Internal: import from `sebp_edge` or `sebp_edge.research`.

- `devices`: the device to run on, its number format, memory and speed; what to do when memory has run out.
- `container`: the memory that a container leaves its processes, which `devices` takes into account.
- `process`: what this process holds of a device's memory, and a cap on what torch may allocate of a GPU's.
- `stacks`: what a GPU's driver holds for the stacks of its threads, part of what `process` measures.
"""
