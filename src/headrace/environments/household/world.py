"""The rules: what each action needs, what it changes, what the agent reads.

One ``World`` is one episode. State is kept in the relations of the domain (what is inside what, who stands where, what is hot),
so that problems with oddities of the real data (a mug on the counter and in the coffee machine at once, two receptacles at one
place, several agents) behave as they do in the real engine.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable

from headrace.environments.household.layout import Layout

NOTHING_HAPPENS = "Nothing happens."
BANNER = "-= Welcome to TextWorld, ALFRED! =-"
HELP = """Available commands:
  look:                             look around your current location
  inventory:                        check your current inventory
  go to (receptacle):               move to a receptacle
  open (receptacle):                open a receptacle
  close (receptacle):               close a receptacle
  take (object) from (receptacle):  take an object from a receptacle
  move (object) to (receptacle):  place an object in or on a receptacle
  examine (something):              examine a receptacle or an object
  use (object):                     use an object
  heat (object) with (receptacle):  heat an object using a receptacle
  clean (object) with (receptacle): clean an object using a receptacle
  cool (object) with (receptacle):  cool an object using a receptacle
  slice (object) with (object):     slice an object using a sharp object
"""


def listing(items: list[str]) -> str:
    """``a``, ``a, and b``, ``a, b, and c``; an empty list is ``nothing``."""
    if not items:
        return "nothing"
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])}, and {items[-1]}"


class Unmatched(Exception):
    """The action is not a sentence of this world: no template fits, or it names something of which there is none."""


class World:
    """An episode's state. ``act`` answers a command; ``won`` is the goal test after the latest one."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.at: dict[str, str] = {}
        self.inside: dict[str, list[str]] = {}
        self.hands: dict[str, list[str]] = {}
        self.lying: dict[str, set[str]] = {}
        self.holdsany: set[str] = set()
        self.opened: set[str] = set()
        self.isclean: set[str] = set()
        self.ishot: set[str] = set()
        self.iscool: set[str] = set()
        self.ison: set[str] = set()
        self.istoggled: set[str] = set()
        self.issliced: set[str] = set()
        self.checked: set[str] = set()
        #: (object, receptacle) pairs that the object has been taken out of: "look" tells these apart from never having been in.
        self.taken_from: set[tuple[str, str]] = set()
        for fact in layout.initial:
            self._assert(fact)
        for contents in (*self.inside.values(), *self.hands.values()):
            contents.sort()
        self.won: bool = layout.won(self)

    def _assert(self, fact: tuple[str, ...]) -> None:
        predicate = fact[0]
        if predicate == "atlocation":
            self.at[fact[1]] = fact[2]
        elif predicate == "inreceptacle":
            self.inside.setdefault(fact[2], []).append(fact[1])
        elif predicate == "holds":
            self.hands.setdefault(fact[1], []).append(fact[2])
        elif predicate == "objectatlocation":
            self.lying.setdefault(fact[2], set()).add(fact[1])
        elif predicate in _STATES:
            getattr(self, predicate).add(fact[1])

    # -- what the agent reads ------------------------------------------------------------------------------------------

    def opening(self) -> str:
        """The first observation: the banner, what the room holds, the task."""
        layout = self.layout
        facing = [(agent, r) for agent in sorted(self.at) for r in layout.receptacles_at.get(self.at[agent], ())]
        if facing:
            names = listing([layout.name_of[r] for _, r in facing])
            scene = f"You are facing the {names}. Next to it, you see nothing."
        else:
            scene = f"You are in the middle of a room. Looking quickly around you, you see {self._a(layout.receptacles)}."
        return f"{BANNER}\n\n{scene}\n\nYour task is to: {layout.instruction}."

    def _a(self, entities: Iterable[str]) -> str:
        names = self.layout.name_of
        return listing([f"a {names[entity]}" for entity in entities])

    def _view(self, receptacle: str) -> str:
        name = self.layout.name_of[receptacle]
        if receptacle not in self.layout.openable:
            return f"On the {name}, you see {self._a(self.inside.get(receptacle, ()))}."
        if receptacle in self.opened:
            return f"The {name} is open. In it, you see {self._a(self.inside.get(receptacle, ()))}."
        return f"The {name} is closed."

    def _describe(self, obj: str) -> str:
        layout, name = self.layout, self.layout.name_of[obj]
        if obj in layout.vessels:
            return f"This is a normal {name}. In it, you see {self._a(layout.vessels[obj])}."
        clean, hot, cool, sliced = obj in self.isclean, obj in self.ishot, obj in self.iscool, obj in self.issliced
        cut = " sliced" if sliced else ""
        if clean and hot:
            return f"This is a hot and clean{cut} {name}."
        if clean and cool:
            return f"This is a cool and clean{cut} {name}."
        if clean and sliced:
            return f"This is a clean sliced {name}."
        if hot and sliced:
            return f"This is a hot sliced {name}."
        if cool and sliced:
            return f"This is a cool sliced {name}."
        if hot:
            return f"This is a hot {name}."
        if clean:
            return f"This is a clean {name}."
        if cool:
            return f"This is a cold {name}."
        if obj in layout.toggleable and obj in self.istoggled:
            return f"This {name} is on."
        if sliced and obj in layout.sliceable:
            return f"This is a sliced {name}."
        return f"There's nothing special about {name}."

    # -- actions -------------------------------------------------------------------------------------------------------

    def act(self, command: str) -> str | None:
        """The answer to a command, None where it cannot be done here and now; ``Unmatched`` where it is no command at all."""
        verb, _, rest = command.strip().partition(" ")
        action = _ACTIONS.get(verb)
        if action is None:
            raise Unmatched
        answer = action(self, rest)
        if answer is not None and verb in self.layout.goal_actions:
            self.won = self.layout.won(self)
        return answer

    def _receptacle(self, name: str) -> str:
        receptacle = self.layout.receptacle_named.get(name)
        if receptacle is None:
            raise Unmatched
        return receptacle

    def _object(self, name: str) -> str:
        obj = self.layout.object_named.get(name)
        if obj is None:
            raise Unmatched
        return obj

    def _two(self, text: str, word: str) -> tuple[str, str]:
        first, found, second = text.partition(word)
        if not found:
            raise Unmatched
        return first, second

    def _agents_at(self, receptacle: str) -> list[str]:
        place = self.layout.location_of.get(receptacle)
        at = self.at
        return [agent for agent in self.layout.agents if at[agent] == place]

    def _reachable(self, receptacle: str) -> bool:
        return receptacle not in self.layout.openable or receptacle in self.opened

    def _go(self, rest: str) -> str | None:
        word, _, name = rest.partition(" ")
        if word != "to":
            raise Unmatched
        receptacle = self._receptacle(name)
        place = self.layout.location_of.get(receptacle)
        if place is None:
            return None
        at = self.at
        for agent in self.layout.agents:
            if at[agent] != place:
                at[agent] = place
                return f"You arrive at {name}. {self._view(receptacle)}"
        return None

    def _open(self, name: str) -> str | None:
        receptacle = self._receptacle(name)
        if receptacle not in self.layout.openable or receptacle in self.opened or not self._agents_at(receptacle):
            return None
        self.opened.add(receptacle)
        self.checked.add(receptacle)
        return f"You open the {name}. {self._view(receptacle)}"

    def _close(self, name: str) -> str | None:
        receptacle = self._receptacle(name)
        if receptacle not in self.layout.openable or receptacle not in self.opened or not self._agents_at(receptacle):
            return None
        self.opened.discard(receptacle)
        return f"You close the {name}."

    def _take(self, rest: str) -> str | None:
        object_name, receptacle_name = self._two(rest, " from ")
        obj, receptacle = self._object(object_name), self._receptacle(receptacle_name)
        if obj not in self.layout.pickupable or obj not in self.inside.get(receptacle, ()) or not self._reachable(receptacle):
            return None
        agent = next((agent for agent in self._agents_at(receptacle) if agent not in self.holdsany), None)
        if agent is None:
            return None
        self.inside[receptacle].remove(obj)
        self.taken_from.add((obj, receptacle))
        self.lying.get(self.at[agent], set()).discard(obj)
        held = self.hands.setdefault(agent, [])
        if obj not in held:
            insort(held, obj)
        self.holdsany.add(agent)
        return f"You pick up the {object_name} from the {receptacle_name}."

    def _holder(self, obj: str, receptacle: str) -> str | None:
        return next((agent for agent in self._agents_at(receptacle) if obj in self.hands.get(agent, ())), None)

    def _move(self, rest: str) -> str | None:
        object_name, receptacle_name = self._two(rest, " to ")
        obj, receptacle = self._object(object_name), self._receptacle(receptacle_name)
        agent = self._holder(obj, receptacle)
        if agent is None or not self._reachable(receptacle) or obj not in self.layout.accepts[receptacle]:
            return None
        contents = self.inside.setdefault(receptacle, [])
        if obj not in contents:
            insort(contents, obj)
        self.taken_from.discard((obj, receptacle))
        self.lying.setdefault(self.at[agent], set()).add(obj)
        self.hands[agent].remove(obj)
        self.holdsany.discard(agent)
        return f"You move the {object_name} to the {receptacle_name}."

    def _clean(self, rest: str) -> str | None:
        object_name, receptacle_name = self._two(rest, " with ")
        obj, receptacle = self._object(object_name), self._receptacle(receptacle_name)
        if obj not in self.layout.cleanable or receptacle not in self.layout.sinks or self._holder(obj, receptacle) is None:
            return None
        self.isclean.add(obj)
        return f"You clean the {object_name} using the {receptacle_name}."

    def _heat(self, rest: str) -> str | None:
        object_name, receptacle_name = self._two(rest, " with ")
        obj, receptacle = self._object(object_name), self._receptacle(receptacle_name)
        if obj not in self.layout.heatable or receptacle not in self.layout.microwaves or self._holder(obj, receptacle) is None:
            return None
        self.ishot.add(obj)
        self.iscool.discard(obj)
        return f"You heat the {object_name} using the {receptacle_name}."

    def _cool(self, rest: str) -> str | None:
        object_name, receptacle_name = self._two(rest, " with ")
        obj, receptacle = self._object(object_name), self._receptacle(receptacle_name)
        if obj not in self.layout.coolable or receptacle not in self.layout.fridges or self._holder(obj, receptacle) is None:
            return None
        self.iscool.add(obj)
        self.ishot.discard(obj)
        return f"You cool the {object_name} using the {receptacle_name}."

    def _use(self, name: str) -> str | None:
        obj = self._object(name)
        if obj not in self.layout.toggleable or not any(obj in self.inside.get(r, ()) for r in self._at_hand()):
            return None
        self.ison.symmetric_difference_update((obj,))
        self.istoggled.add(obj)
        return f"You turn on the {name}."

    def _slice(self, rest: str) -> str | None:
        object_name, knife_name = self._two(rest, " with ")
        obj, knife = self._object(object_name), self._object(knife_name)
        if obj not in self.layout.sliceable or knife not in self.layout.knives:
            return None
        if not any(obj in self.lying.get(self.at[agent], ()) and knife in self.hands.get(agent, ()) for agent in self.layout.agents):
            return None
        self.issliced.add(obj)
        return f"You sliced the {object_name} with the {knife_name}."

    def _at_hand(self) -> list[str]:
        """Receptacles at which some agent stands."""
        at_place = self.layout.receptacles_at
        return [r for place in set(self.at.values()) for r in at_place.get(place, ())]

    def _examine(self, name: str) -> str | None:
        receptacle = self.layout.receptacle_named.get(name)
        if receptacle is not None:
            if not self._agents_at(receptacle):
                return None
            self.checked.add(receptacle)
            return self._view(receptacle)
        obj = self._object(name)
        # The domain meant objects in sight as well; a comma in its text makes that half impossible, so only held ones count.
        if not any(obj in held for held in self.hands.values()):
            return None
        self.checked.add(obj)
        return self._describe(obj)

    def _look(self, rest: str) -> str | None:
        if rest:
            raise Unmatched
        place = self.at[self.layout.agents[0]]
        self.checked.add(place)
        receptacles = self.layout.receptacles_at.get(place, ())
        if not receptacles:
            return "You are in the middle of a room. Looking quickly around you, you see nothing."
        names = listing([self.layout.name_of[r] for r in receptacles])
        around = [obj for obj in sorted(self.lying.get(place, ())) for r in receptacles if (obj, r) in self.taken_from]
        return f"You are facing the {names}. Next to it, you see {self._a(around)}."

    def _inventory(self, rest: str) -> str | None:
        if rest:
            raise Unmatched
        agent = self.layout.inventory_agent
        self.checked.add(agent)
        if agent not in self.holdsany:
            return "You are not carrying anything."
        return f"You are carrying: {self._a(self.hands.get(agent, ()))}."

    def _help(self, rest: str) -> str | None:
        if rest:
            raise Unmatched
        self.checked.add(self.layout.inventory_agent)
        return HELP

    # -- what could be done --------------------------------------------------------------------------------------------

    def admissible(self) -> list[str]:
        """Every command that would be answered with something else than ``Nothing happens.``, sorted."""
        names, layout = self.layout.name_of, self.layout
        places = set(self.at.values())
        found = {"look", "inventory", "help"}
        found.update(f"go to {names[r]}" for r in layout.receptacles if places != {layout.location_of[r]})
        for receptacle in self._at_hand():
            self._offer(receptacle, names[receptacle], found)
        for held in self.hands.values():
            found.update(f"examine {names[obj]}" for obj in held)
        for agent in layout.agents:
            for knife in layout.knives.intersection(self.hands.get(agent, ())):
                lying = layout.sliceable.intersection(self.lying.get(self.at[agent], ()))
                found.update(f"slice {names[obj]} with {names[knife]}" for obj in lying)
        return sorted(found)

    def _offer(self, receptacle: str, name: str, found: set[str]) -> None:
        """Adds what can be done at one receptacle that an agent stands at."""
        layout, names = self.layout, self.layout.name_of
        contents = self.inside.get(receptacle, ())
        found.add(f"examine {name}")
        found.update(f"use {names[obj]}" for obj in contents if obj in layout.toggleable)
        if receptacle in layout.openable:
            found.add(f"close {name}" if receptacle in self.opened else f"open {name}")
        agents = self._agents_at(receptacle)
        reachable = self._reachable(receptacle)
        if reachable and any(agent not in self.holdsany for agent in agents):
            found.update(f"take {names[obj]} from {name}" for obj in contents if obj in layout.pickupable)
        for obj in (obj for agent in agents for obj in self.hands.get(agent, ())):
            if reachable and obj in layout.accepts[receptacle]:
                found.add(f"move {names[obj]} to {name}")
            if receptacle in layout.sinks and obj in layout.cleanable:
                found.add(f"clean {names[obj]} with {name}")
            if receptacle in layout.microwaves and obj in layout.heatable:
                found.add(f"heat {names[obj]} with {name}")
            if receptacle in layout.fridges and obj in layout.coolable:
                found.add(f"cool {names[obj]} with {name}")


_STATES = frozenset({"holdsany", "opened", "isclean", "ishot", "iscool", "ison", "istoggled", "issliced", "checked"})
_ACTIONS: dict[str, Callable[[World, str], str | None]] = {
    "go": World._go,
    "open": World._open,
    "close": World._close,
    "take": World._take,
    "move": World._move,
    "clean": World._clean,
    "heat": World._heat,
    "cool": World._cool,
    "use": World._use,
    "slice": World._slice,
    "examine": World._examine,
    "look": World._look,
    "inventory": World._inventory,
    "help": World._help,
}


def is_command(layout: Layout, text: str) -> bool:
    """Whether a text is a sentence of this world at all, doable or not."""
    try:
        World(layout).act(text)
    except Unmatched:
        return False
    return True
