"""Makes a frozen app, if it is started as one, the child process that renders chat templates; runs before the app."""

import os
import sys

if sys.argv[1:] == ["--sebp-edge-renders-templates"]:
    from sebp_edge.texts.templates import serve

    serve()
    os._exit(0)
