"""`python -m gcore`: the command line, where `gcore` is another program."""

import sys

from gcore.cli import main

if __name__ == "__main__":
    sys.exit(main())
