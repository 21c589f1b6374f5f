"""Sampling clients through the unmodified SDK: seeds, stops, log-probabilities, snapshots."""

from pathlib import Path

import numpy as np
import pytest
import tinker
import tinsmith
import torch
from conftest import CONTEXT, TOKENIZER, VOCAB, logprobs, make_datum
from support.small_run import PROMPT, make_client, sample, train

EOS = 2


def test_same_seed_same_tokens_whatever_else_decodes(service_client):
    client = service_client.create_sampling_client(base_model="tiny").result()
    alone = sample(client, 3, max_tokens=12, seed=7, stop=[])
    params = tinker.SamplingParams(max_tokens=20, seed=1, stop=[])
    others = [client.sample(PROMPT, 2, params) for _ in range(4)]
    assert sample(client, 3, max_tokens=12, seed=7, stop=[]) == alone
    assert len({tuple(tokens) for tokens in alone}) == 3
    assert len({str([s.tokens for s in other.result().sequences]) for other in others}) == 1
    zero = [sample(client, 1, max_tokens=12, seed=0, stop=[]) for _ in range(2)]
    assert zero[0] == zero[1] != alone[:1]
    drawn = {str(sample(client, 1, max_tokens=12, stop=[])) for _ in range(3)}
    assert len(drawn) == 3  # a missing seed is a fresh one


def test_stops_none_ends_at_the_end_of_sequence_and_an_empty_list_never(service_client):
    client = service_client.create_sampling_client(base_model="tiny").result()
    free = sample(client, 16, max_tokens=100, seed=3, stop=[])
    assert all(len(tokens) == 100 for tokens in free)
    cut = [tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens for tokens in free]
    assert any(len(tokens) < 100 for tokens in cut)
    assert sample(client, 16, max_tokens=100, seed=3) == cut
    assert sample(client, 16, max_tokens=100, seed=3, stop="never seen") == cut
    assert max(max(tokens) for tokens in free) >= TOKENIZER  # ids without a token are drawn, too


def test_stop_ids_and_strings_are_the_last_of_the_tokens(service_client, tiny_model_dir):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tiny_model_dir / "tokenizer.json"))
    client = service_client.create_sampling_client(base_model="tiny").result()
    free = sample(client, 1, max_tokens=60, seed=11, stop=[])[0]
    stop = free[5]
    by_id = sample(client, 1, max_tokens=60, seed=11, stop=[stop, 299])[0]
    assert by_id == free[: free.index(stop) + 1]
    # Two neighbours whose text is plain, so that the string begins in one token and ends in the
    # next; the first place where the text appears is where sampling must end.
    plain = [tokenizer.decode([token]) for token in free]
    pair = next(i for i in range(4, 59) if (plain[i] + plain[i + 1]).strip().isascii()
                and plain[i].strip() and plain[i + 1].strip())  # fmt: skip
    text = plain[pair][-1:] + plain[pair + 1][:1]
    ends = [
        n for n in range(1, 61) if text in tokenizer.decode(free[:n], skip_special_tokens=False)
    ]
    for given in (text, [text], [text, "never seen"]):
        reply = client.sample(
            PROMPT, 1, tinker.SamplingParams(max_tokens=60, seed=11, stop=given)
        ).result()
        expected = free[: ends[0]]
        if EOS in expected:
            expected = expected[: expected.index(EOS) + 1]
        assert list(reply.sequences[0].tokens) == expected
        assert reply.sequences[0].stop_reason == "stop"


def test_prompt_logprobs_are_the_trainers(service_client):
    training = make_client(service_client)
    train(training, 2)
    client = training.save_weights_and_get_sampling_client().result()
    tokens = [10, 20, 30, 40, 50, 60]
    scored = client.compute_logprobs(tinker.ModelInput.from_ints(tokens)).result()
    assert scored[0] is None and len(scored) == 6
    forward = training.forward([make_datum(tokens[:-1], tokens[1:])], "cross_entropy").result()
    np.testing.assert_allclose(scored[1:], logprobs(forward)[0], atol=1e-5)


