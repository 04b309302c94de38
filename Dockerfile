# The service: REST, cache and NVRTC. No GPU, driver or CUDA toolkit is needed to run it.
#
#   docker build -t mlaprep .
#   docker run --read-only --tmpfs /tmp -p 8400:8400 -v mlaprep:/var/cache/mlaprep -e MLAPREP_TOKEN=… mlaprep
#
# deploy/ has a compose file and manifests for Kubernetes; deploy/prove_image.sh builds and tries this image.
# BASE is any Python 3.11+ image with glibc; EXTRAS picks the CUDA line (cuda12 or cuda13) and the shared tier.
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
ARG EXTRAS=service,cuda12,redis
WORKDIR /src
RUN python -m venv /opt/mlaprep
COPY pyproject.toml requirements.lock README.md LICENSE ./
COPY templates templates
COPY kernels_cache kernels_cache
COPY service service
COPY clients clients
RUN /opt/mlaprep/bin/pip wheel --no-cache-dir --no-deps --wheel-dir /dist . \
    && /opt/mlaprep/bin/pip install --no-cache-dir --prefer-binary -c requirements.lock "$(echo /dist/*.whl)[${EXTRAS}]" \
    && /opt/mlaprep/bin/pip uninstall --yes pip setuptools \
    # 210 MB that compiling never loads: NVIDIA's second build of NVRTC, and CuPy's device algorithms and their headers.
    # deploy/prove_image.sh compiles in what is left.
    && rm -rf /opt/mlaprep/lib/python3.*/site-packages/nvidia/*/lib/*.alt.so.* \
              /opt/mlaprep/lib/python3.*/site-packages/cupy/cuda/thrust.*.so \
              /opt/mlaprep/lib/python3.*/site-packages/cupy/_core/include

FROM ${BASE}
LABEL org.opencontainers.image.title="mlaprep" \
      org.opencontainers.image.licenses="Apache-2.0"
# A number, so that an orchestrator can check "not root" without reading the image's user list.
RUN groupadd --system --gid 10001 mlaprep \
    && useradd --system --uid 10001 --gid 10001 --no-create-home --home-dir /var/cache/mlaprep mlaprep \
    && install -d -m 0700 -o 10001 -g 10001 /var/cache/mlaprep
COPY --from=build /opt/mlaprep /opt/mlaprep
# Nothing is written outside the volume and /tmp, so the root file system can be read-only. The cache is a
# directory below the volume: an orchestrator may make the volume itself writable for a group.
ENV PATH=/opt/mlaprep/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    MLAPREP_CACHE_DIR=/var/cache/mlaprep/kernels
USER 10001:10001
VOLUME ["/var/cache/mlaprep"]
EXPOSE 8400
HEALTHCHECK --interval=10s --timeout=3s --start-period=10s \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8400/healthz', timeout=2)"]
ENTRYPOINT ["mlaprep"]
CMD ["serve", "--host", "0.0.0.0", "--port", "8400"]
