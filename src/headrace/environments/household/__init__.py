"""The household world: ALFWorld's text world as a fast simulator, with tasks, an expert and PDDL import and export."""

from headrace.environments.household.demonstrations import demonstration
from headrace.environments.household.environment import HouseholdEnvironment
from headrace.environments.household.expert import expert, solves
from headrace.environments.household.games import read_game
from headrace.environments.household.generator import tasks
from headrace.environments.household.pddl import from_pddl, to_pddl
from headrace.environments.household.play import play
from headrace.environments.household.problem import KINDS

__all__ = [
    "KINDS",
    "HouseholdEnvironment",
    "demonstration",
    "expert",
    "from_pddl",
    "play",
    "read_game",
    "solves",
    "tasks",
    "to_pddl",
]
