"""The snippets of docs/torch.md run, and a Trainer with the loss gives what it gives without."""

import re

import pytest
import tinsmith.torch as tt
import torch
from support import ROOT
from transformers import Qwen3Config, Qwen3ForCausalLM, TrainingArguments

PAGE, DEMO = ROOT / "docs" / "torch.md", ROOT / "python" / "tinsmith" / "demo" / "model"
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


def sdft_batch(tokenizer):
    """Two conversations as SDFTTrainer has them: prompts filled up on the left, completions on the
    right, and the teacher's prompts with a demonstration before."""
    torch.manual_seed(0)
    left, right = torch.tensor([[0] + 4 * [1], 5 * [1]]), torch.tensor([6 * [1], 4 * [1] + 2 * [0]])
    prompt, completion, shown = (torch.randint(3, 400, (2, n)) for n in (5, 6, 3))
    return {
        "prompt_ids": prompt,
        "prompt_mask": left,
        "completion_ids": completion,
        "completion_mask": right,
        "teacher_input_ids": torch.cat([prompt[:, :1], shown, prompt[:, 1:], completion], 1),
        "teacher_attention_mask": torch.cat([left[:, :1], left[:, 2:], left[:, 1:], right], 1),
    }


@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("steps", [1, 2], ids=["on policy", "rollouts of an earlier step"])
def test_sdfts_loss_is_trls(tail, steps, tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    pytest.importorskip("trl", reason="TRL is not installed")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.experimental.sdft import SDFTConfig

    found = {"tt": tt}
    exec(SNIPPETS[3], found)
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    row = {"prompt": "a question", "privileged_context": "an answer"}
    how = {"distillation_topk": 7, "distillation_add_tail": tail, "temperature": 1.3}
    how |= {"steps_per_generation": steps, "num_loss_tokens_to_skip": 1, "report_to": []}
    config = SDFTConfig(str(tmp_path), distillation_alpha=0.3, bf16=False, use_cpu=True, **how)
    results = []
    for kind in ("SDFTTrainer", "HeadSDFTTrainer"):
        model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
        data = Dataset.from_list([row])
        trainer = found[kind](model, config, train_dataset=data, processing_class=tokenizer)
        batch = sdft_batch(tokenizer)
        rollout = {name: batch[name] for name in batch if not name.startswith("teacher")}
        old = trainer._compute_rollout_logps(**rollout)
        assert (old is None) == (steps == 1)
        if old is not None:
            # As if the weights had been others then: a ratio below the limit, one above, and 1.
            batch["old_per_token_logps"] = old + torch.linspace(-2, 2, old.numel()).view_as(old)
        model.eval()
        loss = trainer.compute_loss(model, batch)
        metrics = trainer._metrics["eval"]
        results.append((loss, torch.autograd.grad(loss, tuple(model.parameters())), metrics))
    (theirs, their_gradients, logged), (ours, our_gradients, also) = results
    torch.testing.assert_close(ours, theirs)
    assert theirs > 1e-3 and logged.keys() == also.keys()
    for a, b in zip(our_gradients, their_gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)
