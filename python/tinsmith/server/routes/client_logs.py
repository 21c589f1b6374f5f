"""Numbers that clients log of their runs (tinsmith.log, or plain HTTP). ROUTES is the table.

A client may leave out the run if it is unambiguous: the newest run of the same API key, if no other
run of that key was used since. So a restarted script logs to its new run, and two scripts that
train at the same time must name theirs.
"""

from typing import Any

from starlette.requests import Request

from tinsmith.server.records import metric_logs
from tinsmith.server.routes.training import Handler
from tinsmith.server.service.bodies import read_json
from tinsmith.server.service.promises import Refusal, owner
from tinsmith.server.service.service import Service
from tinsmith.server.service.sessions import RunInfo


async def log(service: Service, request: Request) -> dict[str, Any]:
    """Stores the numbers of a step; by default the next one. The reply has the run and the step."""
    named, step, values = metric_logs.parse(await read_json(service, request))
    run = newest_run(service, owner(request)) if named is None else named
    here = service.sessions.runs.get(run)
    if here is None or here.session.owner != owner(request):
        whose = await service.disk(service.state.owner_of, run)
        if whose != owner(request):
            raise Refusal(404, f"there is no run {run!r:.200} of this API key; leave run out for "
                          "the newest, or give a training client's model_id")  # fmt: skip
    return {"run": run, "step": await service.disk(service.history.log, run, step, values)}


def newest_run(service: Service, who: str) -> str:
    """The newest run of an API key, if it is the only one that the key has used since."""
    mine = [
        run.id
        for run in service.sessions.runs.values()
        if run.session.owner == who and is_made(run)
    ]
    if not mine:
        raise Refusal(404, "this API key has no run here: make a training client first")
    *others, newest = mine
    begun, _ = service.history.heard(newest)
    used = [run for run in others if service.history.heard(run)[1] > begun]
    if used:
        raise Refusal(
            400,
            f"{len(used) + 1} runs of this API key are in use ({', '.join([newest, *used][:4])}): "
            "say which one with run, a training client's model_id",
        )
    return newest


def is_made(run: RunInfo) -> bool:
    """Whether a run exists or is being created: its creation was not refused."""
    made = run.session.made.get(run.id)
    return made is None or not made.done() or made.exception() is None


ROUTES: tuple[tuple[str, str, Handler], ...] = (("POST", "/log", log),)
