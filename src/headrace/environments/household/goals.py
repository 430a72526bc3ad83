"""Goal formulas, grounded once and then tested in a few set look-ups.

Grounding replaces quantifiers by the assignments that the unchanging facts allow (types, places, what can be heated), so that
what is left to test at a step are the few facts that actions can change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

from headrace.environments.household.problem import Fact, Formula

#: A grounded goal: True, False, ("atom", fact), ("not", g), ("and", g, ...), ("or", g, ...).
Ground: TypeAlias = "bool | tuple[object, ...]"
Binding: TypeAlias = dict[str, str]


class Grounder:
    """Replaces variables of a formula by entities.

    ``fixed(fact)`` is True for a fact that no action can ever change; ``initial`` holds the facts of the start, and
    ``domains`` the entities of each type.
    """

    def __init__(self, initial: frozenset[Fact], domains: Mapping[str, Sequence[str]], fixed: Callable[[Fact], bool]) -> None:
        self._initial = initial
        self._domains = domains
        self._fixed = fixed
        self._by_predicate: dict[str, list[Fact]] = {}
        for fact in sorted(initial):
            self._by_predicate.setdefault(fact[0], []).append(fact)

    def ground(self, formula: Formula, binding: Binding | None = None) -> Ground:
        binding = binding or {}
        head = formula[0]
        if head == "and":
            return _all([self.ground(part, binding) for part in formula[1:]])
        if head == "or":
            return _any([self.ground(part, binding) for part in formula[1:]])
        if head == "not":
            return _negate(self.ground(formula[1], binding))
        if head == "imply":
            return _any([_negate(self.ground(formula[1], binding)), self.ground(formula[2], binding)])
        if head == "exists":
            return _any([self.ground(formula[2], {**binding, **found}) for found in self._candidates(formula, binding)])
        if head == "forall":
            inner: Formula = ("exists", formula[1], ("not", formula[2]))
            return _negate(self.ground(inner, binding))
        return self._atom(formula, binding)

    def _atom(self, atom: Fact, binding: Binding) -> Ground:
        fact = tuple(binding.get(part, part) for part in atom)
        unbound = [part for part in fact[1:] if part.startswith("?")]
        if unbound:
            raise ValueError(f"The goal uses {unbound[0]!r} in ({' '.join(atom)}) outside the quantifier that introduces it.")
        if fact[0] == "=":
            return fact[1] == fact[2]
        if self._fixed(fact):
            return fact in self._initial
        return ("atom", fact)

    def _candidates(self, formula: Formula, binding: Binding) -> Iterator[Binding]:
        """Assignments of an exists that its unchanging conjuncts do not rule out."""
        variables = dict(formula[1])
        binding = {name: value for name, value in binding.items() if name not in variables}
        conjuncts = _conjuncts(formula[2], set(variables))
        return self._join([atom for atom in conjuncts if self._static(atom[0])], variables, binding)

    def _static(self, predicate: str) -> bool:
        return predicate != "=" and self._fixed((predicate,))

    def _join(self, atoms: list[Fact], variables: dict[str, str], binding: Binding) -> Iterator[Binding]:
        if not atoms:
            free = [name for name in variables if name not in binding]
            if not free:
                yield {name: binding[name] for name in variables}
                return
            for value in self._domains.get(variables[free[0]], ()):
                yield from self._join(atoms, variables, {**binding, free[0]: value})
            return
        first, rest = atoms[0], atoms[1:]
        for fact in self._by_predicate.get(first[0], ()):
            match = self._match(first, fact, variables, binding)
            if match is not None:
                yield from self._join(rest, variables, match)

    def _match(self, atom: Fact, fact: Fact, variables: dict[str, str], binding: Binding) -> Binding | None:
        """The binding extended so that the atom becomes the fact, or None."""
        if len(atom) != len(fact):
            return None
        extended = dict(binding)
        for part, value in zip(atom[1:], fact[1:], strict=True):
            if not part.startswith("?"):
                if part != value:
                    return None
            elif extended.get(part, value) != value or (part in variables and value not in self._domains.get(variables[part], ())):
                return None
            else:
                extended[part] = value
        return extended


def _conjuncts(formula: Formula, variables: set[str]) -> list[Fact]:
    """Atoms that must hold whenever the formula does; those of inner quantifiers only where they speak of our variables alone."""
    head = formula[0]
    if head == "and":
        return [atom for part in formula[1:] for atom in _conjuncts(part, variables)]
    if head == "exists":
        inner = {name for name, _ in formula[1]}
        atoms = _conjuncts(formula[2], variables)
        return [atom for atom in atoms if not inner & set(atom[1:])]
    if head in ("or", "not", "imply", "forall"):
        return []
    return [formula]


def _all(parts: list[Ground]) -> Ground:
    if any(part is False for part in parts):
        return False
    parts = [part for part in parts if part is not True]
    if not parts:
        return True
    return parts[0] if len(parts) == 1 else ("and", *parts)


def _any(parts: list[Ground]) -> Ground:
    if any(part is True for part in parts):
        return True
    parts = [part for part in parts if part is not False]
    if not parts:
        return False
    return parts[0] if len(parts) == 1 else ("or", *parts)


def _negate(part: Ground) -> Ground:
    return (not part) if isinstance(part, bool) else ("not", part)
