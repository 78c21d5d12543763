"""Keys of each command's JSON, printed at the end of its help. `[…]` is a list of objects with these keys."""

from __future__ import annotations

_RESULTS = "runs [as `runs`, and open_networks provenance], results [as `show`]"
_AGENTS = "[name version runs dialect installed needs_model summary folder arguments]"
_CLASS = (
    "name cpus memory_bytes gpus architecture ephemeral_capacity ephemeral_provider "
    "persistent_provider pool_min pool_max pool_slots pool_cooldown_s"
)
_MODELS = "[id model url upstream_model policy_version dialects api_key_env context_tokens engine state added_at]"
_WEBHOOK = "id url kinds secret_env position created_at failures wait_s last_error delivered_at"
_PAUSE = "run_id changed waiting"

KEYS: dict[str, str] = {
    "demo": _RESULTS,
    "status": _RESULTS,
    "submit": (
        "run_id tasks [task_id name] open_networks page; with --wait runs results as `status`; with --dry-run "
        "would_submit replicas tasks"
    ),
    "train": "[step run_id version figures]; with --dry-run plan problems",
    "cancel": "task_ids",
    "retry": "task_ids",
    "schedule add": "name cron tasks next",
    "schedule remove": "name",
    "schedule list": "[name cron dataset agent misfire next last last_run last_failure]",
    "runs": (
        "[id name user_name purpose created_at total states scored resolved mean_reward scripted "
        "scripted_resolved suspect superseded finished_at rewards_outside]"
    ),
    "show": "task_id run_id name replica agent model mode state end_reason verdict scripted failure attempts",
    "logs": "task_id events [id at kind run_id task_id attempt_id instance_id data] agent_log test_report",
    "artifacts": "[attempt kind key url size_bytes sha256 missing]",
    "explain": (
        "of a run run_id name user_name total states delayed phases waits slowest retries now hint "
        "comes_after; of a task task_id run_id name user_name mode resource_class state end_reason "
        "accepted_at finished_at seconds tries now phases waits"
    ),
    "usage": (
        "[key id attempts calls turns prompt_tokens completion_tokens cached_tokens cost_usd unpriced_calls "
        "scripted_calls waste_tokens waste_usd model_s waited_s environment_s grading_s grading_usd]"
    ),
    "report": "run_id run created_at headline baselines by versions provenance flaky notes transcripts",
    "compare": (
        "first second tasks difference mcnemar_p only_first only_second by_majority differs "
        "replicas_needed power_difference"
    ),
    "diagnose": "[count end_reason error phase line hosts images examples]",
    "sweep resources": "[run_id figures tasks difference mcnemar_p]",
    "export": "format path written left_out notes",
    "bundle": "path pages",
    "experience open": "run_id groups",
    "experience status": "run_id groups dropped unused",
    "record": "run_id folder written",
    "regrade": "judged stored solved_now unsolved_now unscored_now queued flips left_out",
    "dataset list": (
        "[name adapter source licence citation hub_id split files rows language path_languages versions from]"
    ),
    "dataset pull": "name argument content_hash tasks adapter hub_id revision of_rows",
    "dataset show": (
        "name argument content_hash tasks adapter hub_id revision of_rows columns languages repositories created first"
    ),
    "dataset filter": "source run run_id pass_rate tasks rated chosen path argument",
    "dataset lint": "dataset tasks faults",
    "dataset validate": "runs states tasks",
    "env build": "environments built kept",
    "agents": _AGENTS,
    "agents list": _AGENTS,
    "agents install": "[agent version folder took_s error]",
    "up": "programs started took_s restart_needed",
    "down": "programs stragglers removed engine_stopped engine_kept_for",
    "web": "link lapses_s",
    "doctor": "[name level found fix]",
    "pause": _PAUSE,
    "resume": _PAUSE,
    "budget": "run_id budget_usd spent_usd",
    "instances": (
        "[id mode resource_class provider handle host state slots used age_s silent_s overdue draining_why deadline_at]"
    ),
    "drain": "asked gone live",
    "classes": f"[{_CLASS}]",
    "classes set": _CLASS,
    "classes remove": "name",
    "limits": "[name used waiting capacity source]",
    "limits set": "name capacity",
    "limits clear": "name capacity",
    "quota": "[user own quota running pending instances spent_usd spent_since]",
    "quota set": "user_name weight running pending instances spend_usd",
    "quota clear": "user_name own",
    "hosts": "[name joined_at seen_at instances slots running]",
    "worker invite": "token url",
    "worker join": "host ready",
    "worker leave": "host not_revoked",
    "worker migrate": "revision",
    "users add": "token id user_name server",
    "users list": "[id user_name kind scopes label created_at expires_at used_at]",
    "users revoke": "revoked",
    "webhooks add": _WEBHOOK,
    "webhooks list": f"[{_WEBHOOK}]",
    "webhooks remove": _WEBHOOK,
    "receipt": "receipt agrees differences silent",
    "audit": "findings left ages waiting",
    "simulate": "total users throughput utilisation peak attempt_ends instances",
    "images sync": "registry built copied present failed images",
    "models list": _MODELS,
    "models add": _MODELS,
    "models drain": _MODELS,
    "models resume": _MODELS,
    "models remove": _MODELS,
    "models swap": _MODELS,
    "models publish": _MODELS,
}
"""JSON keys by command and subcommand."""
