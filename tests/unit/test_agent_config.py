"""Keys of agents, and names of their requests."""

from isoloss.engine.rl.agent_config import EnvironmentConfig
from isoloss.engine.rl.agents.flight import SessionFlight


def test_commands_are_always_served():
    assert EnvironmentConfig(program="command:python agent.py").serves
    assert not EnvironmentConfig(program="agent.py:agent").serves
    assert EnvironmentConfig(program="agent.py:agent", endpoint=True).serves


def test_a_request_belongs_to_its_session():
    assert (
        SessionFlight._of(SessionFlight.__new__(SessionFlight), "train.jsonl:17/42/3/0a1b/0") == "train.jsonl:17/42/3"
    )
