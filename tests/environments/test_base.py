"""The environment protocol."""

import asyncio

from headrace.environments.base import Environment, Step


class Echo(Environment):
    async def reset(self, task):
        return "say something"

    async def step(self, action):
        return Step(action, True, False, "done")

    async def close(self):
        pass


def test_a_world_that_derives_from_the_protocol_has_no_system_text_and_no_tools_unless_it_says_so():
    world = Echo()
    assert world.system is None
    assert tuple(world.tools) == ()
    assert isinstance(world, Environment)
    assert asyncio.run(world.step("hi")).observation == "hi"


def test_a_step_without_an_outcome_leaves_it_to_success():
    assert Step("", True, True, "success").outcome is None
