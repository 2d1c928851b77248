"""`bertopt push`: upload a verified artefact to the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from bertopt import stages
from bertopt.errors import Unsupported, UsageError
from bertopt.system import environment
from bertopt.system.untrusted import first_line

_REPOSITORY = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")


def push(directory: Path, repository: str, private: bool = False, revision: str | None = None, message: str | None = None) -> str:
    """Verify the artefact in `directory`, upload it to `repository` (org/name), and return its address.

    Raises UsageError for a name that no repository can have or a stage that was not delivered, IntegrityError where a file
    changed, Unsupported where the hub cannot be reached or refuses.
    """
    if not _REPOSITORY.fullmatch(repository):
        raise UsageError(f"the repository must be org/name; got '{repository}'")
    manifest = stages.verify(directory)
    if manifest.stage is None:
        raise UsageError(f"'{directory}' is a stage that was not delivered; push OUT/artifact, which passed every check")
    environment.check_hub_variables()
    from huggingface_hub import HfApi, errors

    api = HfApi(library_name="bertopt")
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        done = api.upload_folder(
            repo_id=repository, folder_path=str(directory), revision=revision,
            commit_message=message or f"{manifest.stage}: {manifest.form}, {manifest.precision}",
        )  # fmt: skip
    except errors.HFValidationError as error:
        raise UsageError(f"the hub takes no repository of the name '{repository}' ({first_line(error)})") from error
    except Exception as error:  # the hub's client raises those of httpx or requests, by its version
        raise Unsupported(
            f"'{repository}' could not be written ({type(error).__name__}: {first_line(error)}); check the network, log in with "
            "'hf auth login', and that the token may write there"
        ) from error
    return str(done.commit_url)
