"""Every speed figure of docs/performance.md, one after another: ``make bench``, or ``python -m benchmarks [NAME ...]``.

One thread each, so that figures compare on any machine; ``--list`` names them. Those that take long (off_policy trains for
more than half an hour, a step of SmolLM2 takes its time) run only when named.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
COMMANDS: dict[str, list[str]] = {
    "household": ["household.py"],
    "engine": ["engine.py"],
    "learner": ["learner.py", "--threads", "1"],
    "objectives": ["objectives.py", "--threads", "1", "--repeats", "3"],
    "memory": ["memory.py"],
    "whole_step": ["whole_step.py"],
    "overlap": ["overlap.py", "--seconds", "10"],
    "engine_smollm2_bfloat16": ["engine.py", "--smollm2", "--dtype", "bfloat16"],
}
NAMED_ONLY: dict[str, list[str]] = {
    "off_policy": ["off_policy.py"],
    "matched_seeds": ["matched_seeds.py"],
    "engine_smollm2": ["engine.py", "--smollm2"],
    "overlap_smollm2": ["overlap.py", "--smollm2", "--dtype", "bfloat16", "--seconds", "15", "--repeats", "2"],
    "whole_step_smollm2": ["whole_step.py", "--smollm2"],
    "whole_step_smollm2_bfloat16": ["whole_step.py", "--smollm2", "--dtype", "bfloat16"],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all but the long ones")
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    known = COMMANDS | NAMED_ONLY
    if arguments.list:
        print("\n".join(known))
        return 0
    unknown = [name for name in arguments.names if name not in known]
    if unknown:
        parser.error(f"unknown benchmark {unknown[0]!r}; known: {', '.join(known)}")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    failed = []
    for name in arguments.names or COMMANDS:
        command = [sys.executable, str(HERE / known[name][0]), *known[name][1:]]
        print(f"\n## {name}: python benchmarks/{' '.join(known[name])}", flush=True)
        began = time.monotonic()
        status = subprocess.run(command, env=environment, check=False).returncode
        print(f"({time.monotonic() - began:.0f} s)", flush=True)
        if status:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