@pytest.mark.parametrize("sparse", (False, True))
def test_target_prompt_logprobs_are_the_trainers_in_the_requests_layout(service_client, sparse):
    training = make_client(service_client)
    train(training, 2)
    client = training.save_weights_and_get_sampling_client().result()
    tokens = [10, 20, 30, 40, 50, 60]
    ids = torch.full((5, 20), -1)  # wide enough for the SDK to send it sparse
    ids[1, :2], ids[3, 0], ids[4, 19] = torch.tensor([30, 7]), 8, 9
    make = tinker.TensorData.from_torch_sparse if sparse else tinker.TensorData.from_torch
    asked = make(ids, pad_value=-1) if sparse else make(ids)
    params = tinker.SamplingParams(max_tokens=1, temperature=0.3)
    prompt = tinker.ModelInput.from_ints(tokens)
    reply = client.sample(prompt, 2, params, True, target_prompt_logprobs=asked).result()
    found = reply.target_prompt_logprobs
    assert (found.sparse_crow_indices is not None) == sparse
    assert (found.shape, found.dtype) == ([5, 20], "float32")
    datum = make_datum(tokens[:-1], ids.clamp(min=0).numpy())
    forward = training.forward([datum], "cross_entropy").result()
    wanted = np.where(ids.numpy() >= 0, logprobs(forward)[0], 0.0)
    np.testing.assert_array_equal(found.to_torch().numpy(), wanted)
    assert reply.prompt_logprobs[2] == wanted[1, 0]  # the prompt's own token was asked for there


def test_alternatives_to_prompt_tokens(service_client):
    client = service_client.create_sampling_client(base_model="tiny").result()
    params = tinker.SamplingParams(max_tokens=1, temperature=0.7, seed=3)
    reply = client.sample(PROMPT, 1, params, prompt_alt_tokens_k=6).result().prompt_alt_tokens
    tokens, found = reply.tokens.to_torch(), reply.logprobs.to_torch()
    assert (tokens.shape, tokens.dtype) == ((4, 6), torch.int64)
    assert (found.shape, found.dtype) == ((4, 6), torch.float32)
    scored = client.sample(PROMPT, 1, params, target_prompt_logprobs=reply.tokens).result()
    assert torch.equal(scored.target_prompt_logprobs.to_torch(), found)
    assert len(set(tokens[0].tolist())) > 1 and int(tokens.max()) < VOCAB


def test_sampled_logprobs_are_scaled_by_the_temperature(service_client):
    client = service_client.create_sampling_client(base_model="tiny").result()

    def top(temperature: float) -> dict[int, float]:
        params = tinker.SamplingParams(max_tokens=2, seed=2, temperature=temperature, stop=[])
        reply = client.sample(PROMPT, 1, params, topk_sample_logprobs=VOCAB).result()
        sequence = reply.sequences[0]
        known = dict(sequence.topk_logprobs[0])
        assert len(sequence.topk_logprobs) == 2
        assert known[sequence.tokens[0]] == pytest.approx(sequence.logprobs[0], abs=1e-6)
        return known

    plain, sharp = top(1.0), top(0.5)
    ids = sorted(set(plain) & set(sharp))
    assert len(ids) >= TOKENIZER
    ratios = [(sharp[i] - sharp[ids[0]]) - 2 * (plain[i] - plain[ids[0]]) for i in ids]
    np.testing.assert_allclose(ratios, 0, atol=1e-4)
    assert sum(np.exp(value) for value in sharp.values()) == pytest.approx(1, abs=1e-4)


def test_topk_prompt_logprobs_and_the_last_n(service_client):
    client = service_client.create_sampling_client(base_model="tiny").result()
    params = tinker.SamplingParams(max_tokens=1)

    def ask(**extra):
        return client.sample(
            PROMPT, 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=7, **extra
        ).result()

    reply = ask()
    top = reply.topk_prompt_logprobs
    assert len(top) == 5 and top[0] is None and all(len(row) == 7 for row in top[1:])
    scored = zip(top[1:], PROMPT.to_ints()[1:], reply.prompt_logprobs[1:], strict=True)
    for row, token, value in scored:
        values = [entry[1] for entry in row]
        assert values == sorted(values, reverse=True)
        assert value <= values[0] + 1e-6
        known = {int(entry[0]): entry[1] for entry in row}
        assert token not in known or known[token] == pytest.approx(value, abs=1e-6)
    last = ask(prompt_logprobs_last_n=2)
    assert last.prompt_logprobs[:3] == [None] * 3
    assert last.prompt_logprobs[3:] == reply.prompt_logprobs[3:]


def test_a_snapshot_stays_as_it_was_saved(service_client):
    training = make_client(service_client)
    before = training.save_weights_and_get_sampling_client().result()
    base = service_client.create_sampling_client(base_model="tiny").result()
    first = before.compute_logprobs(PROMPT).result()
    np.testing.assert_allclose(first[1:], base.compute_logprobs(PROMPT).result()[1:], atol=1e-6)
    train(training, 3)
    after = training.save_weights_and_get_sampling_client().result()
    assert before.compute_logprobs(PROMPT).result() == first
    assert after.compute_logprobs(PROMPT).result() != first


