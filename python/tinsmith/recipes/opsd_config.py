"""OPSD's command line: every option with its help, the defaults of the authors' code by date, and
what the options determine: the loss's configuration, the learning rate of a step, and the renderers
of student and teacher.

The authors changed their defaults on 2026-03-18. `defaults` names the set for options that are left
out. Impossible options are refused by name, before anything is written."""

import logging
import re
from typing import Any

import chz
from chz.mungers import if_none
from tinker_cookbook import cli_utils
from tinker_cookbook.utils.lr_scheduling import LRSchedule, compute_schedule_lr_multiplier

logger = logging.getLogger(__name__)

EMA = 0.999
# The settings in the authors' code, by date. A token_clip of 0 means none.
DEFAULTS: dict[str, dict[str, Any]] = {
    "march-2026": {
        "prompts": "math", "bare_student": False, "student_thinking": False,
        "teacher_thinking": True, "beta": 0.0, "token_clip": 0.05, "learning_rate": 5e-6,
        "grad_clip_norm": 0.1,
    },
    "february-2026": {
        "prompts": "math-february", "bare_student": True, "student_thinking": True,
        "teacher_thinking": True, "beta": 0.5, "token_clip": 0.0, "learning_rate": 2e-4,
        "grad_clip_norm": 1.0,
    },
}  # fmt: skip

TEACHERS = {"fixed": "base", "base": "base", "ema": "ema", "current": "current"}
PERIODIC = re.compile(r"periodic:([1-9][0-9]*)")

# The cookbook's renderers without thinking that have a counterpart with it: that one's suffix.
OFF = "_disable_thinking"
THINKING = {
    "deepseekv3_disable_thinking": "_thinking",
    "deepseekv4_1_disable_thinking": "",
    "kimi_k25_disable_thinking": "",
    "kimi_k26_disable_thinking": "",
    "kimi_k31_pro_disable_thinking": "_high_reasoning",
    "nemotron3_disable_thinking": "",
    "nemotron3_ultra_disable_thinking": "",
    "qwen3_disable_thinking": "",
    "qwen3_5_disable_thinking": "",
    "qwen3_8_disable_thinking": "_xhigh_reasoning",
}
# Suffixes of a family's renderers that think more, less, or keep earlier thinking.
VARIANT = re.compile(r"(|_thinking|_[a-z]+_thinking|_[a-z]+_reasoning(_effort)?)")


def _defaults(name: str) -> dict[str, Any]:
    if name not in DEFAULTS:
        raise ValueError(f"defaults must be one of {sorted(DEFAULTS)}, not {name!r}")
    return DEFAULTS[name]


def _said(option: str, doc: str) -> str:
    values = "; ".join(f"{name}: {values[option]}" for name, values in DEFAULTS.items())
    return f"{doc} ({values})"


def _by_defaults(option: str, doc: str) -> Any:
    """A field whose default is the one in `defaults`."""
    munger = if_none(lambda config: _defaults(config.defaults)[option])
    return chz.field(default=None, munger=munger, doc=_said(option, doc))


