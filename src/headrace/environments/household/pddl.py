"""PDDL problems of the ALFRED domain, read and written.

Only the problem file matters here: the domain's rules are the simulator itself. Names are lower-cased, as the planner of the
real engine does, so that ordering and numbering come out the same.
"""

from __future__ import annotations

import difflib
import hashlib
from typing import Any

from headrace.environments.base import Task
from headrace.environments.household.problem import Fact, Formula, Problem, instruction_of, kind_of, problem_of

#: The domain's predicates with how many names each relates.
_PREDICATES = {
    1: "openable opened isreceptacleobject isreceptacleobjectfull checked examined holdsany holdsanyreceptacleobject full isclean "
    "cleanable ishot heatable iscool coolable pickupable moveable toggleable ison istoggled sliceable issliced",
    2: "atlocation receptacleatlocation objectatlocation inreceptacle inreceptacleobject wasinreceptacle receptacletype cancontain "
    "objecttype holds =",
}
_ARITY = {predicate: arity for arity, predicates in _PREDICATES.items() for predicate in predicates.split()}
_TYPES = ("agent", "location", "receptacle", "object", "rtype", "otype")


def from_pddl(problem: str, instruction: str) -> Task:
    """A task from the text of a PDDL problem of the ALFRED domain.

    ``instruction`` is the text after ``"Your task is to: "``; as in the real engine, whose sentence ends with a full stop of
    its own, it is given without that stop. The task's id is a hash of the problem and the instruction.
    """
    parsed = parse_problem(problem)
    text = write_problem(parsed)
    digest = hashlib.sha256(f"{text}\n{instruction}".encode()).hexdigest()[:16]
    return Task(id=f"pddl-{digest}", kind=kind_of(parsed.goal), payload=parsed.payload(instruction))


def to_pddl(task: Task) -> tuple[str, str]:
    """The same task for the real engine: the problem's text, and the instruction that replaces its ``UNKNOWN GOAL``."""
    return write_problem(problem_of(task)), instruction_of(task.payload)


def parse_problem(text: str) -> Problem:
    """Read ``(define (problem ...) ...)``; ValueError with one sentence on anything that is not such a problem."""
    tree = _nested(text)
    if not tree or tree[0] != "define":
        raise ValueError("This is not a PDDL problem: it must start with '(define (problem NAME)'.")
    sections: dict[str, list[Any]] = {}
    for section in tree[1:]:
        if not isinstance(section, list) or not section or not isinstance(section[0], str):
            raise ValueError(f"A PDDL problem consists of sections in brackets; found {section!r}.")
        sections[section[0]] = section[1:]
    for needed in (":objects", ":init", ":goal"):
        if needed not in sections:
            raise ValueError(f"The PDDL problem has no {needed} section; a problem of the ALFRED domain has :objects, :init and :goal.")
    entities = _typed(sections[":objects"], "(:objects")
    for name, type_name in entities:
        if type_name not in _TYPES:
            raise ValueError(f"{name!r} has the type {type_name!r}, which the ALFRED domain lacks; its types are {', '.join(_TYPES)}.")
    if len(sections[":goal"]) != 1:
        raise ValueError("The :goal section must hold exactly one formula.")
    return Problem(entities=tuple(entities), facts=_facts(sections[":init"]), goal=_formula(sections[":goal"][0]))


def _nested(text: str) -> list[Any]:
    """S-expression to nested lists, comments dropped, lower case."""
    lines = (line.split(";", 1)[0] for line in text.lower().splitlines())
    tokens = " ".join(lines).replace("(", " ( ").replace(")", " ) ").split()
    stack: list[list[Any]] = [[]]
    for token in tokens:
        if token == "(":
            stack.append([])
        elif token == ")":
            if len(stack) == 1:
                raise ValueError("The PDDL problem closes a bracket that was never opened.")
            done = stack.pop()
            stack[-1].append(done)
        else:
            stack[-1].append(token)
    if len(stack) != 1:
        raise ValueError(f"The PDDL problem leaves {len(stack) - 1} bracket(s) open at its end.")
    return stack[0][0] if len(stack[0]) == 1 and isinstance(stack[0][0], list) else stack[0]