def test_a_prompt_may_leave_room_for_one_token(service_client):
    client = service_client.create_sampling_client(base_model="tiny").result()
    full = tinker.ModelInput.from_ints([i % 200 + 3 for i in range(CONTEXT - 1)])
    assert len(client.compute_logprobs(full).result()) == CONTEXT - 1
    reply = client.sample(full, 1, tinker.SamplingParams(max_tokens=50, stop=[])).result()
    assert (len(reply.sequences[0].tokens), reply.sequences[0].stop_reason) == (1, "length")
    rest = tinker.ModelInput.from_ints([5] * (CONTEXT - 3))
    reply = client.sample(rest, 1, tinker.SamplingParams(stop=[])).result()
    assert (len(reply.sequences[0].tokens), reply.sequences[0].stop_reason) == (3, "length")


def drawn_without_a_seed(model: Path, folder: Path, seed: int | None) -> list[list[int]]:
    """What two requests without a seed draw on a fresh server, from an adapter without one."""
    with tinsmith.serve(model, device="cpu", checkpoints=folder, seed=seed) as backend:
        trainer = backend.service_client().create_lora_training_client(str(model), rank=4)
        sampler = trainer.result().save_weights_and_get_sampling_client().result()
        prompt = tinker.ModelInput.from_ints([5, 6, 7])
        params = tinker.SamplingParams(max_tokens=12)
        results = [sampler.sample(prompt, 2, params).result() for _ in range(2)]
    return [list(one.tokens) for result in results for one in result.sequences]


def test_a_server_with_a_seed_repeats_itself(tiny_model_dir: Path, tmp_path: Path) -> None:
    first, again = (drawn_without_a_seed(tiny_model_dir, tmp_path / n, 7) for n in ("a", "b"))
    other = drawn_without_a_seed(tiny_model_dir, tmp_path / "c", 8)
    fresh = drawn_without_a_seed(tiny_model_dir, tmp_path / "d", None)
    assert first == again
    assert first[0] != first[2]  # two requests of one run are not the same draw
    assert other != first and fresh != first


def test_a_resumed_run_draws_what_it_would_have_drawn(tiny_model_dir: Path, tmp_path: Path) -> None:
    """On a server with a seed, requests without one; twice, from a snapshot and from a file."""
    with tinsmith.serve(
        {"tiny": tiny_model_dir}, device="cpu", checkpoints=tmp_path, seed=3
    ) as own:
        drawn, bases, path = [], [], ""
        for resumed in (False, True):
            with own.service_client() as service:
                base = service.create_sampling_client(base_model="tiny").result()
                bases.append(sample(base, 2, max_tokens=12, stop=[]))
                if resumed:
                    make = service.create_training_client_from_state_with_optimizer
                    client = make(path).result()
                else:
                    client = make_client(service)
                    train(client, 2)
                    path = client.save_state("two").result().path
                found = []
                for step in range(3):
                    samplers = [client.save_weights_and_get_sampling_client().result()]
                    if step == 1:
                        file = client.save_weights_for_sampler(f"s{resumed}").result().path
                        samplers.append(service.create_sampling_client(model_path=file).result())
                    for sampler in samplers:
                        found += [sample(sampler, 2, max_tokens=12, stop=[]) for _ in range(2)]
                    train(client, 1)
                drawn.append(found)
    assert drawn[0] == drawn[1]
    assert len({str(tokens) for tokens in drawn[0]}) == 8  # and no two are the same draw
    assert bases[0] != bases[1]


def test_each_step_of_a_run_draws_anew(tiny_model_dir: Path, tmp_path: Path) -> None:
    """On a server with a seed, from weights that a step has left as they were."""
    drawn = []
    with (
        tinsmith.serve({"tiny": tiny_model_dir}, device="cpu", checkpoints=tmp_path, seed=3) as own,
        own.service_client() as service,
    ):
        client = make_client(service)
        for _ in range(3):
            sampler = client.save_weights_and_get_sampling_client().result()
            drawn.append(sample(sampler, 1, max_tokens=12, stop=[]))
            client.optim_step(tinker.AdamParams(learning_rate=0.0)).result()
    assert len(set(map(str, drawn))) == 3


def test_a_full_context_can_be_scored(service_client: tinker.ServiceClient) -> None:
    sampler = service_client.create_sampling_client(base_model="tiny").result()
    tokens = [5 + i % 90 for i in range(CONTEXT)]
    found = sampler.compute_logprobs(tinker.ModelInput.from_ints(tokens)).result()
    short = sampler.compute_logprobs(tinker.ModelInput.from_ints(tokens[:40])).result()
    assert len(found) == CONTEXT and found[0] is None
    assert found[1:40] == short[1:]
