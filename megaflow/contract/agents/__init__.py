"""The suite that every framework's adapter passes, to be run on anybody's: needs pytest, which nothing else here does.

    pytest -p megaflow.contract.agents.plugin --pyargs megaflow.contract.agents --agent claude-code
    pytest -p megaflow.contract.agents.plugin --pyargs megaflow.contract.agents --agent my-agent/agent.toml

`--agent` is a built-in agent or the manifest of an external one, and may be given more than once; `--tools` is
the folder where frameworks are installed. The agents work on a toy task in a local environment, so that neither an
engine nor a model is needed: the replay engine, a process of its own, plays scripted conversations and their faults.

To have it among your own tests, write a `conftest.py` with a fixture `subject` (scope "module") and
`from megaflow.contract.agents.fixtures import *`, and a test file with
`from megaflow.contract.agents.test_ends import *` for each of the parts that you want.

Nothing outside of this package imports it.
"""
