"""Every policy loss against its plain twin in float64, what some of them claim, and the choice of tokens
over a mini-batch."""

import functools
import math
import threading

import pytest
import torch
from algorithms.losses_by_name import policy_loss
from algorithms.test_split_law import B, RankEngine, make_rows, with_choice
from hypothesis import given, settings
from hypothesis import strategies as st
from workers import naive

from hydraflow.algorithms.actor_loss import ActorLoss
from hydraflow.algorithms.aggregate import Denominators
from hydraflow.algorithms.config import POLICY_LOSSES, REC_CLIP_MODES, REC_WEIGHTS
from hydraflow.algorithms.correction import Correction, Weighting
from hydraflow.algorithms.covariance import covariances, moments
from hydraflow.algorithms.policy_loss import PolicyLoss, vanilla
from hydraflow.algorithms.token_terms import TokenInputs
from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto
from hydraflow.workers.config import ActorConfig
from hydraflow.workers.token_selection import TokenSelector


def make_tokens(seed: int, rows: int = 6, length: int = 7) -> TokenInputs:
    """Probabilities of every size, masks with gaps, some chosen tokens."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: torch.rand(rows, length, generator=generator, dtype=torch.float64)  # noqa: E731
    mask = draw() < 0.8
    mask[0] = False
    now = (draw() * 0.98 + 0.01).log()
    old = (now + (draw() - 0.5) * 3).clamp(max=-1e-3)
    advantages = (draw() - 0.5) * 4
    chosen = (draw() < 0.3) & mask
    kept = [column.masked_fill(~mask, 0.0) for column in (now, old, advantages)]
    return TokenInputs(kept[0].requires_grad_(), kept[1], kept[2], mask.long(), chosen)


def plain_value(twin, tokens: TokenInputs) -> list[float]:
    """The sum of each row's losses."""
    sums = []
    for now, old, advantages, mask, chosen in zip(
        tokens.log_probs.detach(), tokens.old_log_probs, tokens.advantages, tokens.mask.bool(), tokens.chosen
    ):
        columns = (column[mask].tolist() for column in (old, advantages, chosen))
        losses = twin(list(now[mask]), *columns) if mask.any() else []
        sums.append(math.fsum(float(loss) for loss in losses))
    return sums


def plain_gradient(twin, tokens: TokenInputs) -> torch.Tensor:
    """Of the sum of the twin's losses."""
    gradient = torch.zeros_like(tokens.log_probs)
    for i in range(len(gradient)):
        places = tokens.mask[i].nonzero()[:, 0].tolist()
        now = [tokens.log_probs[i, t].detach().clone().requires_grad_() for t in places]
        others = [
            [column[i, t].item() for t in places] for column in (tokens.old_log_probs, tokens.advantages)
        ]
        chosen = [bool(tokens.chosen[i, t]) for t in places]
        if now:
            total = sum(twin(now, *others, chosen), sum(0 * logp for logp in now))
            gradient[i, places] = torch.stack(torch.autograd.grad(total, now))
    return gradient


def oracle_difference(name: str) -> float:
    """The largest difference of its gradient from its twin's, with the defaults of its keys."""
    return difference(policy_loss(name), naive.POLICY[name])


def difference(loss: PolicyLoss, twin) -> float:
    """The largest difference of a gradient from the twin's over five draws of tokens."""
    worst = 0.0
    for seed in range(5):
        tokens = make_tokens(seed)
        terms = loss(tokens)
        (terms.loss * tokens.mask).sum().backward()
        wanted = plain_gradient(twin, tokens)
        worst = max(worst, (tokens.log_probs.grad - wanted).abs().max().item())
        assert all(
            stat.shape == tokens.mask.shape and not stat.requires_grad for stat in terms.stats.values()
        )
    return worst


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_gradients_are_those_of_the_plain_twin(name):
    assert oracle_difference(name) < 1e-13


