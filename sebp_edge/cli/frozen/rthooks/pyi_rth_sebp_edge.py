"""Makes a frozen app, if it is started as one, a child process of this package's; runs before the app."""

import os
import sys

if sys.argv[1:] == ["--sebp-edge-renders-templates"]:
    from sebp_edge.lessons.templates import serve

    serve()
    os._exit(0)
if sys.argv[1:] == ["--sebp-edge-serves"]:
    from sebp_edge.serve.__main__ import main

    main()
if sys.argv[1:2] == ["--sebp-edge-plans"]:
    from sebp_edge.serve.planner import main

    main()
    os._exit(0)
if sys.argv[1:2] == ["--sebp-edge-works"]:
    from sebp_edge.serve.worker import main

    main()
if sys.argv[1:2] == ["--sebp-edge-runs"]:
    from sebp_edge.basics.parents import run

    run(int(sys.argv[2]), sys.argv[3:])
