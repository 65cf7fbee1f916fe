"""How far the reading of a past day is."""

import sys


def tell_tenth(source: object, done: int, number: int) -> None:
    """Called after each part: says it whenever another tenth of them is done."""
    if done * 10 // number > (done - 1) * 10 // number:
        print(f"read from {source}: {done / number:.0%}", file=sys.stderr)
