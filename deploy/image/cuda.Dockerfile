# openinfer on NVIDIA GPUs: the wheels carry the kernels compiled for every architecture, so no start compiles any.
#   docker build --file deploy/image/cuda.Dockerfile --tag openinfer:cuda .
# The driver comes from the host (NVIDIA container toolkit), 580 or newer; CUDA's libraries are in the wheels.

FROM nvidia/cuda:13.0.2-devel-ubuntu24.04 AS wheels
RUN apt-get update && apt-get install --yes --no-install-recommends python3 python3-venv && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN OPENINFER_BUILD_CUBINS=1 ./run wheels --out /wheels

FROM python:3.13-slim
RUN --mount=type=bind,from=wheels,source=/wheels,target=/wheels \
    python /wheels/install.py --into /opt/openinfer --cuda13 --nccl --offload --kv-events --uvloop --otel \
    && useradd --uid 10001 --create-home openinfer \
    && install --directory --owner openinfer /models
USER 10001
ENV PATH=/opt/openinfer/bin:$PATH HF_HOME=/models OPENINFER_LOG_FORMAT=json \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
VOLUME /models
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s CMD \
    ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["openinfer"]
CMD ["serve", "--model", "tiny", "--device", "cuda", "--host", "0.0.0.0"]
