# The image for KubeRay (docs/cluster.md) and for any cluster of containers: moebius with Ray and its dashboard,
# run by user 1000, every Python package in the version of constraints.txt. Build it with
#     docker build -t registry.example/moebius:0.3 .
# torch's wheel for Linux brings CUDA; for processors alone, TORCH_INDEX=https://download.pytorch.org/whl/cpu saves 4 GB.
ARG PYTHON=3.12

# All that is needed to install stays in this stage.
FROM python:${PYTHON}-slim-bookworm AS build
ARG TORCH_INDEX=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /source
RUN python -m venv /opt/moebius
ENV PATH=/opt/moebius/bin:${PATH}
# First what changes rarely: torch, in a layer of its own.
COPY constraints.txt ./
RUN pip install ${TORCH_INDEX:+--extra-index-url "${TORCH_INDEX}"} -c constraints.txt torch
COPY . ./
RUN pip install -c constraints.txt ".[cluster,dashboard,export,hub,remote,sentencepiece]"

FROM python:${PYTHON}-slim-bookworm
# g++: torch's extension loader compiles the kernels for processors, Triton its launchers. wget: KubeRay's probes.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ wget \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 1000 moebius \
    && useradd --uid 1000 --gid 1000 --home-dir /var/moebius --create-home moebius
COPY --from=build /opt/moebius /opt/moebius
ENV PATH=/opt/moebius/bin:${PATH} PYTHONUNBUFFERED=1 RAY_USAGE_STATS_ENABLED=0
USER 1000:1000
WORKDIR /var/moebius
CMD ["moebius", "--help"]
