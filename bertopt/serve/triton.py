"""An artefact in Triton Inference Server: what `model.py` of a repository that `bertopt deploy triton` wrote imports.

Triton hands over the requests that waited together; all their texts are planned by cost and run in one call.
"""

from __future__ import annotations

import json
import logging
import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from bertopt.errors import Unsupported, UsageError
from bertopt.runtime import task_outputs
from bertopt.runtime.load import load
from bertopt.runtime.text_inputs import check
from bertopt.spec import Text

#: The folder of the artefact beside `model.py`.
ARTEFACT = "artifact"
#: Parameters of config.pbtxt that `bertopt deploy triton` writes: options of the predictor.
PARAMETERS = ("aggregation_strategy", "stride")
#: The first Triton whose Python backend reads arrays of numpy 2: https://github.com/triton-inference-server/python_backend/pull/384
NUMPY_2 = (2, 52)
_log = logging.getLogger(__name__)


class TritonPythonModel:
    """What Triton's Python backend creates once for each instance."""

    def initialize(self, args: dict[str, str]) -> None:
        """Open the artefact beside `model.py`. Raises what `bertopt.load` raises, so that Triton refuses the model, and Unsupported."""
        _check_numpy()
        self._predictor = load(Path(args["model_repository"]) / args["model_version"] / ARTEFACT, check=True)
        self._options = _options(json.loads(args["model_config"]).get("parameters", {}))
        if self._options:
            one: Text = ("a", "a") if self._predictor.task == "question-answering" else "a"
            self._predictor([one], **self._options)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer requests together; a request with wrong texts gets an error and does not disturb the others."""
        import triton_python_backend_utils as triton

        columns: list[list[Text]] = []
        responses: dict[int, Any] = {}
        for number, request in enumerate(requests):
            try:
                columns.append(self._texts(triton, request))
            except (UsageError, TypeError) as error:
                columns.append([])
                responses[number] = _refused(triton, str(error), triton.TritonError.INVALID_ARG)
        try:
            outputs = iter(self._outputs([text for column in columns for text in column]))
        except Exception:
            _log.exception("%d requests failed", len(requests))
            text = "the model failed; the server's log has the reason"
            return [responses.get(number) or _refused(triton, text, triton.TritonError.INTERNAL) for number in range(len(requests))]
        whole = self._predictor.spec.granularity == "text"
        name = self._predictor.spec.outputs[0] if whole else "answers"
        for number, column in enumerate(columns):
            if number not in responses:
                rows = [next(outputs) for _ in column]
                if any(row is None for row in rows):
                    responses[number] = _refused(triton, "the model gave outputs that are not finite", triton.TritonError.INTERNAL)
                    continue
                values = np.stack(rows) if whole else np.array(rows, object)[:, None]
                responses[number] = triton.InferenceResponse(output_tensors=[triton.Tensor(name, values)])
        return [responses[number] for number in range(len(requests))]

    def finalize(self) -> None:
        """Let go of the model."""
        del self._predictor

    def _texts(self, triton: Any, request: Any) -> list[Text]:
        """Return the texts of the tensor `text` [N, 1], or pairs where `text_pair` came too."""
        found = [triton.get_input_tensor_by_name(request, name) for name in ("text", "text_pair")]
        if found[0] is None:
            raise UsageError("expected a BYTES tensor 'text'; got none")
        columns = [[_decoded(one, number) for number, one in enumerate(tensor.as_numpy().ravel())] for tensor in found if tensor is not None]
        if len({len(column) for column in columns}) != 1 or not columns[0]:
            raise UsageError(f"expected at least one text, and as many in 'text_pair'; got {', '.join(str(len(c)) for c in columns)}")
        texts: list[Text] = [*columns[0]] if len(columns) == 1 else [*zip(*columns, strict=True)]
        check(texts, self._predictor.spec.task == "question-answering")
        return texts

    def _outputs(self, texts: list[Text]) -> Any:
        """Return a row [D] of FP32 for each text, or its answer as JSON in bytes; None where it is not finite, which no gate lets pass."""
        if not texts:
            return []
        if self._predictor.spec.granularity == "text":
            return [row if np.isfinite(row).all() else None for row in np.asarray(self._predictor.logits(texts), np.float32)]
        return [_json(task_outputs.plain(one)) for one in self._predictor(texts, **self._options)]


def _options(parameters: dict[str, dict[str, str]]) -> dict[str, Any]:
    """Return the predictor's options that config.pbtxt has. Raises UsageError for a value that cannot be."""
    found: dict[str, Any] = {name: parameters[name]["string_value"] for name in PARAMETERS if name in parameters}
    if "stride" in found:
        if not found["stride"].isdecimal():
            raise UsageError(f"config.pbtxt: stride must be a whole number of tokens from 0; got '{found['stride']}'")
        found["stride"] = int(found["stride"])
    return found


def _json(answer: Any) -> bytes | None:
    try:
        return json.dumps(answer, allow_nan=False).encode()
    except ValueError:
        return None


def _check_numpy() -> None:
    """Raise Unsupported where Triton's image says that its C++ misreads arrays of this numpy: the first text would end the process."""
    server = os.environ.get("TRITON_SERVER_VERSION", "")
    found = re.match(r"(\d+)\.(\d+)", server)
    if found and (int(found[1]), int(found[2])) < NUMPY_2 and int(np.__version__.split(".")[0]) >= 2:
        raise Unsupported(
            f"Triton {server} cannot read arrays of numpy {np.__version__}: use Triton 24.11 (2.52) or later, "
            "or `pip install 'numpy<2'` into the Python that it runs"
        )


def _decoded(text: bytes, number: int) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"texts[{number}] must be UTF-8; got {error.reason} at byte {error.start}") from error


def _refused(triton: Any, message: str, code: Any) -> Any:
    return triton.InferenceResponse(output_tensors=[], error=triton.TritonError(message, code))
