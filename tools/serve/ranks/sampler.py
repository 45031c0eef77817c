"""Completions and log-probabilities of prompts, by the weights of one version at a time."""

from collections.abc import Sequence
from concurrent.futures import Future

from isoloss.engine.rl.backends.local.megatron_backend import MegatronBackend
from isoloss.engine.rl.trajectory import Completion, Request, Sampling
from isoloss.engine.step.engine import Engine
from isoloss.tools.serve import commands
from isoloss.tools.serve.ranks.inbox import Inbox, Numbered
from isoloss.tools.serve.wire import NO_LOGPROB


class Sampler:
    """An adapter that is never trained, whose factors are those of one version at a time.

    version: whose factors they are; "" of none.
    """

    def __init__(self, engine: Engine, concurrency: int):
        self.engine, self.version = engine, commands.BASE
        self.backend = MegatronBackend(engine, concurrency)

    def sample(self, inbox: Inbox | None, first: Numbered) -> None:
        """Sample for a command, and for those of the same version that come while it runs; send their completions.

        inbox: on rank 0. Collective over the world.
        """
        self.backend.serve(None if inbox is None else inbox.begin(first, self._begin))

    def scores(self, asked: Sequence[commands.Score]) -> list[commands.Scores]:
        """Return log-probabilities of the tokens of prompts, and of the likeliest ones. Collective over the world."""
        most = max(each.top for each in asked)
        found = []
        for each, read in zip(asked, self.engine.prompt_logprobs([each.prompt for each in asked], most)):
            ids_TK = read.top_ids_TK[:, : each.top].clamp(min=0)
            top_TK = read.top_logprobs_TK[:, : each.top].nan_to_num(NO_LOGPROB)
            found.append(commands.Scores(*(values.cpu().numpy() for values in (read.logprobs_T, ids_TK, top_TK))))
        return found

    def _begin(self, request: commands.SampleRequest) -> list[Future[Completion]]:
        sampling = rules_of(request)
        return [self.backend.submit(each, sampling) for each in requests_of(request)]


def rules_of(request: commands.SampleRequest) -> Sampling:
    return Sampling(
        max_new_tokens=request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        stop_token_ids=request.stop_token_ids,
        seed=request.seed,
        top_k=request.top_k,
        stop=request.stop,
    )


def requests_of(request: commands.SampleRequest) -> list[Request]:
    return [Request(id, request.prompt) for id in request.ids]
