"""Runs the OpenHands SDK on one task within its limits, which the SDK's own command line does not support.

Runs in OpenHands' own Python, where nothing of MegaFlow can be imported, started in the task's folder. The job comes in
a JSON file, the model's key in a variable. The end state goes into `result.json` next to that file, and the
conversation, event by event, into `conversation/`: a killed run leaves its events so far.
"""

import gc
import json
import os
import sys
from pathlib import Path

KEY = "OPENAI_API_KEY"


def main(job_file: Path) -> int:
    job = json.loads(job_file.read_text(encoding="utf-8"))
    home = job_file.parent
    key = os.environ.pop(KEY, "none")  # commands of the agent inherit the other variables

    gc.disable()  # loads thousands of modules, none of which becomes garbage: saves a third of the start time
    from openhands.sdk import LLM, Agent, Tool
    from openhands.sdk.conversation.impl.local_conversation import LocalConversation
    from openhands.tools.file_editor import FileEditorTool
    from openhands.tools.task_tracker import TaskTrackerTool
    from openhands.tools.terminal import TerminalTool
    from pydantic import SecretStr

    gc.freeze()
    gc.enable()
    model = LLM(
        model=f"openai/{job['model']}",
        base_url=job["base_url"],
        api_key=SecretStr(key),
        usage_id="agent",
        timeout=job["call_timeout_s"],
        num_retries=job["call_attempts"],
        retry_min_wait=1,
        retry_max_wait=4,
        retry_multiplier=1,
        reasoning_effort=None,  # the inference server's default; not every server supports the option
        input_cost_per_token=0,  # the cost is counted elsewhere
        output_cost_per_token=0,
    )
    patience = {"no_change_timeout_seconds": max(1, int(job["command_timeout_s"]))}
    terminal = Tool(name=TerminalTool.name, params={"terminal_type": "subprocess", **patience})
    tools = [terminal, Tool(name=FileEditorTool.name), Tool(name=TaskTrackerTool.name)]
    conversation = LocalConversation(
        agent=Agent(llm=model, tools=tools, system_prompt_kwargs={"cli_mode": True}),
        workspace=Path.cwd(),
        persistence_dir=home / "conversation",
        max_iteration_per_run=job["max_iterations"],
        visualizer=None,
        delete_on_close=False,
    )
    raised = ""
    try:
        conversation.send_message(job["task"])
        conversation.run()
    except Exception as error:  # noqa: BLE001  on any error, the state of the conversation is the result
        raised = f"{type(error).__name__}: {error}"
    finally:
        report = describe(conversation, raised)
        write(home / "result.json", report)
        conversation.close()
    print(json.dumps({"status": report["status"], "error": report["error"], "steps": report["steps"]}))
    return 0 if report["status"] == "finished" else 1


def describe(conversation, raised: str) -> dict:
    """Returns the state of the conversation, as the adapter reads it."""
    state = conversation.state
    events = list(state.events)
    errors = [event for event in events if type(event).__name__ == "ConversationErrorEvent"]
    answers = {event.llm_response_id for event in events if getattr(event, "llm_response_id", None)}
    return {
        "status": state.execution_status.value,
        "error": errors[-1].code if errors else None,
        "detail": errors[-1].detail if errors else raised,
        "raised": raised,
        "steps": len(answers),
    }


def write(path: Path, told: dict) -> None:
    """Writes the file completely or not at all."""
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps(told, indent=1), encoding="utf-8")
    draft.replace(path)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute()))
