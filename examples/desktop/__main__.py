"""`python -m desktop` in the folder examples."""

import sys

from desktop.app import main

if __name__ == "__main__":
    sys.exit(main())
