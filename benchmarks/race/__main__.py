"""`python benchmarks/race`: see main.py."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # where `race` and `machine` are found

from race.main import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
