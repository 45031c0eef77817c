"""Every formula of RL as its paper writes it, in numpy and loops over tokens and completions, to hold ours against.

Written from the papers, not from the code. `_C` arrays hold the tokens of one completion, `_k` the completions of a
group.
"""

import numpy as np

# ---------------------------------------------------------------------------------------------------------- advantages


def grpo(rewards_k, epsilon):
    """DeepSeekMath (2402.03300), section 4.1.2: (r - mean) / std, the sample's standard deviation."""
    mean = sum(rewards_k) / len(rewards_k)
    if len(rewards_k) == 1:
        return np.zeros(1)
    std = (sum((r - mean) ** 2 for r in rewards_k) / (len(rewards_k) - 1)) ** 0.5
    return np.array([(r - mean) / (std + epsilon) for r in rewards_k])


def dr_grpo(rewards_k):
    """Dr. GRPO (2503.20783), section 3.2: r - mean."""
    return np.array([r - sum(rewards_k) / len(rewards_k) for r in rewards_k])


def rloo(rewards_k):
    """Ahmadian et al. (2402.14740): r_i - 1/(k-1) sum over j != i of r_j."""
    k = len(rewards_k)
    if k == 1:
        return np.zeros(1)
    return np.array([rewards_k[i] - sum(rewards_k[j] for j in range(k) if j != i) / (k - 1) for i in range(k)])


def reinforce_pp(reward, kl_C, coef):
    """REINFORCE++ (2501.03262), before it is normalized: r - coef * sum of KL(i) over i = t .. T."""
    return np.array([reward - coef * sum(kl_C[i] for i in range(t, len(kl_C))) for t in range(len(kl_C))])


def gae(rewards_C, values_C, gamma, lam):
    """Schulman et al. (1506.02438), equation 16: A_t = sum over l of (gamma lam)^l delta_{t+l}; and A + V."""
    length = len(rewards_C)
    delta = [rewards_C[t] + gamma * (values_C[t + 1] if t + 1 < length else 0.0) - values_C[t] for t in range(length)]
    advantages_C = np.array([sum((gamma * lam) ** (s - t) * delta[s] for s in range(t, length)) for t in range(length)])
    return advantages_C, advantages_C + np.asarray(values_C)


def whiten(parts, epsilon):
    """(a - mean) / std over the tokens of all completions, the sample's variance."""
    flat = [a for part in parts for a in part]
    mean = sum(flat) / len(flat)
    variance = sum((a - mean) ** 2 for a in flat) / (len(flat) - 1)
    return [(np.asarray(part) - mean) / np.sqrt(variance + epsilon) for part in parts]


def overlong(length, longest, buffer):
    """DAPO (2503.14476), equation 13."""
    if length <= longest - buffer:
        return 0.0
    if length <= longest:
        return ((longest - buffer) - length) / buffer
    return -1.0


# -------------------------------------------------------------------------------- losses: the terms of one completion


def clip(logp_C, old_C, advantages_C, low, high, dual=None):
    """PPO (1707.06347), equation 7, DAPO's two ranges (equation 10), dual clip (1912.09729)."""
    terms = []
    for logp, old, a in zip(logp_C, old_C, advantages_C):
        ratio = np.exp(logp - old)
        objective = min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)
        if dual is not None and a < 0:
            objective = max(objective, dual * a)
        terms.append(-objective)
    return np.array(terms)


def gspo(logp_C, old_C, advantages_C, low, high):
    """GSPO (2507.18071), equations 5 to 7, for each token: the ratio of the completion to the power 1/length."""
    s = (np.exp(np.sum(logp_C)) / np.exp(np.sum(old_C))) ** (1 / len(logp_C))
    return np.array([-min(s * a, min(max(s, 1 - low), 1 + high) * a) for a in advantages_C])


def gspo_gradient(logp_C, old_C, advantages_C, low, high):
    """What each token's log-probability gets of a completion with one advantage: equation 10, times the length."""
    s = (np.exp(np.sum(logp_C)) / np.exp(np.sum(old_C))) ** (1 / len(logp_C))
    return np.array([-s * a if s * a <= min(max(s, 1 - low), 1 + high) * a else 0.0 for a in advantages_C])


def cispo(logp_C, old_C, advantages_C, low, high, constant_C=None):
    """MiniMax-M1 (2506.13585), equations 4 and 5: -sg(clip(ratio)) A log pi. constant_C: where sg() is evaluated."""
    at_C = logp_C if constant_C is None else constant_C
    weights = [min(max(np.exp(c - o), 1 - low), 1 + high) for c, o in zip(at_C, old_C)]
    return np.array([-w * a * logp for w, a, logp in zip(weights, advantages_C, logp_C)])


def reinforce(logp_C, advantages_C):
    """Williams 1992: -A log pi."""
    return np.array([-a * logp for a, logp in zip(advantages_C, logp_C)])


def importance(trainer_C, rollout_C, level, cap):
    """Truncated importance sampling (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
    training"): min(pi_trainer / pi_rollout, cap), of each token, or of the whole completion for all its tokens."""
    ratios = np.exp(np.asarray(trainer_C) - np.asarray(rollout_C))
    if level == "sequence":
        ratios = np.full(len(ratios), np.prod(ratios))
    return np.array([min(r, cap) for r in ratios])


def kl(logp_C, reference_C, estimator):
    """Schulman, "Approximating KL divergence" (2020), of KL(pi || reference) at samples of pi; r = reference / pi."""
    ratios = [np.exp(ref - logp) for logp, ref in zip(logp_C, reference_C)]
    return np.array(
        [{"k1": -np.log(r), "k2": np.log(r) ** 2 / 2, "k3": (r - 1) - np.log(r)}[estimator] for r in ratios]
    )


def value(values_C, old_C, returns_C, clip_range):
    """PPO's clipped value loss (Engstrom et al., 2005.12729) with the factor 1/2 of PPO's squared error."""
    terms = []
    for v, old, target in zip(values_C, old_C, returns_C):
        clipped = min(max(v, old - clip_range), old + clip_range)
        terms.append(max((v - target) ** 2, (clipped - target) ** 2) / 2)
    return np.array(terms)
