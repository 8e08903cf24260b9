"""What every room uses.

Internal: import from `sebp_edge` or `sebp_edge.research`.

children        starts programs that end with this process, and kills them
files           reads small files, writes files whole or not at all
flash_attention sizes of attention's kernels, for the operations and the memory plan
labels          the label of tokens without loss
interruptions   handles Ctrl-C, SIGTERM and SIGHUP during work that must end cleanly
out_of_memory   whether an error says that memory ran out
parents         ends a child process together with the process that started it
schema          reads schema.json, the JSON Schema of all messages
stopping        lets one thread stop a call in another
units           formats sizes, durations, shares and counts for people
weights         reads safetensors files of strangers, refuses NaN and infinity, and writes such files
version         the version of this package
pages           what the HTML pages share
"""
