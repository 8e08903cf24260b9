"""`python -m sebp_edge.serve`, and `sebp-edge serve`: moves the protocol's streams away before anything else."""

from sebp_edge.serve.streams import take_streams


def main() -> None:
    """Serves the app that started this process, on its standard input and output."""
    descriptors = take_streams()
    from sebp_edge.serve.supervisor import Supervisor

    Supervisor(descriptors).run()


if __name__ == "__main__":
    main()