@pytest.mark.parametrize("name", sorted(set(POLICY_LOSSES) - {"dppo_kl", "dppo_tv", "dro"}))
def test_values_are_those_of_the_plain_twin(name):
    """The twins of these three have other values, and the same gradients."""
    for seed in range(3):
        tokens = make_tokens(seed)
        found = (policy_loss(name)(tokens).loss * tokens.mask).sum(1)
        assert found.tolist() == pytest.approx(plain_value(naive.POLICY[name], tokens), abs=1e-12)


@pytest.mark.parametrize("name", sorted(set(POLICY_LOSSES) - {"dro", "kimi15", "kl_cov"}))
def test_no_gradient_without_an_advantage(name):
    """These three pull towards the old policy besides."""
    tokens = make_tokens(1)
    still = TokenInputs(
        tokens.log_probs, tokens.old_log_probs, tokens.advantages * 0, tokens.mask, tokens.chosen
    )
    policy_loss(name)(still).loss.sum().backward()
    assert tokens.log_probs.grad.abs().max() == 0


@pytest.mark.parametrize("name", sorted(set(POLICY_LOSSES) - {"clip_cov", "opmd"}))
def test_at_the_old_policy_the_gradient_is_the_policy_gradients(name):
    """-A of every token; a mean over the row, for the geometric mean. OPMD's is divided."""
    tokens = make_tokens(2)
    row = TokenInputs(
        tokens.log_probs,
        tokens.log_probs.detach(),
        tokens.advantages[:, :1] * tokens.mask,
        tokens.mask,
        torch.zeros_like(tokens.chosen),
    )
    policy_loss(name)(row).loss.sum().backward()
    assert torch.allclose(tokens.log_probs.grad, -row.advantages, rtol=0, atol=1e-14)


@pytest.mark.parametrize("weight", REC_WEIGHTS)
@pytest.mark.parametrize("clip_mode", REC_CLIP_MODES)
def test_rec_with_every_clip_and_weight(clip_mode, weight):
    def twin(*given):
        return naive.rec(*given, clip_mode=clip_mode, weight=weight)

    assert difference(policy_loss("rec", rec_clip_mode=clip_mode, rec_weight=weight), twin) < 1e-13


def test_rec_on_one_side_with_importance_sampling_is_ppos_clip():
    found = policy_loss("rec", rec_weight="importance_sampling")
    clip = functools.partial(vanilla, clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=1e9)
    gradients = []
    for loss in (found, clip):
        tokens = make_tokens(5)
        (loss(tokens).loss * tokens.mask).sum().backward()
        gradients.append(tokens.log_probs.grad)
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-14)


CLIPPED = {
    "vanilla": [0, 0, 1, 1, 0, 0],
    "gspo": [0, 0, 1, 1, 0, 0],
    "geo_mean": [0, 0, 1, 1, 0, 0],
    "cispo": [1, 0, 1, 1, 0, 1],
    "sppo": [1, 0, 1, 1, 0, 1],
    "tis": [0, 0, 1, 0, 0, 1],
    "topr": [0, 0, 0, 0, 0, 1],
    "rec": [0, 0, 1, 1, 0, 0],
    "dppo_tv": [0, 0, 1, 1, 0, 0],
    "dppo_kl": [0, 0, 1, 1, 0, 0],
    "clip_cov": [0, 1, 1, 1, 0, 0],
}
"""Of rows of one token, with a ratio of 1/8, 1 and 4 and an advantage of 1, then of -1; the second is
chosen."""


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_which_tokens_are_counted(name):
    ratio = torch.tensor([[0.125], [1.0], [4.0]] * 2, dtype=torch.float64)
    old = torch.full_like(ratio, 0.24).log()  # both divergences of the outer ratios are above 0.2
    advantages = torch.tensor([[1.0]] * 3 + [[-1.0]] * 3, dtype=torch.float64)
    chosen = torch.tensor([[False], [True]] + [[False]] * 4)
    tokens = TokenInputs(old + ratio.log(), old, advantages, torch.ones_like(ratio), chosen)
    found = {key: stat[:, 0].tolist() for key, stat in policy_loss(name)(tokens).stats.items()}
    wanted = {"actor/pg_clipfrac": CLIPPED[name]} if name in CLIPPED else {}
    if name in ("vanilla", "dppo_tv", "dppo_kl"):  # 4 is above clip_ratio_c
        wanted["actor/pg_clipfrac_lower"] = [0, 0, 0, 0, 0, 1]
    if name in ("clip_cov", "kl_cov"):
        wanted["actor/cov_chosen"] = [0, 1, 0, 0, 0, 0]
    assert found == wanted


