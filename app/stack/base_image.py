"""Builds the base image of task recipes: from a registry's image, or from Debian's packages without one."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import docker
import requests
import structlog
from docker.errors import BuildError, DockerException, ImageNotFound

import app
from app.errors import EngineUnavailable, ImageBuildFailed, ImageUnavailable
from app.models.provider_keys import without_keys
from app.settings import Settings
from app.stack.engine import connected, engine_url
from app.stack.home import logs_folder, prepare, tail

log = structlog.get_logger(__name__)

RECIPE = Path(app.__file__).parent.parent / "worker_images" / "base"
"""Folder of the base image's recipe in the source checkout; a wheel does not contain it."""
BOOKWORM = "bookworm"
"""Debian release of `Settings.base_image`."""
_MORE_PACKAGES = {"bullseye": "python3-distutils"}
"""Additional packages by Debian release: pip needs them there."""
_REGISTRY_S = 10
_BUILD_S = 1800


def is_present(settings: Settings) -> bool:
    """Whether the engine has `settings.base_image`.

    Raises: EngineUnavailable: no engine answers.
    """
    with connected(settings) as client:
        try:
            client.images.get(settings.base_image)
        except ImageNotFound:
            return False
        except (DockerException, requests.RequestException) as error:
            raise EngineUnavailable(f"the engine does not say whether it has {settings.base_image}: {error}") from error
        return True


def ensure_base_image(
    settings: Settings, *, release: str = BOOKWORM, report: Callable[[str], None] = lambda line: None
) -> bool:
    """Builds `settings.base_image` on this Debian release when the engine has none; True: it was built now.

    Raises: EngineUnavailable: no engine answers. ImageUnavailable: this is not a source checkout, so it has no recipe.
        ImageBuildFailed: both builds failed, on a registry's image and from packages; with the log's end.
    """
    if is_present(settings):
        return False
    if not RECIPE.is_dir():
        raise ImageUnavailable(
            f"the engine has no image {settings.base_image}, and its recipe {RECIPE} is not here: a wheel does not "
            "carry it. Run from a source checkout, or set MEGAFLOW_BASE_IMAGE to an image that exists."
        )
    prepare(settings)
    if (public := _public_base(settings, release)) is not None:
        report(f"building the base image {settings.base_image} on {public}")
        if _build_on(public, settings, release):
            return True
    report(f"building the base image {settings.base_image} from Debian's packages (no image registry answers)")
    _build_from_packages(settings, release)
    return True


def _public_base(settings: Settings, release: str) -> str | None:
    """Returns Debian's image by its tag's current digest, so that the base is exact. None: no registry answers."""
    try:
        with connected(settings, timeout_s=_REGISTRY_S) as client:
            return f"debian@{client.images.get_registry_data(f'debian:{release}-slim').id}"
    except (DockerException, requests.RequestException) as error:
        log.info("base_image.no_registry", error=str(error))
        return None


def _build_on(public: str, settings: Settings, release: str) -> bool:
    """Builds the image and stores the digest in its label `megaflow.base.from`; False: the build failed."""
    try:
        with connected(settings, timeout_s=_BUILD_S) as client:
            client.images.build(
                path=str(RECIPE),
                tag=settings.base_image,
                buildargs={"DEBIAN_IMAGE": public, "DEBIAN_PACKAGES": _MORE_PACKAGES.get(release, "")},
                labels={"megaflow.base.from": public, "megaflow.base": release},
                rm=True,
                forcerm=True,
            )
    except (BuildError, docker.errors.APIError, requests.RequestException) as error:
        # The registry may resolve the name but not deliver the image. Debian's packages then give the same image.
        log.warning("base_image.recipe_failed", error=str(error))
        return False
    return True


def _build_from_packages(settings: Settings, release: str) -> None:
    logfile = logs_folder(settings) / "base-image.log"
    script = RECIPE / "build-from-packages.sh"
    with logfile.open("wb") as output:
        result = subprocess.run(  # noqa: S603 (our own script)
            ["/bin/sh", str(script), settings.base_image],
            env=without_keys(os.environ, {settings.model_api_key_env})
            | {"DOCKER_HOST": engine_url(settings), "DEBIAN_SUITE": release}
            | {"DEBIAN_PACKAGES": _MORE_PACKAGES.get(release, "")},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    if result.returncode != 0:
        raise ImageBuildFailed(
            f"{script.name} {settings.base_image} left with {result.returncode}. The end of {logfile}:\n{tail(logfile)}"
        )
