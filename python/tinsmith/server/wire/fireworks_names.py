"""Names in Fireworks' training SDK, and the tinker:// paths that they stand for.

Its client uses no tinker:// paths. Its runs have the id run-<32 hex digits>:train:N. Its
checkpoints are local/run-<32 hex digits>/<name>, for training and for sampling alike: the call says
which is meant. A bare name is the run's own checkpoint, or else the newest checkpoint of that name
that fits the run.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tinsmith.checkpoints.meta import Meta
from tinsmith.checkpoints.store import SCHEME, Store, StoredCheckpoint

ACCOUNT = "local"
RUN = "run-"
_REF = re.compile(r"(?:cross_job://|[^/:]+/)?(run-[0-9a-f]{32})[/:-]([^/:]+)")
SAMPLED = re.compile(
    r"accounts/[^/]+/(trainingSessions/(?P<session>[^/]+)(/checkpoints/(?P<own>.+))?"
    r"|trainingSamplers/(checkpoints/(?P<other>.+)|(?P<base>.+)))"
)


def is_asking(session: str, create: Mapping[str, Any]) -> bool:
    """Whether Fireworks' client creates a run. Its SDK sends alpha, which Tinker's does not have;
    its sessions begin with ts- if it also samples here."""
    lora = create.get("lora_config")
    return session.startswith("ts-") or (isinstance(lora, dict) and "alpha" in lora)


def run_id(session: str, number: int) -> str:
    """The id of a session's run if Fireworks' client creates it."""
    digest = hashlib.blake2b(f"{session}:{number}".encode(), digest_size=16)
    return f"{RUN}{digest.hexdigest()}:train:{number}"


def is_run(model_id: str) -> bool:
    """Whether a run is Fireworks' client's: there, a checkpoint replaces an older one of the same
    name, as that client warns."""
    return model_id.startswith(RUN)


def ref_of(tinker_path: str) -> str:
    """Fireworks' name for a checkpoint of such a run; any other path stays unchanged."""
    run, _, rest = tinker_path.removeprefix(SCHEME).partition("/")
    name = rest.partition("/")[2]
    return f"{ACCOUNT}/{run.partition(':')[0]}/{name}" if is_run(run) else tinker_path


def tinker_path(
    store: Store,
    name: str,
    kind: str,
    runs: Sequence[str] | None = None,
    fits: Callable[[Meta], bool] | None = None,
) -> str:
    """The path of a checkpoint with a name of Fireworks' client; any other name stays unchanged. A
    bare name needs `runs`, the client's runs: it is their checkpoint, or else the newest one that
    `fits`. FileNotFoundError if it no longer exists."""
    found = _REF.fullmatch(name)
    if found is None and (runs is None or "/" in name):
        return name
    label = found[2] if found else name
    own = (f"{found[1]}:",) if found else tuple(runs or ())
    known = checkpoints(store, kind, own[0] if found else RUN)
    places = [place for place in known if place.path.endswith(f"/{label}")]
    mine = [place for place in places if place.path.removeprefix(SCHEME).startswith(own)]
    others = [] if found else [place for place in places if place not in mine]
    reason, other = FileNotFoundError(f"there is no checkpoint {name!r:.200}"), ""
    for place in newest(mine) + newest(others):
        try:
            meta = store.meta(place.path)
        except FileNotFoundError as error:  # its ttl is over, for example
            reason = error
            continue
        if place in mine or fits is None or fits(meta):
            return place.path
        other = other or place.path
    if not other:
        raise reason
    return other  # loading it reports what does not fit


def newest(places: Iterable[StoredCheckpoint]) -> list[StoredCheckpoint]:
    """Sorted, newest first."""
    return sorted(places, key=lambda place: place.changed, reverse=True)


def alive(store: Store, place: StoredCheckpoint) -> bool:
    """Whether a checkpoint can still be found."""
    try:
        store.meta(place.path)
    except (OSError, ValueError):  # gone, ended, or damaged
        return False
    return True


def checkpoints(store: Store, kind: str, prefix: str = RUN) -> Iterator[StoredCheckpoint]:
    """The checkpoints of a kind that runs of Fireworks' clients have saved. Only folders of runs
    whose ids begin with `prefix` are read."""
    for run in store.runs():
        if run.startswith(prefix):
            yield from (one for one in store.places(run) if f"/{kind}/" in one.path)