@pytest.mark.parametrize("name", [name for name in CLIPPED if name not in ("sppo", "tis", "topr")])
def test_the_lower_bound_may_be_another_than_the_upper_one(name):
    """Ratios of 1/2, which is clipped, and 1.4, which is not, with an advantage of 1, then of -1."""
    actor = ActorConfig(clip_ratio_low=0.1, clip_ratio_high=0.5)
    ratio = torch.tensor([[0.5], [1.4]] * 2, dtype=torch.float64)
    advantages = torch.tensor([[1.0]] * 2 + [[-1.0]] * 2, dtype=torch.float64)
    old = torch.full_like(ratio, 0.5).log()
    tokens = TokenInputs(old + ratio.log(), old, advantages, torch.ones_like(ratio), ratio < 0)
    stats = POLICY_LOSSES[name].bound(actor, actor.policy_loss)(tokens).stats
    wanted = [1, 0, 1, 0] if name == "cispo" else [0, 0, 1, 0]
    assert stats["actor/pg_clipfrac"][:, 0].tolist() == wanted


def test_a_token_that_was_certain_has_a_finite_divergence():
    """log 2, above 0.2, so it is not pushed down further."""
    logp, old = torch.tensor([[0.5]]).log(), torch.zeros(1, 1)
    tokens = TokenInputs(logp, old, -torch.ones(1, 1), torch.ones(1, 1))
    assert policy_loss("dppo_kl")(tokens).stats["actor/pg_clipfrac"].item() == 1.0


RING = {"rec_clip_mode": "ring", "rec_epsilon_low_prime": 0.4, "rec_epsilon_high_prime": 0.9}


@pytest.mark.parametrize(
    ("name", "keys", "same"),
    [
        ("tis", {"tis_lower_bound": 0.6, "tis_upper_bound": 1.4}, {"least": 0.6, "most": 1.4}),
        ("opmd", {"opmd_tau": 0.3}, {"tau": 0.3}),
        ("sppo", {"sppo_epsilon": 0.8}, {"most": 1.8}),
        ("rec", {"rec_weight": "advantage", "rec_temp": 2.5}, {"weight": "advantage", "temperature": 2.5}),
        ("rec", RING, {"clip_mode": "ring", "outer": (0.6, 1.9)}),
    ],
)
def test_keys_other_than_their_defaults(name, keys, same):
    assert difference(policy_loss(name, **keys), functools.partial(naive.POLICY[name], **same)) < 1e-13


def test_rec_has_a_finite_weight_for_any_advantage():
    tokens = make_tokens(7)
    far = TokenInputs(tokens.log_probs, tokens.old_log_probs, tokens.advantages * 1e4, tokens.mask)
    policy_loss("rec", rec_weight="advantage", rec_temp=1e-3)(far).loss.sum().backward()
    assert torch.isfinite(tokens.log_probs.grad).all()


def test_topr_weighs_good_and_bad_examples():
    """Twice and half of what the twin says."""

    def twin(now, old, advantages, chosen):
        return [
            loss * (2.0 if a > 0 else 0.5)
            for loss, a in zip(naive.topr(now, old, advantages, chosen), advantages)
        ]

    assert difference(policy_loss("topr", topr_positive_weight=2.0, topr_negative_weight=0.5), twin) < 1e-13


