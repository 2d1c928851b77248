"""Servers of sentence-transformers as their manuals write them. Each program is run by the python of the environment `serving`:

    PROGRAM DIRECTORY BACKEND FILE_NAME PORT

`FILE_NAME` is of the model in the directory, `-` for the backend's default. POST `/embed` answers `{"inputs": [texts]}`.
"""

from __future__ import annotations

_MODEL = """
import sys
from sentence_transformers import SentenceTransformer

def opened():
    named = {} if sys.argv[3] == "-" else {"file_name": sys.argv[3]}
    return SentenceTransformer(sys.argv[1], device="cpu", backend=sys.argv[2], model_kwargs=named)

def together(model, batch):
    vectors = model.encode([text for texts in batch for text in texts], normalize_embeddings=True)
    rows, place = [], 0
    for texts in batch:
        rows.append(vectors[place : place + len(texts)].tolist())
        place += len(texts)
    return rows
"""

PROGRAMS = {
    "FastAPI": f"""{_MODEL}
import threading
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

class Body(BaseModel):
    inputs: list[str]

app, model, one = FastAPI(), opened(), threading.Lock()  # OpenVINO's request answers one call at a time

@app.get("/health")
def health() -> None: ...

@app.post("/embed")
def embed(body: Body) -> list[list[float]]:
    with one:
        return together(model, [body.inputs])[0]

uvicorn.run(app, port=int(sys.argv[4]), log_level="error")
""",
    "LitServe": f"""{_MODEL}
import litserve

class Api(litserve.LitAPI):
    def setup(self, device):
        self.model = opened()
    def decode_request(self, request):
        return request["inputs"]
    def batch(self, inputs):
        return inputs
    def predict(self, batch):
        return together(self.model, batch)
    def unbatch(self, output):
        return output
    def encode_response(self, output):
        return output

if __name__ == "__main__":
    api = Api(max_batch_size=32, batch_timeout=0.005, api_path="/embed")
    litserve.LitServer(api, accelerator="cpu", devices=1).run(port=int(sys.argv[4]), generate_client_file=False, log_level="error")
""",
    "Ray Serve": f"""{_MODEL}
import os
import signal
import ray
from fastapi import FastAPI
from pydantic import BaseModel
from ray import serve

class Body(BaseModel):
    inputs: list[str]

app = FastAPI()
arguments = sys.argv

@serve.deployment(num_replicas=1, max_ongoing_requests=256)
@serve.ingress(app)
class Api:
    def __init__(self):
        import torch
        torch.set_num_threads(len(os.sched_getaffinity(0)))  # Ray asks for one thread an actor
        sys.argv = arguments
        self.model = opened()

    @serve.batch(max_batch_size=32, batch_wait_timeout_s=0.005)
    async def encode(self, batch):
        return together(self.model, batch)

    @app.get("/health")
    def health(self) -> None: ...

    @app.post("/embed")
    async def embed(self, body: Body) -> list[list[float]]:
        return await self.encode(body.inputs)

ray.init(include_dashboard=False, logging_level="error", num_cpus=4, runtime_env={{"env_vars": {{"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}}}})
serve.start(http_options={{"host": "127.0.0.1", "port": int(sys.argv[4])}})
serve.run(Api.bind())
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
signal.pause()
""",
}  # fmt: skip
