"""Users for locust, closed-loop and with pauses, as people and their programs are.

`locust -f loadtest/locustfile.py --headless --host http://127.0.0.1:8000 -u 60 -t 2m --shape spike`

Refusals that say when to come back are no failures: they are counted under names of their own, and
the user comes back when told. Any other answer than vectors is a failure.
"""

from __future__ import annotations

import random
import time
from argparse import ArgumentParser
from typing import ClassVar

import msgspec
from locust import FastHttpUser, LoadTestShape, between, events, task
from locust.env import Environment

from embedsvc.bench.connection import embeddings_body
from embedsvc.config import DEFAULT_NAME
from loadtest.shapes import SHAPES, users_at
from loadtest.workload import questions_and_passages

DEFAULT_RUN_S = 60
HEADERS = {"content-type": "application/json"}
QUESTIONS, PASSAGES = questions_and_passages()


@events.init_command_line_parser.add_listener  # type: ignore[untyped-decorator]  # locust's
def _add_flags(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--shape",
        choices=SHAPES,
        default="steady",
        env_var="EMBEDSVC_LOAD_SHAPE",
        help="how the number of users changes during the run time; see loadtest/shapes.py",
    )
    parser.add_argument(
        "--embedding-model", default=DEFAULT_NAME, env_var="EMBEDSVC_LOAD_MODEL", help="to ask for"
    )


@events.quitting.add_listener  # type: ignore[untyped-decorator]  # locust's
def _fail_without_answers(environment: Environment, **_: object) -> None:
    if environment.stats.total.num_requests == 0:
        environment.process_exit_code = 1


class Embedder(FastHttpUser):
    """Sends texts and checks that as many vectors come back."""

    abstract = True
    rng: ClassVar[random.Random] = random.Random(0)

    def embed(self, texts: list[str]) -> None:
        """Send one request; where it is refused, wait as long as the server says."""
        model = self.environment.parsed_options.embedding_model
        body = embeddings_body(model, texts).decode()
        name = type(self).__name__
        with self.client.post(
            "/v1/embeddings", data=body, headers=HEADERS, name=name, catch_response=True
        ) as response:
            retry_after = (response.headers or {}).get("retry-after")
            if response.status_code == 429 and retry_after:
                response.request_meta["name"] = f"{name}, refused"
                response.success()
            elif response.status_code != 200:
                response.failure(f"status {response.status_code}")
            elif len(msgspec.json.decode(response.content)["data"]) != len(texts):
                response.failure("not a vector for every text")
        if response.status_code == 429:
            # Locust's own version of it, which lets the other users run.
            time.sleep(float(retry_after or 1))


class Queries(Embedder):
    """People who search: one short question, a thought between."""

    weight = 10
    wait_time = between(0.2, 1.0)

    @task
    def query(self) -> None:
        """Embed a question."""
        self.embed([self.rng.choice(QUESTIONS)])


class Documents(Embedder):
    """Programs that index what people save: a few passages at a time."""

    weight = 3
    wait_time = between(0.5, 2.0)

    @task
    def document(self) -> None:
        """Embed the passages of a document."""
        self.embed(self.rng.choices(PASSAGES, k=self.rng.randint(1, 12)))


class Bulk(Embedder):
    """Uploads: many texts of all lengths, one request after the other."""

    weight = 1
    wait_time = between(0.5, 1.0)

    @task
    def upload(self) -> None:
        """Embed a part of a collection."""
        n_texts = self.rng.randint(64, 256)
        self.embed(self.rng.choices(QUESTIONS + PASSAGES, k=n_texts))


class Shape(LoadTestShape):
    """The shape that `--shape` names, over `-t` seconds and up to `-u` users."""

    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        """Return how many users there are now and how fast they come; None at the end."""
        assert self.runner is not None
        options = self.runner.environment.parsed_options
        assert options is not None
        elapsed: float = self.get_run_time()  # type: ignore[no-untyped-call]  # locust's
        at = elapsed / (options.run_time or DEFAULT_RUN_S)
        if at >= 1:
            return None
        n_users = options.num_users or 1
        return users_at(options.shape, at, n_users), n_users