def _typed(items: list[Any], where: str) -> list[tuple[str, str]]:
    """``a b - type c - type`` as pairs; an untyped name has PDDL's default type, object."""
    pairs: list[tuple[str, str]] = []
    names: list[str] = []
    position = 0
    while position < len(items):
        item = items[position]
        if not isinstance(item, str):
            raise ValueError(f"{where} ...) must list 'name - type'; found {item!r}.")
        if item == "-":
            if position + 1 >= len(items) or not isinstance(items[position + 1], str):
                raise ValueError(f"{where} ...) ends after '-' where a type should stand.")
            pairs += [(name, items[position + 1]) for name in names]
            names = []
            position += 2
        else:
            names.append(item)
            position += 1
    return list(dict.fromkeys(pairs + [(name, "object") for name in names]))


def _facts(items: list[Any]) -> tuple[Fact, ...]:
    """Initial facts without duplicates; numeric assignments and negations say nothing that is not the default."""
    facts: dict[Fact, None] = {}
    for item in items:
        if not isinstance(item, list) or not item:
            raise ValueError(f"The :init section must list facts in brackets; found {item!r}.")
        if item[0] in ("=", "not"):
            continue
        if not all(isinstance(part, str) for part in item):
            raise ValueError(f"A fact of the :init section is a predicate with names; found {item!r}.")
        # A predicate that the domain lacks changes nothing, but the real engine counts the names in it: it is kept.
        facts[_checked(tuple(item), "The :init section") if item[0] in _ARITY else tuple(item)] = None
    return tuple(facts)


def _formula(tree: Any) -> Formula:
    if not isinstance(tree, list):
        raise ValueError(f"The goal must be a formula in brackets; found {tree!r}.")
    if not tree:
        return ("and",)
    head = tree[0]
    if head in ("and", "or"):
        return (head, *(_formula(part) for part in tree[1:]))
    if head == "not" and len(tree) == 2:
        return ("not", _formula(tree[1]))
    if head == "imply" and len(tree) == 3:
        return ("imply", _formula(tree[1]), _formula(tree[2]))
    if head in ("exists", "forall") and len(tree) == 3 and isinstance(tree[1], list):
        return (head, tuple(_typed(tree[1], f"({head} (")), _formula(tree[2]))
    if all(isinstance(part, str) for part in tree) and head not in ("not", "imply", "exists", "forall"):
        return _checked(tuple(tree), "The goal")
    raise ValueError(f"The goal holds a formula that PDDL lacks: {_write(tree)}.")


def _checked(atom: Fact, where: str) -> Fact:
    predicate, *names = atom
    arity = _ARITY.get(predicate)
    if arity is None:
        near = difflib.get_close_matches(predicate, _ARITY, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"{where} uses the predicate {predicate!r}, which the ALFRED domain lacks{hint}")
    if len(names) != arity:
        raise ValueError(f"{where} holds ({' '.join(atom)}); {predicate} relates {arity} name(s), not {len(names)}.")
    return atom


def _write(tree: Any) -> str:
    return tree if isinstance(tree, str) else "(" + " ".join(_write(part) for part in tree) + ")"


def write_problem(problem: Problem) -> str:
    """The problem as PDDL text, entities and facts one a line."""
    entities = "\n".join(f"        {name} - {type_name}" for name, type_name in problem.entities)
    facts = "\n".join(f"        ({' '.join(fact)})" for fact in problem.facts)
    return (
        "(define (problem household)\n    (:domain alfred)\n"
        f"    (:objects\n{entities}\n    )\n    (:init\n{facts}\n    )\n    (:goal {_write_formula(problem.goal)})\n)\n"
    )


def _write_formula(formula: Formula) -> str:
    head = formula[0]
    if head in ("exists", "forall"):
        variables = " ".join(f"{name} - {type_name}" for name, type_name in formula[1])
        return f"({head} ({variables}) {_write_formula(formula[2])})"
    if head in ("and", "or", "not", "imply"):
        return "(" + " ".join([head, *(_write_formula(part) for part in formula[1:])]) + ")"
    return "(" + " ".join(formula) + ")"
