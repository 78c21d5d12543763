"""Test suite that every framework's adapter must pass, also yours. It needs pytest; the rest of MegaFlow does not.

    pytest -p megaflow.contract.agents.plugin --pyargs megaflow.contract.agents --agent claude-code
    pytest -p megaflow.contract.agents.plugin --pyargs megaflow.contract.agents --agent my-agent/agent.toml

`--agent` is a built-in agent or the manifest of an external one, and may be repeated; `--tools` is the folder where
frameworks are installed. The agents work on a toy task in a local environment. They need neither a container engine
nor a model: the replay engine, a separate process, plays scripted conversations and their faults.

To add it to your own tests, write a `conftest.py` with a fixture `subject` (scope "module") and
`from megaflow.contract.agents.fixtures import *`, and a test file with
`from megaflow.contract.agents.test_ends import *` for each part that you want.

No module outside of this package imports it.
"""
