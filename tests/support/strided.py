"""Arrays whose rows are parts of wider rows, as the steps of ops.inc have them: how a test's array
is laid out for a call, and taken out of there again. A step that a test does not give is the row's
width. What lies between rows must survive a call."""

from typing import Any

import numpy as np

BETWEEN = 3.25  # exact in every type

# Of an op, the arrays whose rows are each step's numbers apart.
_SHARE = {"step": ("gate", "up")}
_SHARE_BACKWARD = {"step": ("gate", "up", "dgate", "dup")}
_LORA = {f"step{i}": (f"y{i}",) for i in range(4)}
STEPS: dict[str, dict[str, tuple[str, ...]]] = {
    "linear": {"step": ("y", "plus")},
    "linear_backward": {"step": ("dy",)},
    "lora": _LORA,
    "lora_backward": _LORA,
    "swiglu": {"gate_step": ("gate",), "up_step": ("up",)},
    "swiglu_backward": {"gate_step": ("gate", "dgate"), "up_step": ("up", "dup")},
    "swiglu_share": _SHARE,
    "swiglu_share_backward": _SHARE_BACKWARD,
    "rotate": {"q_step": ("q_raw",), "kv_step": ("k_raw",)},
    "rotate_backward": {"q_step": ("q_raw", "dq"), "kv_step": ("k_raw", "dk")},
    "conv": {"x_step": ("x",)},
    "conv_backward": {"x_step": ("x", "dx")},
    "delta_gates": {"step": ("b", "a")},
    "delta_gates_backward": {"step": ("b", "a", "db", "da")},
    "kv_write": {"v_step": ("v",)},
    "attention_backward": {"q_step": ("dq",), "kv_step": ("v", "dk", "dv")},
}


def _shape(value: Any) -> tuple | None:
    return value if isinstance(value, tuple) else getattr(value, "shape", None)


def _width(shape: tuple) -> int:
    return int(np.prod(shape[1:], dtype=np.int64))


def with_steps(op: str, args: dict) -> dict:
    """The arguments with the steps that they lack."""
    missing = {
        step: next(_width(shape) for name in names if (shape := _shape(args[name])) is not None)
        for step, names in STEPS.get(op, {}).items()
        if step not in args and names[0] in args
    }
    return args | missing


class Layout:
    """Where a call's arrays lie with gaps."""

    def __init__(self, op: str, args: dict):
        self.shape, self.step = {}, {}
        for step, names in STEPS.get(op, {}).items():
            for name in names:
                source = args.get(name)
                shape = _shape(args.get(source) if isinstance(source, str) else source)
                if shape is not None and args[step] != _width(shape):
                    assert args[step] > _width(shape), f"{op}: {step} is less than {name}'s rows"
                    self.shape[name], self.step[name] = shape, args[step]

    def spread(self, name: str, value: Any) -> Any:
        """An argument as it goes to the device's memory."""
        if name not in self.step or isinstance(value, str):
            return value
        shape, step = self.shape[name], self.step[name]
        if isinstance(value, tuple):
            return (shape[0], step)
        wide = np.full((shape[0], step), BETWEEN)
        wide[:, : _width(shape)] = value.reshape(shape[0], -1) if shape[0] else 0
        return wide

    def gather(self, name: str, found: np.ndarray) -> np.ndarray:
        """A result without its gaps."""
        if name not in self.step:
            return found
        shape = self.shape[name]
        rows, between = np.split(found, [_width(shape)], axis=1)
        written = ~np.isnan(between) & (between != BETWEEN)
        assert not written.any(), f"{name}: wrote between its rows"
        return rows.reshape(shape)
