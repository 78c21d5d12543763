"""Builds a recipe's image: the base with its Python, SWE-bench's layout, and the source at one commit in /testbed.

Everything is in the build context; the build has no network. The image has the name that the dataset uses, so
submissions find it on this engine.
Source: swebench 4.1.0, harness/test_spec/python.py: /opt/miniconda3, the environment `testbed`, /testbed.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from app.artifacts.bundles import pack
from app.errors import ImageUnavailable, SpecInvalid
from app.host.engine import Engine, engine_of
from app.images.references import located, manifest_of
from app.images.task_images import Images
from app.models.spec import Build, EnvironmentSpec
from app.recipes import sources, wheels
from app.recipes.recipe import DEBIAN, Recipe
from app.settings import Settings

_LABEL = "megaflow.recipe"
_TIMEOUT_S = 3600.0
_DOCKERFILE = """ARG BASE_IMAGE=megaflow/base:bookworm
FROM ${{BASE_IMAGE}} AS prepared
COPY . /build
RUN sh /build/prepare.sh

FROM ${{BASE_IMAGE}}
COPY --from=prepared /opt/miniconda3 /opt/miniconda3
COPY --from=prepared /testbed /testbed
WORKDIR /testbed
LABEL {label}={source}
"""
_ACTIVATE = """# Stands for conda's: `conda activate NAME` puts that environment's programs first.
conda() {
    [ "${1:-}" = activate ] || { echo "conda: only 'conda activate NAME' is known here" >&2; return 1; }
    export CONDA_DEFAULT_ENV="${2:-testbed}" CONDA_PREFIX="/opt/miniconda3/envs/${2:-testbed}"
    export PATH="$CONDA_PREFIX/bin:$PATH"
}
"""
# In pip.conf, `--no-build-isolation` is written `no-build-isolation = false`. Build tools are there, an index is not.
_PREPARE = """set -eu
place=/opt/miniconda3/envs/testbed
python3 -m venv --without-pip "$place"
mkdir -p /opt/miniconda3/bin && cp /build/activate /opt/miniconda3/bin/activate
printf '[global]\\nretries = 0\\n[install]\\nno-build-isolation = false\\n' >"$place/pip.conf"
export PATH="$place/bin:$PATH" PIP_NO_INDEX=1 PIP_FIND_LINKS=/build/wheels PIP_DISABLE_PIP_VERSION_CHECK=1
export PIP_ROOT_USER_ACTION=ignore
python "$(echo /build/wheels/pip-*.whl)/pip" install --quiet --no-compile --requirement /build/wheels.txt
mkdir /testbed && mv /build/repository.git /testbed/.git && cd /testbed
git config core.bare false && git reset --quiet --hard
mkdir -p .git/info && printf '%s\\n' '*.egg-info' /build >>.git/info/exclude
"""


@dataclass(frozen=True, slots=True)
class BuiltImage:
    """Built image, with its source and sizes."""

    image_id: str
    image: str
    source: str
    python: str
    left_out: tuple[str, ...]
    image_bytes: int  # without the base image
    fetched_bytes: int


def build(
    recipe: Recipe,
    settings: Settings,
    *,
    base: Callable[[Settings, str], None],
    patches: Mapping[str, str] | None = None,
    before: datetime | None = None,
) -> BuiltImage:
    """Builds a recipe's image. base: builds a Debian release's base image if missing. Rest: as `sources.fetched`.

    Raises: SpecInvalid: the recipe is invalid, or no source fits; ImageBuildFailed: with the log's end;
        ImageUnavailable, DatasetUnavailable: a fetch failed three times; EngineUnavailable, DiskFull.
    """
    release = DEBIAN[recipe.image_python]
    ours = settings.model_copy(update={"base_image": base_of(settings, release)})
    base(ours, release)
    engine = engine_of(ours)
    _refuse_others(engine, recipe.image)
    cache = settings.home / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="recipe-", dir=cache) as name:
        source = sources.fetched(recipe, patches or {}, before, Path(name) / "sources", cache / "sources")
        context = Path(name) / "context"
        context.mkdir()
        left_out = wheels.fetched(recipe, source.folder / "tree", context)
        (source.folder / "repository.git").rename(context / "repository.git")
        for unneeded in (*context.glob("repository.git/index"), *context.glob("repository.git/FETCH_HEAD")):
            unneeded.unlink()
        label = {"label": _LABEL, "source": shlex.quote(source.label)}
        (context / "Dockerfile").write_text(_DOCKERFILE.format(**label))
        (context / "activate").write_text(_ACTIVATE)
        (context / "prepare.sh").write_text("\n".join([_PREPARE, *recipe.install, "rm -rf .git/logs", ""]))
        (context / "sources.txt").write_text("# A context with this file is built without a network.\n")
        fetched_bytes = source.fetched_bytes + sources.size_of(context / "wheels")
        bundle, archive = pack(context)
    spec = EnvironmentSpec(build=Build(context=bundle, timeout_s=_TIMEOUT_S))
    image_id = Images(ours, fetch_bundle=lambda _: archive).ensure(spec, timeout_s=_TIMEOUT_S)
    host, path = located(recipe.image)
    repository, tag = manifest_of(path)
    with engine.named(f"name {recipe.image}", ImageUnavailable):
        engine.api.tag(image_id, f"{host}/{repository}", tag)
    size = _bytes_of(engine, image_id) - _bytes_of(engine, ours.base_image)
    return BuiltImage(image_id, recipe.image, source.label, recipe.image_python, left_out, size, fetched_bytes)


def base_of(settings: Settings, release: str) -> str:
    """Returns the local name of the base image with this Debian release."""
    return settings.base_image if release == "bookworm" else f"megaflow/base:{release}"


def _refuse_others(engine: Engine, image: str) -> None:
    """Raises: SpecInvalid: an image that we did not build has this name; the build would replace it."""
    with engine.named(f"look for {image}", ImageUnavailable):
        images = [one for one in engine.api.images() if image.removeprefix("docker.io/") in (one.get("RepoTags") or [])]
    if any(_LABEL not in (one.get("Labels") or {}) for one in images):
        raise SpecInvalid(
            f"expected no image {image} but one that was built here; found another: use it, or `docker rmi` it"
        )


def _bytes_of(engine: Engine, image: str) -> int:
    with engine.named(f"look at {image}", ImageUnavailable):
        return int(engine.api.inspect_image(image)["Size"])  # type: ignore[no-untyped-call]
