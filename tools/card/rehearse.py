"""What a command would reach, by the seconds that its stages are thought to take: no stage runs,
and no time passes.

    python -m tools.card.rehearse first

A table: when each stage begins and ends, in seconds, if all goes as thought; whether it would reach
its end if it took three times as long; and which others would not, then or if it hung."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from . import runner, stages
from .report import Found, Stage, table

SLOWER, HANGS = 3.0, float("inf")


@dataclass
class Pretended:
    """A process that ends when its time has come."""

    clock: "Still"
    began: float
    takes_s: float

    @property
    def ends(self) -> float:
        return self.began + self.takes_s

    def over(self) -> bool:
        return self.clock.now() >= self.ends

    def end(self, stage: Stage, seconds: float, late: bool) -> Found:
        return Found(stage.name, stage.tells, "cut off" if late else "right", "", seconds)


class Still:
    """A machine whose time goes on when it is waited for."""

    def __init__(self, takes: Callable[[Stage], float]) -> None:
        self.takes, self.time = takes, 0.0
        self.processes: list[Pretended] = []
        self.began: dict[str, float] = {}

    def now(self) -> float:
        return self.time

    def start(self, stage: Stage) -> Pretended:
        self.began[stage.name] = self.time
        self.processes.append(Pretended(self, self.time, self.takes(stage)))
        return self.processes[-1]

    def wait(self, until: float) -> None:
        self.time = min([until, *(one.ends for one in self.processes if not one.over())])


def pretend(
    part: Sequence[Stage], seconds: float, longer: str = "", times: float = 1.0
) -> tuple[Still, list[Found]]:
    """A command's course where one stage takes `times` as long."""
    machine = Still(lambda one: one.takes_s * (times if one.name == longer else 1.0))
    return machine, list(runner.run(machine, part, seconds))


def lost(found: Sequence[Found], but: str = "") -> str:
    """The stages that did not reach their end, but for one."""
    unended = [one for one in found if one.state != "right" and one.name != but]
    return ", ".join(f"{one.name} ({one.state})" for one in unended) or "-"


def rows(part: Sequence[Stage], seconds: float) -> list[dict]:
    """The table's."""
    machine, found = pretend(part, seconds)
    taken = {one.name: one for one in found}
    made = []
    for stage in part:
        begins = machine.began.get(stage.name)
        ended = taken[stage.name]
        row = {"stage": stage.name, "begins": "-" if begins is None else f"{begins:.0f}"}
        row["ends"] = "-" if begins is None else f"{begins + ended.seconds:.0f}"
        row["ended at the latest after"] = f"{stage.limit_s:.0f}"
        slower, hangs = (pretend(part, seconds, stage.name, times)[1] for times in (SLOWER, HANGS))
        ends = {one.name: one.state for one in slower}[stage.name]
        row["three times as long"] = "reaches its end" if ends == "right" else ends
        row["then others lost"] = lost(slower, stage.name)
        row["hangs: others lost"] = lost(hangs, stage.name)
        made.append(row)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.card.rehearse", description=__doc__.splitlines()[0]
    )
    parser.add_argument("part", choices=stages.STAGES)
    parser.add_argument("--seconds", type=float, help="by default the command's own")
    args = parser.parse_args()
    seconds = args.seconds or stages.SECONDS[args.part]
    print(table(rows(stages.STAGES[args.part], seconds - stages.ENDING_S)))


if __name__ == "__main__":
    main()
