"""The table of recipes."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest

from headrace.algorithms import (
    CISPO,
    GMPO,
    GROUP_MEASURES,
    GSPO,
    MEASURES,
    RECIPES,
    SAPO,
    SSPO,
    Clip,
    EventTimeMemory,
    PromptValue,
    ReceiptOrderMemory,
    Recipe,
    aligned_measure,
    recipe,
)

# name: memory, rho, measure, objective, group size
TABLE = {
    "spo": ("receipt", None, "trajectory", Clip(0.2, 0.28, 10.0), 1),
    "spo++": ("event-time", 0.875, "action-token", Clip(0.2, 0.28, 2.0), 1),
    "spo++/trajectory": ("event-time", 0.875, "trajectory", Clip(0.2, 0.28, 2.0), 1),
    "spo++/receipt": ("receipt", 0.875, "action-token", Clip(0.2, 0.28, 2.0), 1),
    "sspo": (None, None, "group", SSPO(1.0, 1.05, "arctan", "log"), 8),
    "spo++sspo": ("event-time", 0.875, "trajectory", SSPO(1.0, 1.05, "arctan", "log"), 1),
    "grpo": (None, None, "group", Clip(0.2, 0.2, None, "sequence-mean"), 8),
    "dapo": (None, None, "group", Clip(0.2, 0.28, None, "token-mean"), 8),
    "gspo": (None, None, "group", GSPO(3e-4, 4e-4), 8),
    "gmpo": (None, None, "group", GMPO(0.4), 8),
    "sapo": (None, None, "group", SAPO(1.0, 1.05, "sigmoid"), 8),
    "cispo": (None, None, "group", CISPO(5.0), 8),
    "rloo": (None, None, "leave-one-out", Clip(0.2, 0.2, None, "fixed"), 8),
    "dr_grpo": (None, None, "group-mean", Clip(0.2, 0.2, None, "fixed"), 8),
}


def test_the_table_is_complete() -> None:
    assert set(RECIPES) == set(TABLE)
    for name, (memory, rho, measure, objective, group_size) in TABLE.items():
        row = recipe(name)
        assert row is RECIPES[name]
        assert (row.name, row.memory, row.rho, row.measure, row.objective, row.group_size) == (
            name,
            memory,
            rho,
            measure,
            objective,
            group_size,
        )
        assert row.title
        assert name == "spo++sspo" or row.paper_url == f"https://arxiv.org/abs/{row.paper}"


def test_the_table_cannot_be_changed_by_accident() -> None:
    with pytest.raises(TypeError):
        RECIPES["mine"] = recipe("spo")  # type: ignore[index]
    with pytest.raises(FrozenInstanceError):
        recipe("spo").rho = 0.5  # type: ignore[misc]


def test_an_unknown_recipe_names_its_neighbours() -> None:
    with pytest.raises(ValueError, match=r"unknown recipe 'gpro'; did you mean .*'grpo'.*Known"):
        recipe("gpro")
    with pytest.raises(ValueError, match=r"did you mean .*'spo\+\+'.*Known recipes: spo\+\+, spo"):
        recipe("spo+")
    with pytest.raises(ValueError, match="Known recipes"):
        recipe("ppo with a critic")


def test_a_group_method_cannot_run_without_siblings() -> None:
    # Fault 3: leave-one-out with one rollout.
    for name, row in RECIPES.items():
        if row.measure in GROUP_MEASURES:
            with pytest.raises(ValueError, match=f"'{name}'.*group_size must be at least 2; it is 1"):
                replace(row, group_size=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_size": 0}, "group_size must be at least 1"),
        ({"measure": "tokens"}, "unknown measure 'tokens'"),
        ({"memory": "lru"}, "unknown memory 'lru'"),
        ({"memory": None}, "discounts a memory"),
        ({"rho": None}, "needs a discount"),
        ({"rho": 1.5}, r"\(0, 1\]"),
    ],
)
def test_combinations_without_meaning_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(recipe("spo++"), **changes)


def test_replace_makes_a_variant() -> None:
    variant = replace(recipe("spo++"), name="mine", objective=GSPO(), measure="aligned")
    assert variant.resolved_measure == "trajectory"
    assert replace(variant, objective=Clip()).resolved_measure == "action-token"
    assert recipe("spo++").objective == Clip(dual=2.0)


def test_the_aligned_measure_is_the_one_the_objective_averages_under() -> None:
    assert aligned_measure(Clip()) == aligned_measure(CISPO()) == aligned_measure(Clip(reduction="fixed")) == "action-token"
    for objective in (Clip(reduction="sequence-mean"), GSPO(), GMPO(), SAPO(), SSPO()):
        assert aligned_measure(objective) == "trajectory"
    for name in ("spo++", "spo++sspo", "spo++/receipt"):
        assert replace(recipe(name), measure="aligned").resolved_measure == recipe(name).measure

    def mine(*args: object, **kwargs: object) -> None: ...

    with pytest.raises(ValueError, match="whose reduction is one of token-mean"):
        replace(recipe("spo++"), objective=mine, measure="aligned")
    assert all(row.resolved_measure in MEASURES for row in RECIPES.values())


def test_memories_are_those_of_the_recipe() -> None:
    prior = PromptValue(1.0, 3.0)
    event_time = recipe("spo++").new_memory(prior)
    assert isinstance(event_time, EventTimeMemory) and event_time.rho == 0.875 and event_time.prior == prior
    drifting, constant = recipe("spo").new_memory(), recipe("spo++/receipt").new_memory()
    assert isinstance(drifting, ReceiptOrderMemory) and drifting.discount(None) == 0.96 and drifting.discount(9.0) == 0.875
    assert isinstance(constant, ReceiptOrderMemory) and constant.discount(None) == constant.discount(9.0) == 0.875
    assert recipe("grpo").new_memory() is None


def test_the_fixed_length_comes_from_the_configuration() -> None:
    assert recipe("dr_grpo").with_max_len(640).objective == Clip(0.2, 0.2, None, "fixed", 640)
    assert recipe("spo").with_max_len(640) is recipe("spo")


def test_a_recipe_of_ones_own_is_a_row_like_any_other() -> None:
    mine = Recipe(name="mine", memory="receipt", rho=0.9, measure="none", objective=SSPO())
    assert (mine.group_size, mine.paper, mine.paper_url) == (1, None, None)
