"""The front door: one object that HTTP, the command line and tests call.

Routes a call to a model, admits it, tokenizes, submits, awaits, and finishes the vectors. Lives on
the event loop; starts and stops the engines.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence as Seq
from time import monotonic, perf_counter
from typing import Any, Literal

from embedsvc import __version__
from embedsvc.calls import CatalogEntry, EmbedCall, Embedded
from embedsvc.config import Config
from embedsvc.deployment import Deployment, deploy
from embedsvc.engine.devices import Devices
from embedsvc.engine.sequence import Priority, Request, Sequence
from embedsvc.errors import (
    InvalidRequest,
    ModelNotFound,
    NotReady,
    Overloaded,
    TooManyInputs,
    TooManyTokens,
)
from embedsvc.intake import before, check_sizes, estimate_tokens, request_of, time_s
from embedsvc.keys import Keys, read_keys
from embedsvc.metrics import Metrics
from embedsvc.models.host import usable_cores
from embedsvc.models.owner import Owner
from embedsvc.tokenization import Encoded, Token, TokenizerPool
from embedsvc.traffic import start_following
from embedsvc.vectors import finish

log = logging.getLogger(__name__)

# A request of more texts is bulk unless it says otherwise.
INTERACTIVE_INPUTS = 32
# At most one line about refusals in this time.
REFUSAL_LOG_S = 1.0


State = Literal["loading", "ready", "restarting", "failed", "stopping"]


class Service:
    """All served models of one configuration.

    Args:
        config: checked.
        owner: of what this worker shares with others.
        keys: who is let in; read from the file that the configuration names where not given.

    Attributes:
        config: what may be changed while serving is.
        keys: may be replaced.

    Raises:
        ConfigError: the file of the keys is wrong.
    """

    def __init__(
        self, config: Config, owner: Owner | None = None, keys: Keys | None = None
    ) -> None:
        self.config = config
        self.keys = read_keys(config.server.keys_file) if keys is None else keys
        self.metrics = Metrics()
        self.metrics.ready_from(lambda: self.ready)
        self._deployments: dict[str, Deployment] = {}
        self._names: dict[str, str] = {}
        for model in config.models:
            self._names |= dict.fromkeys((model.name, *model.aliases), model.name)
        self._devices = Devices(config, owner)
        self._tokenizers = TokenizerPool(max(1, min(4, usable_cores())))
        self._phase: State = "loading"
        self._following: list[asyncio.Task[None]] = []
        self._refused = 0

    # --- life cycle ------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load every model and warm it up.

        Raises:
            StartError: a model cannot be served; the message says why and what to do.
        """
        try:
            for number, model in enumerate(self.config.models):
                deployment = await asyncio.to_thread(
                    deploy, model, f"models[{number}]", self.config, self._devices, self.metrics
                )
                deployment.engine.start()
                self._deployments[model.name] = deployment
                self._following.append(start_following(deployment))
        except BaseException:
            self._phase = "failed"
            raise
        if self._phase == "loading":
            self._phase = "ready"

    async def stop(self, drain_timeout_s: float | None = None) -> None:
        """Refuse new calls, finish those in flight within the drain time, free everything."""
        self._phase = "stopping"
        for task in self._following:
            task.cancel()
        drain_s = self.config.server.drain_timeout_s if drain_timeout_s is None else drain_timeout_s
        engines = [d.engine for d in self._deployments.values()]
        await asyncio.gather(*(engine.stop(drain_s) for engine in engines))
        # Waits for the batches on the devices, however long.
        await asyncio.to_thread(self._devices.close)
        await self._tokenizers.close()

    @property
    def state(self) -> State:
        """What the service does; while it is ready, what the worst of its models does."""
        if self._phase != "ready":
            return self._phase
        states = {deployment.engine.state for deployment in self._deployments.values()}
        worse: tuple[State, ...] = ("failed", "restarting")
        return next((state for state in worse if state in states), "ready")

    @property
    def ready(self) -> bool:
        """Whether every model answers."""
        return self.state == "ready"

    @property
    def accepting(self) -> bool:
        """Whether calls are looked at; each model answers for itself then."""
        return self._phase == "ready"

    # --- calls -----------------------------------------------------------------------------------

    async def embed(self, call: EmbedCall) -> Embedded:
        """Return the vectors of a call; cancel the caller's task when its client is gone.

        Raises:
            RequestError: the answer the client gets instead.
        """
        deployment = self._deployment(call.model)
        self._check_count(len(call.inputs))
        check_sizes(call.inputs)
        dim = deployment.dimensions(call.dimensions)
        began = perf_counter()
        request, sequences, n_truncated = await self._admitted(call, deployment)
        tokenize_s = perf_counter() - began
        deployment.metrics.tokenize.observe(tokenize_s)
        prompt_tokens = sum(sequence.length for sequence in sequences)
        await deployment.compute(request, sequences)
        return Embedded(
            vectors=finish(request.vectors, dim, normalize=call.normalize),
            prompt_tokens=prompt_tokens,
            n_truncated=n_truncated,
            version=deployment.settings.name,
            tokenize_s=tokenize_s,
            queue_s=max(0.0, request.first_start - request.arrival),
            inference_s=request.last_end - request.first_start,
        )

    async def tokenize(
        self,
        model: str,
        texts: list[str],
        *,
        prompt_name: str | None = None,
        add_special_tokens: bool = True,
    ) -> list[Seq[Token]]:
        """Return the tokens of each text, never truncated.

        Raises:
            RequestError: the answer the client gets instead.
        """
        deployment = self._deployment(model)
        check_sizes(texts)
        return await self._tokenizers.tokens(
            deployment.tokenizer,
            texts,
            prompt=deployment.prompt(prompt_name),
            add_special_tokens=add_special_tokens,
        )

    def catalog(self) -> list[CatalogEntry]:
        """Return every name clients may use, loaded or not."""
        created = {name: d.created for name, d in self._deployments.items()}
        return [
            CatalogEntry(id=name, created=created.get(root, 0), root=root)
            for name, root in self._names.items()
        ]

    def info(self) -> dict[str, Any]:
        """Return the state of the service in plain JSON types."""
        server = self.config.server
        return {
            "name": "embedsvc",
            "version": __version__,
            "state": self.state,
            "limits": {
                "max_inputs": server.max_inputs,
                "max_request_tokens": server.max_request_tokens,
                "max_body_bytes": server.max_body_bytes,
            },
            "models": [deployment.info() for deployment in self._deployments.values()],
        }

    # --- steps of embed --------------------------------------------------------------------------

    def _deployment(self, name: str) -> Deployment:
        root = self._names.get(name)
        if root is None:
            raise ModelNotFound(
                f"The model '{name[:200]}' does not exist. Served: {', '.join(self._names)}.",
                param="model",
            )
        deployment = self._deployments.get(root)
        if deployment is None or self._phase in ("stopping", "failed"):
            raise NotReady(f"Model '{root}' is {self._phase}.", retry_after_s=5)
        return deployment

    def _check_count(self, n: int) -> None:
        if not 0 < n <= self.config.server.max_inputs:
            raise TooManyInputs(
                f"input has {n} items; 1 to {self.config.server.max_inputs} are allowed.",
                param="input",
            )

    async def _admitted(
        self, call: EmbedCall, deployment: Deployment
    ) -> tuple[Request, list[Sequence], int]:
        """Reserve room, tokenize, and correct the room to the real tokens; all or nothing.

        Returns:
            The request, its sequences, and how many texts were truncated.
        """
        n, engine = len(call.inputs), deployment.engine
        priority = call.priority
        if priority is None:
            priority = Priority.INTERACTIVE if n <= INTERACTIVE_INPUTS else Priority.BULK
        estimate = estimate_tokens(call.inputs, deployment.tokenizer.max_length)
        own_s = engine.own_s(n, estimate)
        deadline = monotonic() + time_s(self.config.server, call.timeout_s, own_s)
        try:
            claim = engine.admit(n, estimate, priority, deadline - monotonic(), call.key)
        except (Overloaded, NotReady):
            deployment.metrics.texts["rejected"].inc(n)
            self._note_refusal(engine.queue_s)
            raise
        try:
            encoded = await before(deadline, self._encode(call, deployment), estimate)
            tokens = sum(len(e.ids) for e in encoded)
            self._check_tokens(tokens)
            self._check_time(call, engine.own_s(n, tokens))
            dim = engine.model.dim
            request, sequences = request_of(encoded, dim, deadline, priority, call.key)
        except BaseException:
            engine.withdraw(claim)
            raise
        engine.confirm(claim, tokens)
        return request, sequences, sum(e.truncated for e in encoded)

    def _note_refusal(self, queue_s: float) -> None:
        """Log refusals once a second: an overloaded server has no time for a line each."""
        if self._refused == 0:
            asyncio.get_running_loop().call_later(REFUSAL_LOG_S, self._log_refusals, queue_s)
        self._refused += 1

    def _log_refusals(self, queue_s: float) -> None:
        log.warning("requests refused n=%d queue_s=%.1f", self._refused, queue_s)
        self._refused = 0

    def _check_tokens(self, tokens: int) -> None:
        most = self.config.server.max_request_tokens
        if tokens > most:
            raise TooManyTokens(
                f"Requested {tokens} tokens, max {most} tokens per request. "
                "Send fewer texts at once.",
                param="input",
            )

    async def _encode(self, call: EmbedCall, deployment: Deployment) -> Seq[Encoded]:
        tokenizer = deployment.tokenizer
        truncate = call.truncate or deployment.settings.truncate
        if not isinstance(call.inputs[0], str):
            return [
                tokenizer.from_ids(ids, truncate=truncate, index=index)
                for index, ids in enumerate(call.inputs)
            ]
        return await self._tokenizers.encode(
            tokenizer,
            call.inputs,
            truncate=truncate,
            prompt=deployment.prompt(call.prompt_name, call.prompt_field),
            add_special_tokens=call.add_special_tokens,
        )

    def _check_time(self, call: EmbedCall, own_s: float) -> None:
        allowed_s = time_s(self.config.server, call.timeout_s, own_s)
        if 0 < allowed_s < own_s:
            raise InvalidRequest(
                f"These texts take about {own_s:.1f} s on this idle server, {allowed_s:.1f} s are "
                "allowed. Send fewer texts at once, or allow more time."
            )
