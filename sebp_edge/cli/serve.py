"""`sebp-edge serve`: serves an app in any language. `cli.main` takes a shorter way there, with fewer imports."""

from sebp_edge.serve.__main__ import main


def serve() -> None:
    """Serve an app in any language: requests, answers and events as lines of JSON on standard input and output.

    The app starts this command as its child. It ends with its input, and with the app. The guide for developers,
    sebp_edge/serve/README.md, has the protocol.
    """
    main()
