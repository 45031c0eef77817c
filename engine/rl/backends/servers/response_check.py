"""Check that an answer of a server fits its request: a damaged or stale sample is never learned from.

Statements of a server about itself count only as far as the request confirms them.
"""

from collections.abc import Collection

from isoloss.engine.rl.trajectory import Completion, Sampling

# log(softmax) in float32 is at most a rounding above 0, and no sampler draws what has the probability 0 in it (-104).
HIGHEST_LOGPROB, LOWEST_LOGPROB = 1e-3, -1000.0
FINISHES = ("stop", "length", "abort")


def damage(
    answer: Completion, budget: int, sampling: Sampling, vocab_size: int, versions: Collection[int]
) -> str | None:
    """Return the fault of an answer to a request for at most `budget` tokens, or None. An abort may come at any time,
    also before the first token.

    versions: versions of weights that its tokens may have.
    """
    tokens, finish = answer.tokens, answer.finish
    if finish not in FINISHES:
        return f"finish {finish!r}, which is none of {', '.join(FINISHES)}"
    if len(tokens) > budget:
        return f"{len(tokens)} tokens where at most {budget} were asked for"
    if not tokens and finish != "abort":
        return "no token"
    if finish == "length" and len(tokens) < budget:
        return f"{len(tokens)} of {budget} tokens, and says that these are all"
    foreign = next((token for token in tokens if not 0 <= token < vocab_size), None)
    if foreign is not None:
        return f"token {foreign}, which is not in the vocabulary of {vocab_size}"
    if any(token in sampling.stop_token_ids for token in tokens[:-1]):
        return "tokens after one that ends a completion"
    wrong = next((each for each in answer.logprobs if not LOWEST_LOGPROB <= each <= HIGHEST_LOGPROB), None)
    if wrong is not None:
        return f"the log-probability {wrong:g}, which no token that was drawn has"
    stale = next((version for version in answer.versions if version not in versions), None)
    if stale is not None:
        return f"tokens of weights of version {stale}, not {' or '.join(map(str, sorted(versions)))}"
    return None
