"""Engine, with completions by the weights that it trains."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cached_property
from typing import Any

from isoloss.engine.data.chat import load_tokenizer
from isoloss.engine.data.chat_template import Template
from isoloss.engine.data.rows import Row
from isoloss.engine.rl.backends.local.megatron_backend import MegatronBackend
from isoloss.engine.rl.prompts import stop_tokens, to_prompt
from isoloss.engine.rl.trajectory import Completion, Request, Sampling
from isoloss.engine.run.folder import tokenizer_folder
from isoloss.engine.step import engine
from isoloss.models.families.registry import hf_folder
from isoloss.parallel import UserError

Messages = Sequence[Mapping[str, Any]]


class Engine(engine.Engine):
    """A model on a mesh, with its optimizer, that trains and generates.

    source: the result of `resolve(config)`; None: resolve it here.
    critic_of: build a critic, the same model with a value head, on the mesh of this other engine.

    Every rank calls every method with the same arguments: all samples of a step, or a `Holder` of them, such as
    `RankZeroSamples`. The plan then decides, purely from their lengths, which rank sees which.
    Raises UserError (from the constructor, before any process group exists) for a layout the model does not admit.
    """

    @cached_property
    def tokenizer(self) -> Any:
        """Return the tokenizer of model.tokenizer or model.path. Raises UserError if there is none."""
        return load_tokenizer(str(tokenizer_folder(self.config)), self.arch.vocab_size)

    def generate(
        self,
        prompts: Sequence[str | Messages | Sequence[int]],
        sampling: Sampling,
        *,
        ids: Sequence[str] | None = None,
        concurrency: int = 256,
    ) -> list[Completion]:
        """Return a completion of each prompt by the present weights, in their order and on every rank, on any layout.

        The log-probability of a token is the one that `logprobs` gives at the same temperature, but for rounding.

        prompts: each a text, messages, for which the chat template renders a prompt, or token ids. A prompt that is
            given several times has several completions.
        sampling: rules; without stop_token_ids those tokens end a completion that end the model's turns.
        ids: names of the completions, with sampling.seed the seeds of their random numbers; None: "0", "1", ...
            The same id, seed and prompt give the same completion, whatever else is generated.
        concurrency: most completions that one model decodes together.
        Raises UserError for a prompt without tokens, too long or beyond the vocabulary. Collective over the world.
        """
        if isinstance(prompts, str):
            raise UserError("prompts is one text: give a list of prompts, such as [text]")
        names = [str(index) for index in range(len(prompts))] if ids is None else ids
        if not sampling.stop_token_ids:
            folder = hf_folder(self.config.model.path)
            stops = stop_tokens(folder, self.tokenizer, self.config.data.template_variables)
            sampling = replace(sampling, stop_token_ids=stops)
        requests = [Request(id, self._prompt_tokens(prompt, id)) for id, prompt in zip(names, prompts, strict=True)]
        with closing(MegatronBackend(self, concurrency)) as backend:
            backend.update_weights((), version=0)
            completions = backend.generate(requests, sampling)
            return backend.rank0.compute(lambda: [each for each in completions if each is not None])

    def _prompt_tokens(self, prompt: str | Messages | Sequence[int], id: str) -> tuple[int, ...]:
        if isinstance(prompt, str) or (isinstance(prompt, Sequence) and isinstance(next(iter(prompt), None), Mapping)):
            given = prompt if isinstance(prompt, str) else [*prompt]
            template = Template(self.tokenizer, f"prompt {id}", None, self.config.data.template_variables)
            return to_prompt(Row(template.place, {"prompt": given}), template, id, "").tokens
        if not isinstance(prompt, Sequence):
            raise UserError(f"prompt {id} is a {type(prompt).__name__}: give text, messages, or a list of token ids")
        tokens, vocab_size = [], self.arch.vocab_size
        for token in prompt:
            if not (isinstance(token, int) and 0 <= token < vocab_size):
                raise UserError(f"prompt {id} has the token {token!r}, and the model's are 0 to {vocab_size - 1}")
            tokens.append(token)
        return tuple(tokens)
