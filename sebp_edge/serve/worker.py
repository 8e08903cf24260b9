"""The worker's entry: `python -m sebp_edge.serve.worker PID` of the supervisor. Arms its ends, then imports torch."""

import os
import sys
import traceback

from sebp_edge.basics.parents import end_with_parent
from sebp_edge.serve.streams import Outbox, take_streams
from sebp_edge.serve.tasks import Tasks


def main() -> None:
    """Works for the supervisor until that ends it."""
    end_with_parent(int(sys.argv[-1]))
    descriptors = take_streams()
    outbox = Outbox(descriptors[1], lambda: os._exit(0))
    tasks = Tasks(descriptors[0], outbox)
    try:
        from sebp_edge.serve.worker_tasks import Worker
    except (ImportError, OSError) as error:  # a damaged installation, or an app that was frozen without a library
        outbox.send({"tells": "broken", "why": f"{type(error).__name__}: {error}"})
        outbox.drain(1.0)
        raise
    try:
        Worker(tasks, outbox).run()
    finally:
        traceback.print_exc()
        os._exit(1)  # at once, though the thread of jobs may wait for an answer


if __name__ == "__main__":
    main()
