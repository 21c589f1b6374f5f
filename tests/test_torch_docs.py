"""The snippets of docs/torch.md run, and a Trainer with the loss gives what it gives without."""

import re
from pathlib import Path

import pytest
import tinsmith.torch as tt
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, TrainingArguments

PAGE = Path(__file__).parent.parent / "docs" / "torch.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_first_snippet():
    torch.manual_seed(0)
    head, hidden = torch.nn.Linear(8, 30), torch.randn(2, 5, 8, requires_grad=True)
    found = {"head": head, "hidden": hidden, "tokens": torch.randint(0, 30, (2, 5))}
    exec(SNIPPETS[0], found)
    logits = (hidden @ head.weight.T)[:, :-1].reshape(-1, 30)
    exact = torch.nn.functional.cross_entropy(logits, found["tokens"][:, 1:].reshape(-1))
    torch.testing.assert_close(found["loss"], exact)
    assert hidden.grad is not None


@pytest.mark.parametrize("counted", [False, True])
def test_a_trainer_has_the_loss_it_had(counted, tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 50}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads))
    found = {"tt": tt}
    exec(SNIPPETS[1], found)
    trainer = found["HeadTrainer"](model, TrainingArguments(str(tmp_path), report_to=[]))
    ids = torch.randint(0, 50, (2, 7))
    labels = ids.clone()
    labels[0, :3] = -100
    count = torch.tensor(20) if counted else None
    loss = trainer.compute_loss(model, {"input_ids": ids, "labels": labels}, False, count)
    extra = {"num_items_in_batch": count} if counted else {}
    exact = model(input_ids=ids, labels=labels, **extra).loss
    torch.testing.assert_close(loss, exact)
    ours = torch.autograd.grad(loss, tuple(model.parameters()))
    for a, b in zip(ours, torch.autograd.grad(exact, tuple(model.parameters())), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("count", [None, 9])
def test_gkds_loss_is_trls(count):
    pytest.importorskip("trl", reason="TRL is not installed")
    found = {"tt": tt}
    exec(SNIPPETS[2], found)
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 5, 40, requires_grad=True), torch.randn(2, 5, 40)
    labels = torch.tensor([-100, 1, 1, -100, 1]).expand(2, 5)
    losses = [
        trainer.generalized_jsd_loss(student, teacher, labels, 0.3, 1.3, num_items_in_batch=count)
        for trainer in (found["DistillTrainer"], found["GKDTrainer"])
    ]
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*(torch.autograd.grad(loss, student)[0] for loss in losses))
