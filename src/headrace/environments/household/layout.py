"""What never changes during an episode, compiled once per task: names, places, abilities, the grounded goal, the start."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from headrace.environments.base import Task
from headrace.environments.household.goals import Grounder
from headrace.environments.household.naming import numbered_names
from headrace.environments.household.problem import Fact, Problem, instruction_of, problem_of

#: Which predicates the effect of each action touches. Everything else in a problem is there for good.
EFFECTS: dict[str, frozenset[str]] = {
    "go": frozenset({"atlocation"}),
    "open": frozenset({"opened", "checked"}),
    "close": frozenset({"opened"}),
    "take": frozenset({"inreceptacle", "holds", "holdsany", "objectatlocation"}),
    "move": frozenset({"inreceptacle", "holds", "holdsany", "objectatlocation"}),
    "clean": frozenset({"isclean"}),
    "heat": frozenset({"ishot", "iscool"}),
    "cool": frozenset({"ishot", "iscool"}),
    "use": frozenset({"ison", "istoggled"}),
    "slice": frozenset({"issliced"}),
    "look": frozenset({"checked"}),
    "inventory": frozenset({"checked"}),
    "help": frozenset({"checked"}),
    "examine": frozenset({"checked"}),
}
_CHANGING = frozenset().union(*EFFECTS.values())
#: A fact of these predicates can change only if its first argument has one of these abilities (or starts in somebody's hands).
_NEEDS = {
    "inreceptacle": ("pickupable",),
    "objectatlocation": ("pickupable",),
    "holds": ("pickupable",),
    "isclean": ("cleanable",),
    "ishot": ("heatable", "coolable"),
    "iscool": ("heatable", "coolable"),
    "ison": ("toggleable",),
    "istoggled": ("toggleable",),
    "issliced": ("sliceable",),
    "opened": ("openable",),
}

_ABILITIES = ("openable", "pickupable", "toggleable", "cleanable", "heatable", "coolable", "sliceable")

Test = Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Layout:
    """A task's unchanging side. Entities are their ids; ``name_of`` gives what the agent reads."""

    instruction: str
    name_of: dict[str, str]
    receptacle_named: dict[str, str]
    object_named: dict[str, str]
    #: Agents that stand somewhere, in the order in which the real engine lets them act: the last in the alphabet first.
    agents: tuple[str, ...]
    #: The agent whose pockets "inventory" shows: the first in the alphabet.
    inventory_agent: str
    location_of: dict[str, str]
    receptacles_at: dict[str, tuple[str, ...]]
    #: Receptacles with their display names, in the order of the opening sentence.
    receptacles: tuple[str, ...]
    openable: frozenset[str]
    pickupable: frozenset[str]
    toggleable: frozenset[str]
    cleanable: frozenset[str]
    heatable: frozenset[str]
    coolable: frozenset[str]
    sliceable: frozenset[str]
    sinks: frozenset[str]
    microwaves: frozenset[str]
    fridges: frozenset[str]
    knives: frozenset[str]
    accepts: dict[str, frozenset[str]]
    #: Objects that can have others inside, with what is inside them.
    vessels: dict[str, tuple[str, ...]]
    initial: frozenset[Fact]
    won: Test
    goal_actions: frozenset[str]

    def appliances(self, verb: str) -> frozenset[str]:
        """Where one can clean, heat or cool."""
        return {"clean": self.sinks, "heat": self.microwaves, "cool": self.fridges}[verb]


def layout_of(task: Task) -> Layout:
    """The compiled task; kept for the most recent ones, since the same tasks come again and again."""
    return _cached(_Key(task))


class _Key:
    """A task as a cache key: the same payload object, whatever the ids say."""

    __slots__ = ("task",)

    def __init__(self, task: Task) -> None:
        self.task = task

    def __hash__(self) -> int:
        return hash(self.task.id)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Key)
            and self.task.id == other.task.id
            and (self.task.payload is other.task.payload or self.task.payload == other.task.payload)
        )


@lru_cache(maxsize=1024)
def _cached(key: _Key) -> Layout:
    return compile_layout(problem_of(key.task), instruction_of(key.task.payload))


def compile_layout(problem: Problem, instruction: str) -> Layout:
    facts = _Facts(problem)
    location_of = facts.locations()
    agents, inventory_agent = facts.agents()
    receptacles = sorted(location_of)
    names = numbered_names(part for fact in problem.facts for part in fact[1:])
    rtypes, otypes, contains = facts.pairs("receptacletype"), facts.pairs("objecttype"), facts.pairs("cancontain")
    goal = facts.grounder().ground(problem.goal)
    return Layout(
        instruction=instruction,
        name_of=names,
        receptacle_named={names[e]: e for e in facts.of_type("receptacle") if e in names},
        object_named={names[e]: e for e in facts.of_type("object") if e in names},
        agents=agents,
        inventory_agent=inventory_agent,
        location_of=location_of,
        receptacles_at={place: tuple(r for r in receptacles if location_of[r] == place) for place in set(location_of.values())},
        receptacles=tuple(receptacles),
        **{ability: facts.those(ability) for ability in _ABILITIES},
        sinks=_typed_as(rtypes, "sinkbasintype"),
        microwaves=_typed_as(rtypes, "microwavetype"),
        fridges=_typed_as(rtypes, "fridgetype"),
        knives=_typed_as(otypes, "knifetype") | _typed_as(otypes, "butterknifetype"),
        accepts=_accepts(receptacles, rtypes, otypes, contains),
        vessels=facts.vessels(),
        initial=facts.initial,
        won=compile_test(goal),
        goal_actions=frozenset(action for action, touched in EFFECTS.items() if touched & _predicates(goal)),
    )


