"""What this machine has, and how much of it this process uses; independent of models and trainings.

Internal: import from `sebp_edge` or `sebp_edge.research`.

devices      the device to run on: dtype, memory, speed, and what to do when memory runs out
packages     the versions of the libraries that compute
host         the host's memory, within the limits of containers, and what is known of GPUs without torch
process      the memory that this process uses, and a cap on what torch may allocate on a GPU
captures     captures work on a GPU as a CUDA graph, and cleans up after a capture that failed
locked_memory  host memory that a GPU copies, and reads over the bus, by itself
side_copies  copies between host and GPU in parallel with computing
stacks       the memory that a GPU's driver reserves for the stacks of its threads, part of what `process` measures
politeness   how a training gives way to other programs: the value, low priority, battery power, what uses the GPU
crowding     lets threads sleep while they wait for each other, if other programs need the cores
"""
