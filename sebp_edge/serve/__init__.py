"""`sebp-edge serve`: the SDK for apps in any language, as lines of JSON on the standard input and output.

Internal: import from `sebp_edge` or `sebp_edge.research`.

    app  <-- lines of JSON -->  supervisor  <-- lines of JSON -->  worker

__main__         moves the protocol's streams away, then starts the supervisor
supervisor       one loop: requests, what the others tell, the clock; has no torch
executor         the job that runs, and the worker's life
methods          what the protocol offers, by name
messages         requests and results; refusals with stable codes
served_jobs, journal
                 states of jobs; what survives: their numbered events
store_methods    methods about saved adapters, models and reports; what the store keeps of a job
processes        the processes of the supervisor
planner          the short process without torch that quotes, searches, plans or inspects
worker           the worker's entry, which has no torch yet; tasks, what it is to do; worker_tasks, how it does that
streams          descriptors, lines in, lines out
parent_process   no process outlives the one that started it
client           a client in Python; client.js is one for Node, with the types in client.d.ts and messages.d.ts
mcp_server       tools for assistants, on a client's server
http             for apps that speak HTTP, on a client's server
"""
