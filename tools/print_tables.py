"""Prints the generated tables of docs/config.md and docs/hardware.md.

Usage: print_tables.py config|hardware
"""

from __future__ import annotations

import sys

from memscale import config, hardware

TABLES = {"config": config.markdown, "hardware": hardware.markdown}


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or arguments[0] not in TABLES:
        print(__doc__, file=sys.stderr)
        return 2
    print(TABLES[arguments[0]]())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
