"""An agent for MegaFlow in one file, without a framework. Started as `agent.py JOB_FILE`; see docs/howto/agents.md."""

import http.client
import json
import os
import socket
import struct
import sys
import urllib.error
import urllib.request

with open(sys.argv[1], encoding="utf-8") as file:
    JOB = json.load(file)
TOOL = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
TOOLS = [{"type": "function", "function": {"name": "bash", "description": "Runs a command.", "parameters": TOOL}}]
DONE = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
NO_ANSWER = (OSError, http.client.HTTPException, ValueError, LookupError, TypeError)  # none in time, cut, or rubbish
PROMPT = f"Solve the task with the tool. When it is done, run `echo {DONE}`.\n\n{JOB['task']['description']}"


def ask_bridge(**request):
    """One request, one answer, one connection."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(JOB["bridge"]["socket"])
        content = json.dumps(request).encode()
        connection.sendall(struct.pack(">I", len(content)) + content)
        with connection.makefile("rb") as stream:
            return json.loads(stream.read(struct.unpack(">I", stream.read(4))[0]))


def ask_model(messages):
    body = json.dumps({"model": JOB["model"]["name"], "messages": messages, "tools": TOOLS}).encode()
    key = os.environ.get(JOB["model"]["key_variable"], "none")
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{JOB['model']['openai_base_url']}/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=JOB["model"]["call_timeout_s"]) as answer:
        return json.load(answer)["choices"][0]["message"]


def work(messages):
    """How it ended, in how many turns, and why."""
    limits = JOB["limits"]
    for step in range(1, limits["max_steps"] + 1):
        try:
            message = ask_model(messages)
        except urllib.error.HTTPError as error:
            said = error.read(2000).decode("utf-8", "replace")
            return ("context_exhausted" if "context" in said else "model_error"), step, f"HTTP {error.code}: {said}"
        except NO_ANSWER as error:
            return "model_error", step, f"{type(error).__name__}: {error}"
        messages.append(message)
        for call in message.get("tool_calls") or ():
            command = json.loads(call["function"]["arguments"])["command"]
            result = ask_bridge(command=command, timeout_s=limits["command_timeout_s"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": json.dumps(result)})
            print(f"$ {command}\n{result.get('output', result)}", flush=True)
            if result.get("output", "").lstrip().startswith(DONE):
                return "submitted", step, ""
        if not message.get("tool_calls"):
            return "agent_error", step, "the model called no tool"
    return "step_limit", limits["max_steps"], ""


assert "error" not in ask_bridge(hello=JOB["bridge"]["protocol"])
conversation = [{"role": "user", "content": PROMPT}]
end_reason, steps, detail = work(conversation)
with open(os.path.join(JOB["home"], "conversation.json"), "w", encoding="utf-8") as file:
    json.dump(conversation, file, indent=1)
with open(JOB["result"], "w", encoding="utf-8") as file:
    json.dump({"protocol": JOB["protocol"], "end_reason": end_reason, "detail": detail, "steps": steps}, file)
