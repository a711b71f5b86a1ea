# sppo_jax with jax for CUDA on Python 3.12. This file was never built: no Docker daemon was at hand.
#
#   docker build -t sppo .                                    NVIDIA GPUs
#   docker build -t sppo --build-arg EXTRA=tpu .              TPUs
#   docker run --gpus all --ulimit memlock=-1 --shm-size=1g -v "$PWD:/work" sppo train CONFIG.yaml --run-dir RUN
#
# The wheels bring CUDA and cuDNN; the host needs NVIDIA's driver and container toolkit.
FROM python:3.12.12-slim-bookworm AS build
ARG EXTRA=cuda
WORKDIR /source
COPY constraints-py312.txt ./
# The constraints hold for what builds the wheel as well.
ENV PIP_CONSTRAINT=/source/constraints-py312.txt
RUN pip install --no-cache-dir build==1.6.1 && python -m venv /opt/sppo
COPY pyproject.toml setup.py README.md LICENSE ./
COPY configs configs
COPY sppo_jax sppo_jax
RUN python -m build --outdir dist .
RUN /opt/sppo/bin/pip install --no-cache-dir "$(echo dist/*.whl)[${EXTRA},all]"

FROM python:3.12.12-slim-bookworm
COPY --from=build /opt/sppo /opt/sppo
COPY launch /sppo_jax/launch
COPY configs /sppo_jax/configs
ENV PATH=/opt/sppo/bin:$PATH PYTHONUNBUFFERED=1
WORKDIR /work
ENTRYPOINT ["sppo"]
RUN sppo check --devices cpu:2 --quick
