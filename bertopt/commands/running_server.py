"""Client of a running server, bertopt's or another with `/embed`, `/embed_sparse`, `/v1/embeddings`, `/rerank` or `/predict`."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence, Set
from typing import TYPE_CHECKING, Any

import numpy as np

from bertopt.errors import Unsupported, UsageError
from bertopt.spec import Text

if TYPE_CHECKING:
    from bertopt.core import Array

    #: Vectors [N, D] of N texts or pairs, of one request.
    Ask = Callable[[Sequence[Text]], Array]

TIMEOUT_S = 30.0


class RunningServer:
    """Asks for vectors, scores or logits by the route that the server has. Raises UsageError where it refuses, Unsupported where nothing answers."""

    def __init__(self, url: str, api_key: str | None) -> None:
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"--url must begin with http:// or https://; got '{url}'")
        self.url = url
        #: Whether embeddings are asked for at OpenAI's route, for want of another.
        self.openai = False
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})

    def embedding(self, normalize: bool) -> Ask:
        """Return the function that asks for embeddings, by the route that the server has."""
        options = {"truncate": True, "normalize": normalize}
        try:
            self._post("/embed", {"inputs": "a", **options})
        except NoRoute:
            self.openai = True

            def ask(texts: Sequence[Text]) -> Array:
                def vectors(answer: Any) -> list[list[float]]:
                    return [row["embedding"] for row in sorted(answer["data"], key=lambda row: row["index"])]

                return self._numbers("/v1/embeddings", {"input": list(texts), "model": "default"}, texts, vectors)

            return ask
        return lambda texts: self._numbers("/embed", {"inputs": list(texts), **options}, texts, list)

    def sparse_embedding(self, size: int) -> Ask:
        """Return the function that asks for the sparse embeddings of texts, as whole vectors of `size` numbers."""

        def whole(row: Any) -> list[float]:
            vector = np.zeros(size)
            for one in row:
                if not 0 <= one["index"] < size:
                    raise UsageError(f"{self.url} answers the id {one['index']}; the artefact's vocabulary has {size}")
                vector[one["index"]] = one["value"]
            return vector.tolist()

        body = {"truncate": True}
        return lambda texts: self._numbers("/embed_sparse", {"inputs": list(texts), **body}, texts, lambda answer: [whole(row) for row in answer])

    def has_rerank(self) -> bool:
        try:
            self.ranks([("a", "b")])
        except NoRoute:
            return False
        return True

    def ranks(self, pairs: Sequence[Text]) -> Array:
        """Return the logits [N, 1] of pairs with one query."""
        body = {"query": pairs[0][0], "texts": [pair[1] for pair in pairs], "raw_scores": True, "truncate": True}

        def scores(answer: Any) -> list[list[float]]:
            by_index = {row["index"]: row["score"] for row in answer}
            return [[by_index[i]] for i in range(len(pairs))]

        return self._numbers("/rerank", body, pairs, scores)

    def scores(self, labels: Sequence[str]) -> Ask:
        """Return the function that asks for texts' scores, in the order of `labels`."""

        def scores(answer: Any) -> list[list[float]]:
            rows = [{row["label"]: row["score"] for row in ([one] if isinstance(one, dict) else one)} for one in answer]
            for row in rows:
                if row.keys() != set(labels):
                    raise self._other_labels(row.keys(), labels)
            return [[row[label] for label in labels] for row in rows]

        def ask(texts: Sequence[Text]) -> Array:
            inputs = [[text] if isinstance(text, str) else list(text) for text in texts]
            return self._numbers("/predict", {"inputs": inputs, "truncate": True}, texts, scores)

        return ask

    def _other_labels(self, got: Set[str], labels: Sequence[str]) -> UsageError:
        shown = ", ".join(sorted(got))
        if got and got < set(labels):
            how = "all are compared: have it answer all, as text-embeddings-inference does and transformers' pipelines with top_k=None"
            return UsageError(f"{self.url} answers {len(got)} of {len(labels)} labels ({shown}); {how}")
        return UsageError(f"{self.url} answers the labels {shown}; the artefact has {', '.join(labels)}")

    def _numbers(self, path: str, body: Any, texts: Sequence[Text], found_in: Callable[[Any], list[list[float]]]) -> Array:
        """Return the numbers `found_in` the answer, some for each of `texts` [N, D]. Raises UsageError where it is not there."""
        answer = self._post(path, body)
        try:
            found = np.array(found_in(answer), np.float64)
        except (TypeError, KeyError, ValueError, AttributeError):
            found = np.empty(0)
        if found.ndim != 2 or len(found) != len(texts):
            wanted = f"expected an item with numbers for each of {len(texts)} text(s)"
            raise UsageError(f"{self.url}{path} does not answer as text-embeddings-inference does: {wanted}; got {json.dumps(answer)[:100]}")
        return found

    def _post(self, path: str, body: Any) -> Any:
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), self._headers)  # noqa: S310  (checked above)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            if error.code in (404, 405):
                raise NoRoute(f"{self.url} has no {path}; {self._instead(path)}") from error
            said = error.read(500).decode(errors="replace")
            said += "; give the server's key with --api-key or BERTOPT_API_KEY" if error.code in (401, 403) else ""
            raise UsageError(f"{self.url}{path} answered {error.code}: {said}") from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise Unsupported(f"{self.url} does not answer ({getattr(reason, 'strerror', None) or reason}); is the server ready?") from error

    def _instead(self, path: str) -> str:
        """Return what to do where the server has no route `path`."""
        root = "give the server's root"
        if path == "/predict":
            try:
                self.ranks([("a", "b")])
            except (UsageError, Unsupported):
                return root
            return "it has /rerank, which answers pairs alone: give --texts a file of pairs, or leave it out"
        return root


class NoRoute(UsageError):
    """The server has no such route."""