@chz.chz
class Config:
    """OPSD: a student learns, on its own answers, from itself with the solution in the prompt."""

    # Model
    model_name: str = chz.field(doc="the model that is trained: a hub's name or a folder")
    renderer_name: str | None = chz.field(
        default=None, doc="the cookbook's renderer; left out, the one that it recommends"
    )
    lora_rank: int = chz.field(default=64, doc="rank of the adapter")
    load_checkpoint_path: str | None = chz.field(
        default=None, doc="tinker:// path of weights to begin with"
    )
    defaults: str = chz.field(
        default="march-2026",
        doc=f"whose defaults: the authors' code of {' or '.join(DEFAULTS)}",
    )

    # Data
    data_path: str = chz.field(doc="JSONL with the columns problem and solution")
    test_path: str | None = chz.field(
        default=None, doc="held-out problems, in the same form, for evaluations"
    )
    prompts: str = _by_defaults(
        "prompts",
        "pairs of prompts by name (math, math-february, plain, demonstration), several with commas "
        "between them, or a JSON or JSONL file of one's own with the keys student and teacher",
    )
    bare_student: bool = _by_defaults(
        "bare_student", "the student's prompt without the renderer's template"
    )
    student_thinking: bool | None = chz.field(
        default=None, doc=_said("student_thinking", "whether the student's prompt lets it think")
    )
    teacher_thinking: bool | None = chz.field(
        default=None, doc=_said("teacher_thinking", "whether the teacher's prompt lets it think")
    )
    seed: int = chz.field(default=0, doc="of the order of the problems and of their prompts")

    # Sampling
    groups_per_batch: int = chz.field(default=32, doc="problems in a step")
    group_size: int = chz.field(default=1, doc="answers to each problem")
    max_tokens: int = chz.field(default=1024, doc="longest answer, in tokens")
    temperature: float = chz.field(default=1.1, doc="of the student's answers")
    top_p: float = chz.field(default=0.95, doc="of the student's answers; 1: off")
    top_k: int = chz.field(default=20, doc="of the student's answers; -1: off")
    max_context_length: int = chz.field(
        default=32768, doc="of the teacher, in tokens; longer answers are cut, for both"
    )

    # Loss
    teacher: str = chz.field(
        default="fixed",
        doc="fixed (the base model), ema (an average of the student's weights), current (the "
        "student as it is), periodic:N (the student as it was every N steps), or a tinker:// path",
    )
    teacher_model: str | None = chz.field(
        default=None, doc="another base model of the server as teacher, instead"
    )
    teacher_ema: float = chz.field(default=EMA, doc="decay of teacher=ema")
    beta: float = _by_defaults(
        "beta", "0: KL(teacher‖student), 1: KL(student‖teacher), between them: Jensen-Shannon"
    )
    temperature_loss: float = chz.field(default=1.0, doc="divides both sides' logits in the loss")
    top_k_loss: int = chz.field(
        default=0, doc="compares the teacher's best K tokens; 0: the whole vocabulary"
    )
    token_clip: float = _by_defaults(
        "token_clip", "largest value of each vocabulary entry's term in the divergence; 0: none"
    )

    # Optimizer
    learning_rate: float = _by_defaults("learning_rate", "AdamW's, before the schedule")
    lr_schedule: LRSchedule = chz.field(
        default="constant", doc="constant, linear or cosine; the last two end near 0 at max_steps"
    )
    lr_warmup_steps: int = chz.field(
        default=0, doc="steps in which the learning rate rises, before the schedule"
    )
    grad_clip_norm: float = _by_defaults("grad_clip_norm", "largest norm of a step's gradient")
    max_steps: int = chz.field(default=100, doc="steps of the whole run")

    # Logging, evaluation, checkpoints
    log_path: str | None = chz.field(
        default=None, doc="folder of the log; left out, one in the cookbook's folder of runs"
    )
    wandb_project: str | None = chz.field(default=None, doc="project of Weights & Biases")
    wandb_name: str | None = chz.field(default=None, doc="the run's name there")
    eval_every: int = chz.field(default=20, doc="steps between evaluations; 0: none")
    save_every: int = chz.field(default=20, doc="steps between checkpoints; 0: only the last")
    behavior_if_log_dir_exists: cli_utils.LogdirBehavior = chz.field(
        default="ask", doc="ask, resume, delete or raise"
    )

    base_url: str | None = chz.field(
        default=None, doc="the server's address; left out, TINKER_BASE_URL"
    )

    @chz.validate
    def _check(self) -> None:
        _defaults(self.defaults)
        if not (
            self.teacher in TEACHERS
            or self.teacher.startswith("tinker://")
            or PERIODIC.fullmatch(self.teacher)
        ):
            raise ValueError(
                f"teacher must be fixed, ema, current, periodic:N (N from 1) or a tinker:// path, "
                f"not {self.teacher!r}; another base model is teacher_model"
            )
        if self.teacher_model and self.teacher != "fixed":
            raise ValueError(
                f"teacher_model={self.teacher_model} teaches instead of teacher={self.teacher}: "
                "give one of the two"
            )
        if self.lr_schedule not in ("constant", "linear", "cosine"):
            raise ValueError(
                f"lr_schedule must be constant, linear or cosine, not {self.lr_schedule!r}"
            )
        for name in ("groups_per_batch", "group_size", "max_tokens", "max_steps", "lora_rank"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not self.max_context_length >= 2:
            raise ValueError(
                f"max_context_length must be at least 2, not {self.max_context_length}"
            )
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be 0 (greedy) or more, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be more than 0 and at most 1, not {self.top_p}")
        if self.teacher != "ema" and self.teacher_ema != EMA:
            raise ValueError(
                f"teacher_ema={self.teacher_ema} is of teacher=ema, and teacher={self.teacher}"
            )
        if not 0 <= self.lr_warmup_steps <= self.max_steps:
            raise ValueError(
                f"lr_warmup_steps must be from 0 to max_steps ({self.max_steps}), "
                f"not {self.lr_warmup_steps}"
            )
        if not 0 <= self.beta <= 1:
            raise ValueError(f"beta must be from 0 to 1, not {self.beta}")
        if not self.token_clip >= 0:
            raise ValueError(f"token_clip must be 0 (none) or more, not {self.token_clip}")
        if self.bare_student and self.student_thinking is not None:
            raise ValueError(
                "bare_student=True leaves out the template that student_thinking would change: "
                "give one of the two"
            )


def loss_config(config: Config, snapshot: str | None = None) -> dict[str, float | str]:
    """loss_fn_config of generalized_jsd; `snapshot` is the path of teacher=periodic:N."""
    named = TEACHERS.get(config.teacher, config.teacher)
    teacher = config.teacher_model or snapshot or named
    found: dict[str, float | str] = {
        "beta": config.beta,
        "temperature": config.temperature_loss,
        "top_k": config.top_k_loss,
        "teacher": teacher,
    }
    if config.token_clip > 0:
        found["token_clip"] = config.token_clip
    if teacher == "ema":
        found["teacher_ema"] = config.teacher_ema
    return found


def period_of(config: Config) -> int:
    """The N of teacher=periodic:N; 0 for other teachers."""
    match = PERIODIC.fullmatch(config.teacher)
    return int(match[1]) if match else 0


def learning_rate_at(config: Config, step: int) -> float:
    """The learning rate of a step, counted from 0: a linear warm-up, then the schedule."""
    warmup = config.lr_warmup_steps
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    share = compute_schedule_lr_multiplier(
        config.lr_schedule, step - warmup, max(config.max_steps - warmup, 1)
    )
    return config.learning_rate * share


def switched(renderer_name: str, thinking: bool) -> str | None:
    """The renderer of the same family with or without thinking; None if its family has no such
    switch.

        switched("qwen3", thinking=False)  # "qwen3_disable_thinking"
    """
    for off, ending in THINKING.items():
        family = off.removesuffix(OFF)
        rest = renderer_name.removeprefix(family)
        if rest == renderer_name or not VARIANT.fullmatch(rest):
            continue
        thinks = rest != OFF and (rest != "" or ending == "")
        return renderer_name if thinks == thinking else family + (ending if thinking else OFF)
    return None


def renderer_names(config: Config, renderer_name: str) -> tuple[str, str]:
    """The renderers of student and teacher.

    Raises ValueError if student_thinking or teacher_thinking is given, and the renderer's family
    has no such switch. If only `defaults` sets it, that is logged and ignored.
    """
    found = []
    for option in ("student_thinking", "teacher_thinking"):
        given = getattr(config, option)
        wanted = _defaults(config.defaults)[option] if given is None else given
        name = switched(renderer_name, wanted)
        if name is None and given is not None:
            raise ValueError(
                f"{option}={given}: the renderer {renderer_name!r} cannot switch thinking on or "
                f"off; leave {option} out, or name one that can: {sorted(THINKING)}"
            )
        if name is None:
            logger.info("%s has no switch for %s; it is left as is.", renderer_name, option)
        found.append(name or renderer_name)
    return found[0], found[1]