def test_kimi15_squares_the_log_ratio_of_the_whole_response():
    """In value, too: the row's losses sum to the paper's."""
    tokens = make_tokens(6)
    gap = ((tokens.log_probs - tokens.old_log_probs) * tokens.mask).sum(1)
    wanted = 0.15 * gap**2 - (tokens.advantages * tokens.log_probs).sum(1)
    found = (policy_loss("kimi15", kimi15_tau=0.3)(tokens).loss * tokens.mask).sum(1)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-13)


def test_gspo_has_the_gradient_of_its_sequence_form():
    """Equation 5 with one advantage for each row: the whole ratio is differentiated, and clipped as one."""
    tokens, total = make_tokens(3), torch.tensor(0.0, dtype=torch.float64)
    of_row = tokens.advantages.sum(1)
    trained = tokens.mask.sum(1).clamp(min=1)
    same = TokenInputs(tokens.log_probs, tokens.old_log_probs, of_row[:, None] * tokens.mask, tokens.mask)
    (policy_loss("gspo")(same).loss * tokens.mask / trained[:, None]).sum().backward()
    now = tokens.log_probs.detach().clone().requires_grad_()
    for i in range(len(now)):
        ratio = ((now[i] - tokens.old_log_probs[i]) * tokens.mask[i]).sum().div(trained[i]).exp()
        total = total - torch.minimum(ratio * of_row[i], ratio.clamp(0.8, 1.2) * of_row[i])
    total.backward()
    assert torch.allclose(tokens.log_probs.grad, now.grad, rtol=0, atol=1e-15)


@pytest.mark.parametrize("name", ["gspo", "geo_mean"])
@pytest.mark.parametrize("gap", [19.0, 21.0])
def test_a_rows_ratio_has_no_gradient_beyond_its_bound(gap, name):
    """Its value is constant there."""
    logp = torch.full((1, 3), gap, dtype=torch.float64, requires_grad=True)
    like = torch.zeros(1, 3, dtype=torch.float64)
    terms = policy_loss(name)(TokenInputs(logp, like, like - 1, like + 1))
    terms.loss.sum().backward()
    assert terms.loss.tolist() == [[pytest.approx(math.exp(min(gap, 20.0)))] * 3]
    assert bool((logp.grad != 0).all()) == (gap < 20)


@pytest.mark.parametrize("threshold", [2.0, 1e9])
def test_decoupled_ppo_is_vanilla_with_token_weights(threshold):
    """Fu et al. 2025 (AReaL, https://arxiv.org/abs/2505.24298), equation 5: behaviour, proximal and current
    policy. Its weight from behaviour to proximal is `rollout_is=token`, capped by the threshold."""
    tokens = make_tokens(4)
    behaviour = (tokens.old_log_probs - torch.linspace(-1, 1, 7, dtype=torch.float64)) * tokens.mask
    columns = {
        "response_mask": tokens.mask,
        "old_log_probs": tokens.old_log_probs,
        "advantages": tokens.advantages,
        "rollout_log_probs": behaviour,
    }

    class Output:
        log_probs, entropy = tokens.log_probs, None

    loss = ActorLoss(
        denominators=Denominators.count(tokens.mask),
        scale_factor=1.0,
        policy_loss=lambda tokens: vanilla(tokens, clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=1e9),
        correction=Correction(Weighting("token", threshold)),
    )
    loss(Output(), columns)[0].backward()
    now, total, count = tokens.log_probs.detach().clone().requires_grad_(), 0.0, int(tokens.mask.sum())
    for i, t in tokens.mask.nonzero().tolist():
        proximal, advantage = tokens.old_log_probs[i, t], tokens.advantages[i, t]
        u = (now[i, t] - proximal).exp()
        weight = min(math.exp(proximal - behaviour[i, t]), threshold)
        total = total - weight * torch.minimum(u * advantage, u.clamp(0.8, 1.2) * advantage) / count
    total.backward()
    assert torch.allclose(tokens.log_probs.grad, now.grad, rtol=0, atol=1e-15)


