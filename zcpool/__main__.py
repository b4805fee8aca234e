"""Run the command line: ``python -m zcpool``."""

import sys

from zcpool.cli import main

sys.exit(main())