class _Facts:
    """Look-ups over a problem's facts, with the checks that keep the simulator honest about what it can run."""

    def __init__(self, problem: Problem) -> None:
        self.initial = frozenset(problem.facts)
        self._entities = problem.entities
        self._domains: dict[str, list[str]] = {"object": sorted({name for name, _ in problem.entities})}
        for type_name in {type_name for _, type_name in problem.entities} - {"object"}:
            self._domains[type_name] = self.of_type(type_name)

    def of_type(self, type_name: str) -> list[str]:
        return sorted(name for name, kind in self._entities if kind == type_name)

    def those(self, predicate: str) -> frozenset[str]:
        return frozenset(fact[1] for fact in self.initial if fact[0] == predicate and len(fact) == 2)

    def pairs(self, predicate: str) -> list[tuple[str, str]]:
        return sorted((fact[1], fact[2]) for fact in self.initial if fact[0] == predicate and len(fact) == 3)

    def vessels(self) -> dict[str, tuple[str, ...]]:
        inside = self.pairs("inreceptacleobject")
        vessels = self.those("isreceptacleobject")
        # The engine's text never lists a thing as inside itself, whatever the facts say.
        return {vessel: tuple(obj for obj, outer in inside if outer == vessel != obj) for vessel in vessels}

    def locations(self) -> dict[str, str]:
        places: dict[str, str] = {}
        for receptacle, place in self.pairs("receptacleatlocation"):
            if receptacle in places:
                raise ValueError(f"{receptacle!r} is at two locations; the household world has one location for each receptacle.")
            places[receptacle] = place
        return places

    def agents(self) -> tuple[tuple[str, ...], str]:
        standing = [agent for agent, _ in self.pairs("atlocation")]
        if not standing:
            raise ValueError("The problem has no agent at a location; it needs one fact (atLocation AGENT LOCATION).")
        if len(set(standing)) != len(standing):
            raise ValueError("An agent of the problem is at two locations at once; it needs exactly one atLocation fact for each agent.")
        return tuple(sorted(standing, reverse=True)), min(standing)

    def grounder(self) -> Grounder:
        able = {predicate: frozenset().union(*(self.those(a) for a in abilities)) for predicate, abilities in _NEEDS.items()}
        held = frozenset(obj for _, obj in self.pairs("holds"))
        agents = frozenset(agent for agent, _ in self.pairs("atlocation"))

        def fixed(fact: Fact) -> bool:
            if fact[0] not in _CHANGING:
                return True
            if len(fact) == 1:
                return False
            if fact[0] == "atlocation":
                return fact[1] not in agents
            if fact[0] == "holds":
                return fact[2] not in able["holds"] and fact[2] not in held
            return fact[0] in able and fact[1] not in able[fact[0]] and fact[1] not in held

        return Grounder(self.initial, self._domains, fixed)


def _typed_as(pairs: Iterable[tuple[str, str]], type_name: str) -> frozenset[str]:
    return frozenset(entity for entity, kind in pairs if kind == type_name)


def _accepts(
    receptacles: list[str], rtypes: list[tuple[str, str]], otypes: list[tuple[str, str]], contains: list[tuple[str, str]]
) -> dict[str, frozenset[str]]:
    allowed: dict[str, set[str]] = {}
    for rtype, otype in contains:
        allowed.setdefault(rtype, set()).add(otype)
    by_rtype = {rtype: frozenset(obj for obj, otype in otypes if otype in fits) for rtype, fits in allowed.items()}
    nothing: frozenset[str] = frozenset()
    return {r: nothing.union(*(by_rtype.get(rtype, nothing) for entity, rtype in rtypes if entity == r)) for r in receptacles}


def _predicates(goal: Any) -> frozenset[str]:
    if isinstance(goal, bool):
        return frozenset()
    if goal[0] == "atom":
        return frozenset({goal[1][0]})
    return frozenset().union(*(_predicates(part) for part in goal[1:]))


def compile_test(goal: Any) -> Test:
    """A grounded goal as a function of the world (which answers ``holds_fact(predicate, ...)``)."""
    if isinstance(goal, bool):
        return lambda world: goal
    head = goal[0]
    if head == "atom":
        return _atom_test(goal[1])
    if head == "not":
        inner = compile_test(goal[1])
        return lambda world: not inner(world)
    parts = tuple(compile_test(part) for part in goal[1:])
    if head == "and":
        return lambda world: all(part(world) for part in parts)
    return lambda world: any(part(world) for part in parts)


def _atom_test(fact: Fact) -> Test:
    predicate, *rest = fact
    if predicate == "atlocation":
        agent, place = rest
        return lambda world: world.at[agent] == place
    if predicate == "inreceptacle":
        obj, receptacle = rest
        return lambda world: obj in world.inside.get(receptacle, ())
    if predicate == "holds":
        agent, obj = rest
        return lambda world: obj in world.hands.get(agent, ())
    if predicate == "objectatlocation":
        obj, place = rest
        return lambda world: obj in world.lying.get(place, ())
    (entity,) = rest
    return lambda world: entity in getattr(world, predicate)