# --- the choice of tokens ----------------------------------------------------------------------------------


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10_000))
def test_kl_cov_chooses_the_tokens_of_the_highest_covariance(seed):
    rows = make_rows(seed)
    mask = rows["response_mask"].bool()
    logp, advantages = rows["x_log_probs"][mask].tolist(), rows["advantages"][mask].tolist()
    centre = [math.fsum(column) / len(column) for column in (logp, advantages)]
    found = [(x - centre[0]) * (a - centre[1]) for x, a in zip(logp, advantages)]
    wanted = max(1, int(0.3 * len(found)))
    best = sorted((cov for cov in found if cov > 0), reverse=True)[:wanted]
    after = with_choice("kl_cov", rows, [[[0, 3], [5]], [[1], [2, 4]]])
    assert sorted(cov for cov, taken in zip(found, after["chosen_tokens"][mask]) if taken) == sorted(best)
    assert not after["chosen_tokens"][~mask].any()


def test_clip_cov_draws_among_the_tokens_between_its_bounds():
    rows = make_rows(0)
    mask = rows["response_mask"].bool()
    logp, advantages = rows["x_log_probs"][mask], rows["advantages"][mask]
    found = covariances(logp, advantages, moments(logp, advantages))
    chosen = with_choice("clip_cov", rows, [[list(range(B))]])["chosen_tokens"][mask]
    assert chosen.sum() == max(1, int(0.2 * mask.sum()))
    assert ((found[chosen] > 0.05) & (found[chosen] < 1.0)).all()


@pytest.mark.parametrize("scores", [lambda draws: draws, torch.ones_like], ids=["draws", "equal scores"])
def test_draws_differ_between_optimizer_steps_and_training_steps(scores):
    """Of a hundred tokens with the same covariance, ten are chosen."""
    taken = []
    for step in (1, 1, 2):
        engine = RankEngine(0, 1, {}, threading.Barrier(1))
        selector = TokenSelector(
            lambda cov, draws: (scores(draws), 0.1), engine, lambda rows: rows.get("advantages"), (0, step)
        )
        taken += [selector(hundred_tokens())[0].get("chosen_tokens") for _ in range(2)]
    chosen = [frozenset(column.values().nonzero()[:, 0].tolist()) for column in taken]
    assert all(len(one) == 10 for one in chosen)
    assert chosen[0] == chosen[2] and chosen[1] == chosen[3] and len(set(chosen)) == 4


def test_every_token_has_a_draw_of_its_own():
    """Also those of the same prompt, and those of the same sample number."""
    drawn = []

    def choice(cov, draws):
        drawn.extend(draws.tolist())
        return draws, 0.1

    engine = RankEngine(0, 1, {}, threading.Barrier(1))
    rows = hundred_tokens().with_columns({"group": torch.arange(10) // 5, "sample": torch.arange(10) % 5})
    TokenSelector(choice, engine, lambda rows: rows.get("advantages"), (0, 1))(rows)
    assert len(set(drawn)) == len(drawn) == 100


def hundred_tokens():
    rows = [torch.zeros(10, dtype=torch.float64)] * 10
    return DataProto.from_dict(
        {
            "response_mask": ragged.from_rows([torch.ones(10, dtype=torch.int64)] * 10),
            "advantages": ragged.from_rows(rows),
            "group": torch.arange(10),
            "sample": torch.zeros(10, dtype=torch.int64),
        }
    )


def test_nothing_is_chosen_where_all_advantages_are_equal():
    rows = make_rows(1)
    rows["advantages"] = rows["response_mask"].double()
    for name in ("clip_cov", "kl_cov"):
        assert not with_choice(name, rows, [[list(range(B))]])["chosen_tokens"].any()


def test_a_mini_batch_without_a_trained_token_has_no_choice():
    rows = make_rows(2)
    rows["response_mask"] *= 0
    assert not with_choice("kl_cov", rows, [[[0, 1, 2]], [[3, 4, 5]]])["chosen_tokens"].any()
