"""`python -m smollm2 TEXT`: the model's answer on stdout, and how fast it came on stderr."""

from __future__ import annotations

import argparse
import os
import sys
import time


def main() -> int:
    """Answer, or complete, the text of the command line."""
    parser = argparse.ArgumentParser(prog="python -m smollm2", description=__doc__)
    parser.add_argument("text", nargs="?", default="Why is the sky blue?")
    parser.add_argument("--complete", action="store_true", help="go on from the text")
    parser.add_argument("--limit", type=int, default=96, help="tokens at most (default: 96)")
    options = parser.parse_args()

    from smollm2.writer import Writer

    writer = Writer()
    ways = {True: writer.complete, False: writer.answer}
    ready, times = since_start(), []
    for piece in ways[options.complete](options.text, limit=options.limit):
        times.append(since_start())
        print(piece, end="", flush=True)
    print()
    if times:
        say = [f"ready {ready:.2f} s after the process started", f"first token {times[0]:.2f} s"]
        if len(times) > 1:
            rate = (len(times) - 1) / (times[-1] - times[0])
            say.append(f"{len(times)} tokens, {rate:.1f} tokens/s from the first to the last")
        print("; ".join(say), file=sys.stderr)
    return 0


def since_start() -> float:
    """Seconds since the kernel started this process."""
    with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
        ticks = int(file.read().rsplit(")", 1)[1].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
