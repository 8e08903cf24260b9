"""`sebp-edge serve --http`: the same server for apps that speak HTTP, on this machine only.

Internal: import from `sebp_edge` or `sebp_edge.research`.

    apps  <-- HTTP -->  door  <-- lines of JSON -->  supervisor

door            listens, lets in who has the token, and ends with the supervisor
openai_api      answers requests of OpenAI's protocol; openai_form translates them
rpc             the protocol's own methods, and events for several apps
streaming       bodies, JSON, streams of events, apps that disconnect
"""
