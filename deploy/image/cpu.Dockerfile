# openinfer on the CPU: every model family, no GPU.
#   docker build --file deploy/image/cpu.Dockerfile --tag openinfer:cpu .        (podman and buildah build it too)

FROM python:3.13-slim AS wheels
WORKDIR /src
COPY . .
RUN ./run wheels --out /wheels

FROM python:3.13-slim
# the wheels are not left in the image; install.py binds our names to them
RUN --mount=type=bind,from=wheels,source=/wheels,target=/wheels \
    python /wheels/install.py --into /opt/openinfer --uvloop --otel \
    && useradd --uid 10001 --create-home openinfer \
    && install --directory --owner openinfer /models
USER 10001
ENV PATH=/opt/openinfer/bin:$PATH HF_HOME=/models OPENINFER_LOG_FORMAT=json
VOLUME /models
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s CMD \
    ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["openinfer"]
CMD ["serve", "--model", "tiny", "--host", "0.0.0.0"]
