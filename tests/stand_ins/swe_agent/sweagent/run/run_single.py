"""One problem: settings from files and options, an environment, an agent, and what they leave."""

import json
from pathlib import Path

import yaml

from sweagent.agent import Agent
from sweagent.environment import Environment

# Every setting that is known here; others are refused, as the real one does.
KNOWN = {
    "agent.templates.system_template", "agent.templates.instance_template", "agent.templates.next_step_template",
    "agent.templates.next_step_no_output_template", "agent.tools.bundles", "agent.tools.enable_bash_tool",
    "agent.tools.parse_function.type", "agent.tools.env_variables", "agent.tools.execution_timeout",
    "agent.tools.total_execution_timeout", "agent.model.name", "agent.model.api_base",
    "agent.model.per_instance_cost_limit", "agent.model.total_cost_limit", "agent.model.per_instance_call_limit",
    "agent.model.completion_kwargs", "agent.model.retry.retries", "agent.model.retry.min_wait",
    "agent.model.retry.max_wait", "agent.model.max_input_tokens", "env.deployment.type", "env.repo.type",
    "env.repo.repo_name", "env.repo.reset", "problem_statement.type", "problem_statement.path",
    "problem_statement.id", "output_dir",
}  # fmt: skip
WHOLE = {"agent.tools.bundles", "agent.tools.env_variables", "agent.model.completion_kwargs"}


def run_from_cli(args):
    told = {}
    for argument in args:
        name, _, value = argument.removeprefix("--").partition("=")
        if name == "config":
            _flatten(yaml.safe_load(Path(value).read_text()), "", told)
        else:
            told[name] = yaml.safe_load(value)
    if unknown := sorted(told.keys() - KNOWN):
        refuse(f"Extra inputs are not permitted: {', '.join(unknown)}")
    if told.get("env.deployment.type") != "local":
        refuse("this stand-in knows the local deployment alone")
    return _run(told)


def refuse(reason):
    """The reason in a box on standard output, as the real one; on standard error only that there is one."""
    line = "─" * (len(reason) + 2)
    print(f"╭{line}╮\n│ {reason} │\n╰{line}╯")
    raise RuntimeError("Invalid configuration. Please check the above output.")


def _flatten(tree, above, into):
    for name, value in tree.items():
        path = f"{above}.{name}" if above else name
        if isinstance(value, dict) and path not in WHOLE:
            _flatten(value, path, into)
        else:
            into[path] = value


def _run(told):
    name = told["problem_statement.id"]
    output = Path(told["output_dir"]) / name
    output.mkdir(parents=True)
    (output / f"{name}.info.log").write_text("the stand-in starts\n")
    environment = Environment(told)
    try:
        environment.start()
        (output / "config.yaml").write_text(json.dumps(told))
        agent = Agent(told, environment, output / f"{name}.traj")
        info = agent.run(Path(told["problem_statement.path"]).read_text())
    finally:
        environment.close()
    (output / f"{name}.pred").write_text(json.dumps({"instance_id": name, "model_patch": info["submission"]}))
    return 0
