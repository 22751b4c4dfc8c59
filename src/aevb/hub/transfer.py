"""Send a run to a model hub, and fetch one. The package huggingface_hub speaks with the hub."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aevb.declare.registry import UnknownNetworkError
from aevb.declare.serialization import own_parts
from aevb.hub.contents import ALLOWED, CARD, SAVED, Item, items, size_text, staged
from aevb.loading import load
from aevb.model_card import ModelCard, card_of
from aevb.page.sections import Opened
from aevb.runtime.checked_files import whole_folder
from aevb.training.checkpoint import folders
from aevb.training.run import Run, load_run, recipe_of
from aevb.training.run_folder import SCHEMA

if TYPE_CHECKING:
    from huggingface_hub import HfApi

MOST_FILES = 100  # files of a repository that are fetched
MOST_BYTES = 2_000_000_000  # bytes that are fetched, unless the caller allows more
NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Pushed:
    """What a push has sent, and where.

    Attributes:
        url: The address of the repository.
        commit: The commit.
        items: The files.

    >>> item = Item("model.json", 900, "the declaration")
    >>> print(Pushed("https://hub.example.org/me/digits", "5ca1ab1e", (item,)))
    1 file, 900 bytes, in https://hub.example.org/me/digits
    """

    url: str
    commit: str
    items: tuple[Item, ...]

    def __str__(self) -> str:
        total = sum(item.bytes for item in self.items)
        files = "1 file" if len(self.items) == 1 else f"{len(self.items)} files"
        return f"{files}, {total:,} bytes, in {self.url}"


def push(
    run: Run | str | Path,
    name: str,
    *,
    private: bool = False,
    card: ModelCard | None = None,
    resumable: bool = False,
    message: str = "Add a run of aevb",
    modules: Mapping[str, Any] | None = None,
    token: str | None = None,
    confirm: Callable[[Sequence[Item]], bool] | None = None,
) -> Pushed:
    """Send a run to a model hub, as the repository ``name`` ("user/name"), which is made if needed.

    The files are those of :func:`contents`, and the card: ``card``, or README.md in the run's
    folder, or else a card without results. Rows of the data are never sent.

    Arguments:
        run: A run, or its folder.
        name: The repository, "user/name".
        private: Whether a new repository is private.
        card: The model card, such as that of ``run.card(data)``.
        resumable: Send the state of the optimiser, too, so that the run can be resumed.
        modules: Your own torch modules and functions, as for :func:`aevb.load`, with which the run
            is read; those of a :class:`aevb.Run` are known. They are not sent.
        message: The message of the commit.
        token: A token of the hub. By default the one that ``hf auth login`` has stored.
        confirm: Called with the files before anything is sent; if it returns False, a ValueError
            says that nothing was sent.

    The address of the hub is ``HF_ENDPOINT``, by default that of the package huggingface_hub.

    Returns:
        The address, the commit and the files.

    >>> import tempfile
    >>> from aevb import zoo
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     zoo.fa(x=3, z=2).save(folder)
    ...     push(folder, "me/factors", confirm=lambda items: False)
    Traceback (most recent call last):
    ...
    ValueError: Nothing was sent.
    """
    _check_name(name)
    folder = run.out if isinstance(run, Run) else Path(run)
    if folder is None:
        raise ValueError("The run has no folder. Train it with out=…, or pass its folder.")
    if modules is None and isinstance(run, Run):
        modules = own_parts(run.model.graph)
    api = _api(token)
    with staged(folder, resumable=resumable, modules=modules) as place:
        if card is not None or not (place / CARD).is_file():
            (card or _plain_card(place, folder, name, modules)).save(place / CARD)
        found = items(place)
        if confirm is not None and not confirm(found):
            raise ValueError("Nothing was sent.")
        with _explained(name):
            return _send(api, place, name, found, private=private, message=message)


def _plain_card(
    place: Path, folder: Path, name: str, modules: Mapping[str, Any] | None
) -> ModelCard:
    """Return a card of what the published files say, without results."""
    run = Run.load(place, modules=modules) if folders(place) else None
    model = load(place, modules=modules) if run is None else run.model
    opened = Opened(folder.resolve().name, place, model, run, [] if run is None else run.rows)
    opened = Opened(**vars(opened) | {"recipe": recipe_of(place)})
    opened.problems.append("the results; `aevb card RUN` computes them and writes README.md.")
    return card_of(opened, repo=name)


def _send(
    api: HfApi, place: Path, name: str, found: list[Item], *, private: bool, message: str
) -> Pushed:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    url = api.create_repo(name, private=private, exist_ok=True)
    info = api.model_info(name)
    if private and info.private is False:  # it was there before
        raise ValueError(
            f"{name} is a public repository, so nothing was sent. Make it private on the hub, or "
            f"choose another name."
        )
    here = {item.path for item in found}
    # A checkpoint that is left from another push would be taken for the newest one.
    stale = [path for path in _paths(info) if ALLOWED.fullmatch(path)]
    operations: list[Any] = [
        CommitOperationAdd(path_in_repo=item.path, path_or_fileobj=place / item.path)
        for item in found
    ]
    operations += [CommitOperationDelete(path) for path in stale if path not in here]
    done = api.create_commit(name, operations, commit_message=message)
    return Pushed(str(url), str(done.oid), tuple(found))


def pull(
    name: str,
    out: str | Path,
    *,
    revision: str | None = None,
    token: str | None = None,
    modules: Mapping[str, Any] | None = None,
    most_bytes: int = MOST_BYTES,
) -> Path:
    """Fetch a run from a model hub, and check it.

    Only the files of a run are fetched, and never code. Read the model by :func:`aevb.load_run`, or
    that of a table by :func:`aevb.load_table`.

    Arguments:
        name: The repository, "user/name".
        out: A new folder, or an empty one.
        revision: A branch, a tag or a commit.
        token: A token of the hub. By default the one that ``hf auth login`` has stored.
        modules: Your own torch modules and functions that the run needs, as for
            :func:`aevb.load`.
        most_bytes: The most bytes to fetch, by default 2 GB.

    Returns:
        The folder.

    Raises:
        ValueError: The repository cannot be read or is too large; or a file is damaged or missing,
            which its hash tells. Then nothing is written.

    >>> pull("digits", "copy")
    Traceback (most recent call last):
    ...
    ValueError: The name of a repository is "user/name", got 'digits'.
    """
    _check_name(name)
    place = Path(out)
    if place.exists() and not (place.is_dir() and not any(place.iterdir())):
        raise ValueError(f"{place} is no empty folder. Choose another one.")
    api = _api(token)
    with _explained(name):
        info = api.model_info(name, revision=revision, files_metadata=True)
        paths = [path for path in _paths(info) if ALLOWED.fullmatch(path)]
    if "model.json" not in paths:
        raise ValueError(f"{name} holds no run of aevb: model.json is missing.")
    if len(paths) > MOST_FILES:
        raise ValueError(f"{name} has {len(paths)} files of a run; at most {MOST_FILES} are read.")
    _check_sizes(name, info, paths, most_bytes)
    with whole_folder(place) as temporary:
        with _explained(name):
            for path in paths:
                api.hf_hub_download(name, path, revision=info.sha, local_dir=temporary)
        shutil.rmtree(temporary / ".cache", ignore_errors=True)
        _check(temporary, name, modules)
    return place


def _paths(info: Any) -> list[str]:
    """Return the paths of the files in a repository."""
    return [one.rfilename for one in info.siblings or ()]


def _check_sizes(name: str, info: Any, paths: Sequence[str], most: int) -> None:
    """Raise ValueError if the files are larger than allowed, or if the hub does not say it."""
    sizes = {one.rfilename: one.size for one in info.siblings or ()}
    unknown = [path for path in paths if sizes[path] is None]
    if unknown:
        raise ValueError(
            f"The hub does not say how large {unknown[0]} of {name} is, so nothing was fetched."
        )
    total, largest = sum(sizes[path] for path in paths), max(paths, key=lambda path: sizes[path])
    if total > most:
        raise ValueError(
            f"The run {name} has {size_text(total)} (its largest file, {largest}, "
            f"{size_text(sizes[largest])}), but at most {size_text(most)} are fetched. If you "
            f"expect so much, allow it: most_bytes={total} (--most-bytes {total})."
        )


def _check(folder: Path, name: str, modules: Mapping[str, Any] | None) -> None:
    """Read a fetched run, which compares its files with their hashes."""
    try:
        if folders(folder):
            load_run(folder, "last", modules=modules)
            load_run(folder, modules=modules)
        elif (folder / SAVED[1]).is_file():
            load(folder, modules=modules)
        else:
            raise ValueError("it has neither checkpoints nor the manifest of a saved model.")
        if (folder / SCHEMA).is_file():
            from aevb.tables import load_table

            load_table(folder)
        recipe_of(folder)
    except UnknownNetworkError:
        raise  # it names what to pass
    except (ValueError, OSError) as error:
        text = str(error).replace(f"{folder}{os.sep}", "").replace(str(folder), name)
        raise ValueError(f"{name} was fetched, but cannot be used: {text}") from None


def check_ready(name: str) -> None:
    """Raise ValueError if a push or a pull must fail: a wrong name, or a missing package."""
    _check_name(name)
    _api(None)


def _check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise ValueError(f'The name of a repository is "user/name", got {name!r}.')


def _api(token: str | None) -> HfApi:
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise ValueError(
            "Sharing by a hub needs the package huggingface_hub: pip install 'aevb[hub]'."
        ) from None
    return HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=token, library_name="aevb")


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turn errors of the hub and of the network into a ValueError with the cause and the remedy."""
    from huggingface_hub.errors import (
        HfHubHTTPError,
        LocalTokenNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except RevisionNotFoundError:
        raise ValueError(f"{name} has no such revision on the hub.") from None
    except RepositoryNotFoundError:
        raise ValueError(
            f"There is no repository {name} on the hub, or it is private and you are not logged in "
            f"(hf auth login)."
        ) from None
    except LocalTokenNotFoundError:
        raise ValueError("You are not logged in to the hub. Run: hf auth login.") from None
    except HfHubHTTPError as error:
        first = (str(error).splitlines() or [""])[0]
        login = " Log in by: hf auth login." if "401" in first else ""
        raise ValueError(f"The hub refused {name}: {first}{login}") from None
    except Exception as error:
        # The package takes another library for HTTP from version to version.
        from_network = type(error).__module__.partition(".")[0] in ("httpx", "httpx2", "requests")
        if not from_network and not isinstance(error, OSError):
            raise
        raise ValueError(f"The hub cannot be reached: {error}.") from None
