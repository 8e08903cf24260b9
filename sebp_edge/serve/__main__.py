"""`python -m sebp_edge.serve`, and `sebp-edge serve`: moves the protocol's streams away before anything else."""

from sebp_edge.basics.parents import starter
from sebp_edge.serve.streams import take_streams


def main() -> None:
    """Serves the app that started this process, on its standard input and output."""
    parent, descriptors = starter(), take_streams()
    from sebp_edge.serve.supervisor import Supervisor

    Supervisor(descriptors, parent).run()


if __name__ == "__main__":
    main()
