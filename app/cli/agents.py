"""Commands about agents: `megaflow agents [list | install]`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from app.agents import FRAMEWORKS, FrameworkOptions, catalogue, framework_named
from app.agents.external import external_manifests, traits_of
from app.agents.framework import Framework
from app.agents.installation import Installer
from app.cli.show import Json, as_json, console, errors, listing, say
from app.errors import AgentUnavailable, UnknownName
from app.settings import Settings, load

Names = Annotated[list[str] | None, typer.Argument(metavar="NAME…", help="Names of agent frameworks.")]

agents = typer.Typer(help="Agents: list them, install their frameworks.")


@dataclass(frozen=True)
class AgentListing:
    """Row of the list of agents. `installed`: None for an agent that needs no installation."""

    name: str
    version: str
    runs: str
    dialect: str
    installed: bool | None
    needs_model: bool
    summary: str
    folder: str | None = None
    arguments: dict[str, str] = field(default_factory=dict)  # keys of `--agent-arg`, with their meaning


@agents.callback(invoke_without_command=True)
def show(context: typer.Context, json: Json = False) -> None:
    """List agents: name, version, where they run, whether their frameworks are installed."""
    if context.invoked_subcommand is None:
        list_agents(json)


_COLUMNS: dict[str, Callable[[AgentListing], str]] = {
    "agent": lambda one: one.name,
    "version": lambda one: one.version or "-",
    "runs": lambda one: one.runs,
    "speaks": lambda one: one.dialect or "-",
    "installed": lambda one: {None: "-", True: "yes", False: "no"}[one.installed],
    "": lambda one: one.summary,
}


@agents.command(name="list")
def list_agents(json: Json = False) -> None:
    """List every agent of this installation, with the external ones of MEGAFLOW_AGENT_MANIFESTS."""
    rows = listed(load())
    listing(rows, _COLUMNS, json=json)
    for one in rows if not json else ():
        for key, does in one.arguments.items():
            console.print(f"{one.name} --agent-arg {key}=VALUE: {does}", soft_wrap=True)


def listed(settings: Settings) -> list[AgentListing]:
    """Raises: SettingsInvalid: a manifest is wrong."""
    options = _making(settings, may_install=False)
    traits = catalogue.AGENTS | {name: traits_of(manifest) for name, manifest in options.manifests.items()}
    return [
        _framework(name, about, options) if name in FRAMEWORKS or name in options.manifests else _ours(name, about)
        for name, about in traits.items()
    ]


def _ours(name: str, traits: catalogue.Traits) -> AgentListing:
    return AgentListing(name, "", "on the worker", "", None, traits.needs_model, traits.summary)


def _framework(name: str, traits: catalogue.Traits, making: FrameworkOptions) -> AgentListing:
    framework = framework_named(name, making)
    try:
        folder: Path | None = framework.install().folder
    except AgentUnavailable:
        folder = None
    return AgentListing(
        name=name,
        version=framework.version,
        runs=framework.placement.value,
        dialect=framework.dialect.name.lower(),
        installed=folder is not None,
        needs_model=traits.needs_model,
        summary=traits.summary,
        arguments={"KEY": "any key: in the job file, as `arguments`"}
        if traits.any_argument
        else {key: argument.help for key, argument in traits.arguments.items()},
        folder=None if folder is None else str(folder),
    )


@agents.command()
def install(
    names: Names = None,
    every: Annotated[bool, typer.Option("--all", help="Install every framework that can be installed here.")] = False,
    json: Json = False,
) -> None:
    """Install frameworks on this host now. Otherwise the first task that needs one installs it."""
    settings = load()
    making = _making(settings)
    chosen = list(dict.fromkeys(names or [])) or (_installable(making) if every else [])
    if not chosen:
        raise UnknownName.of("framework", "", _installable(making))
    frameworks = [framework_named(name, making) for name in chosen]  # refuses a wrong name before an hour of installing
    results = [_installed(framework) for framework in frameworks]
    if json:
        as_json(results)
    if failed := [one["agent"] for one in results if "error" in one]:
        raise AgentUnavailable(f"not installed: {', '.join(failed)}; the reasons are above")


def _installable(making: FrameworkOptions) -> list[str]:
    return [name for name in FRAMEWORKS if name != "swe-agent" or making.swe_agent_source] + list(making.manifests)


def _installed(framework: Framework) -> dict[str, Any]:
    about: dict[str, Any] = {"agent": framework.name, "version": framework.version}
    begun = time.monotonic()
    try:
        with errors.status(f"{framework.name} {framework.version}: installing …"):
            folder = framework.install().folder
    except AgentUnavailable as error:
        say(f"{framework.name}: {error}")
        return about | {"error": str(error)}
    about |= {"folder": str(folder), "took_s": round(time.monotonic() - begun, 2)}
    say(f"{framework.name} {framework.version}: {about['took_s']:.1f} s, {folder}")
    return about


def _making(settings: Settings, *, may_install: bool = True) -> FrameworkOptions:
    """Raises: SettingsInvalid."""
    return FrameworkOptions(
        Installer(settings.tools, may_install=may_install, ready=settings.ready_tools),
        swe_agent_source=settings.swe_agent_source,
        manifests=external_manifests(settings),
    )
