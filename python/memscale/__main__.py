"""``python -m memscale``: see memscale.cli."""

from __future__ import annotations

import sys

from memscale.cli import main

if __name__ == "__main__":
    sys.exit(main())
