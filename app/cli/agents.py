"""Commands about agents: `megaflow agents [list | install | check]`."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from app.agents import catalogue
from app.agents.external import external_manifests, traits_of
from app.agents.framework import Framework
from app.agents.frameworks import FRAMEWORKS, FrameworkOptions, framework_named
from app.agents.installation import Installer
from app.cli.agent_trial import TrialFindings, Where, checked
from app.cli.show import as_json, console, errors, say
from app.cli.tables import Table
from app.errors import AgentUnavailable, UnknownName
from app.settings import Settings, load

Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
Names = Annotated[list[str] | None, typer.Argument(metavar="NAME…", help="Agents that are frameworks.")]

agents = typer.Typer(help="Agents: which there are, installing their frameworks, trying one out.")


def register(cli: typer.Typer) -> None:
    """Add this file's commands."""
    cli.add_typer(agents, name="agents")


# --- list -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AgentListing:
    """One agent, as shown. `installed` is None for what needs no installing."""

    name: str
    version: str
    runs: str
    dialect: str
    installed: bool | None
    size_bytes: int | None
    needs_model: bool
    summary: str
    folder: str | None = None
    arguments: dict[str, str] = field(default_factory=dict)  # keys of `--agent-arg`, with what they do


@agents.callback(invoke_without_command=True)
def show(context: typer.Context, json: Json = False) -> None:
    """Agents: name, version, where they run, whether their frameworks are installed."""
    if context.invoked_subcommand is None:
        list_agents(json)


@agents.command(name="list")
def list_agents(json: Json = False) -> None:
    """Every agent of this installation; external ones are those of MEGAFLOW_AGENT_MANIFESTS."""
    found = listed(load())
    if json:
        as_json([asdict(one) for one in found])
        return
    table = Table("agent", "version", "runs", "speaks", "installed", "size", "")
    for one in found:
        table.add_row(*_cells(one))
    console.print(table)
    for one in found:
        for key, does in one.arguments.items():
            line = f"{one.name} --agent-arg {key}=VALUE: {does}"
            console.print(line, highlight=False, markup=False, soft_wrap=True)


def listed(settings: Settings) -> list[AgentListing]:
    """Raises: SettingsInvalid: a manifest is wrong."""
    making = _making(settings, may_install=False)
    traits = catalogue.AGENTS | {name: traits_of(manifest) for name, manifest in making.manifests.items()}
    return [
        _framework(name, about, making) if name in FRAMEWORKS or name in making.manifests else _ours(name, about)
        for name, about in traits.items()
    ]


def _ours(name: str, traits: catalogue.Traits) -> AgentListing:
    return AgentListing(name, "", "on the worker", "", None, None, traits.needs_model, traits.summary)


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
        size_bytes=None if folder is None else _size(folder),
        needs_model=traits.needs_model,
        summary=traits.summary,
        arguments={"KEY": "any key: in the job file, as `arguments`"}
        if traits.any_argument
        else {key: argument.help for key, argument in traits.arguments.items()},
        folder=None if folder is None else str(folder),
    )


def _cells(one: AgentListing) -> list[str]:
    installed = {None: "-", True: "yes", False: "no"}[one.installed]
    size = "" if one.size_bytes is None else f"{one.size_bytes / 1e6:,.0f} MB"
    return [one.name, one.version or "-", one.runs, one.dialect or "-", installed, size, one.summary]


def _size(folder: Path) -> int:
    """Bytes on the disk, a file with several names once."""
    blocks: dict[tuple[int, int], int] = {}
    for place, _, names in os.walk(folder):
        for name in names:
            about = os.lstat(os.path.join(place, name))
            blocks[about.st_dev, about.st_ino] = about.st_blocks * 512
    return sum(blocks.values())


# --- install --------------------------------------------------------------------------------------------------------


@agents.command()
def install(
    names: Names = None,
    every: Annotated[bool, typer.Option("--all", help="All that can be installed here.")] = False,
    json: Json = False,
) -> None:
    """Install frameworks on this host now; otherwise the first task that needs one does it."""
    settings = load()
    making = _making(settings)
    wanted = list(dict.fromkeys(names or [])) or (_installable(making) if every else [])
    if not wanted:
        raise UnknownName.of("framework", "", _installable(making))
    frameworks = [framework_named(name, making) for name in wanted]  # a wrong name before an hour of installing
    done = [_installed(framework) for framework in frameworks]
    if json:
        as_json(done)
    if failed := [one["agent"] for one in done if "error" in one]:
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
    about |= {"folder": str(folder), "size_bytes": _size(folder), "took_s": round(time.monotonic() - begun, 2)}
    say(f"{framework.name} {framework.version}: {about['size_bytes'] / 1e6:,.0f} MB, {about['took_s']:.1f} s, {folder}")
    return about


def _making(settings: Settings, *, may_install: bool = True, call_timeout_s: float = 60.0) -> FrameworkOptions:
    """Raises: SettingsInvalid."""
    return FrameworkOptions(
        Installer(settings.tools, may_install=may_install, ready=settings.ready_tools),
        call_timeout_s=call_timeout_s,
        call_attempts=2,
        swe_agent_source=settings.swe_agent_source,
        manifests=external_manifests(settings),
    )


# --- check ----------------------------------------------------------------------------------------------------------


@agents.command()
def check(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    kind: Annotated[str, typer.Option("--in", help="local, oci or docker: where it works.")] = "local",
    image: Annotated[str | None, typer.Option(help="With oci and docker: one with git; else the base image.")] = None,
    timeout_s: Annotated[float, typer.Option("--timeout", min=1, help="Seconds for the agent's work.")] = 300.0,
    json: Json = False,
) -> None:
    """Install an agent and let it work on a toy task with a scripted model; exit code 1 when that fails."""
    settings = load()
    if name in catalogue.AGENTS and name not in FRAMEWORKS:
        say(f"{name} is a part of MegaFlow: there is nothing to install and nothing to try")
        return
    framework = framework_named(name, _making(settings))
    where = Where.of(kind, image or settings.base_image)
    with errors.status(f"{name}: …") as status:
        found = checked(framework, settings, where, timeout_s, lambda doing: status.update(f"{name}: {doing} …"))
    if json:
        as_json(asdict(found))
    else:
        _print(found)
    if not found.ok:
        raise typer.Exit(1)


def _print(found: TrialFindings) -> None:
    lines = [
        ("solved", "yes" if found.solved else "no"),
        ("ended", found.end_reason or "-"),
        ("turns", "-" if found.turns is None else str(found.turns)),
        ("took", ", ".join(f"{what} {took:.1f} s" for what, took in found.times_s.items())),
        ("left in the repository", ", ".join(found.left) or "nothing"),
        ("why", found.detail),
        ("the end of its log", found.log_tail if not found.ok else ""),
    ]
    console.print(f"{found.agent} {found.version}: {'works' if found.ok else 'does not work'}", highlight=False)
    for what, text in lines:
        if text:
            console.print(f"  {what}: {text}", highlight=False, markup=False, soft_wrap=True)
