"""The household simulator against the real ALFWorld engine, on the same walks in the same run.

    python benchmarks/household.py [--games N] [--repeats R] [--rooms small|full] [--check]

Each repeat plays the same expert walks, padded with harmless actions, on both; medians over repeats of steps per second of CPU
time are printed, without and with the reset, and their ratio. ``--check`` fails below 50,000 steps a second or a ratio of 1,000.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence

from headrace.environments import alfworld
from headrace.environments.base import Step, Task
from headrace.environments.household import HouseholdEnvironment, expert, tasks

FLOOR, RATIO = 50_000, 1_000
Walk = tuple[Task, list[str]]
World = HouseholdEnvironment | alfworld.AlfworldEnvironment


def walks(rooms: str, games: int) -> list[Walk]:
    """Each expert action after a look around and one that cannot be done."""
    found = []
    for task in tasks("train", games, rooms=rooms):
        found.append((task, [said for action in expert(task) for said in ("look", "take mug 9 from fridge 1", action)]))
    return found


def play(world: World, some: Sequence[Walk], rounds: int = 1) -> tuple[float, float, list[Step]]:
    """CPU seconds for the steps alone and for resets and steps, and what was said in the last round."""
    steps_cpu, started = 0.0, time.process_time()
    said: list[Step] = []
    for _ in range(rounds):
        said = []
        for task, plan in some:
            world.reset_now(task)
            before = time.process_time()
            said += [world.step_now(action) for action in plan]
            steps_cpu += time.process_time() - before
    return steps_cpu, time.process_time() - started, said


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", type=int, default=6, help="games per repeat")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rooms", choices=("small", "full"), default="small")
    parser.add_argument("--check", action="store_true", help="fail below the promised figures")
    options = parser.parse_args(arguments)
    some = walks(options.rooms, options.games)
    steps = sum(len(plan) for _, plan in some)
    rounds = max(1, 20_000 // steps)
    simulated, real = HouseholdEnvironment(1000), alfworld.AlfworldEnvironment(1000)
    play(simulated, some)
    rates: dict[str, list[float]] = {"simulator": [], "simulator with reset": [], "engine": [], "engine with reset": []}
    for _ in range(options.repeats):
        alone, whole, fast_said = play(simulated, some, rounds)
        rates["simulator"].append(steps * rounds / alone)
        rates["simulator with reset"].append(steps * rounds / whole)
        alone, whole, real_said = play(real, some)
        rates["engine"].append(steps / alone)
        rates["engine with reset"].append(steps / whole)
        if fast_said != real_said:
            print("The simulator and the engine disagree on these walks.", file=sys.stderr)
            return 1
    medians = {name: statistics.median(values) for name, values in rates.items()}
    print(f"{options.rooms} rooms, {options.games} games, {steps} steps, {options.repeats} repeats; steps per second of CPU time, medians")
    for name, value in medians.items():
        print(f"{name:22}{value:12,.0f}   ({min(rates[name]):,.0f} to {max(rates[name]):,.0f})")
    ratio = medians["simulator"] / medians["engine"]
    whole_ratio = medians["simulator with reset"] / medians["engine with reset"]
    print(f"ratio of the steps    {ratio:12,.0f}\nratio with resets     {whole_ratio:12,.0f}")
    failed = options.check and (medians["simulator"] < FLOOR or ratio < RATIO)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
