# sppo_jax with jax for CUDA on Python 3.12.
#
#   docker build -t sppo .                                    NVIDIA GPUs
#   docker build -t sppo --build-arg EXTRA=tpu .              TPUs
#   docker run --gpus all --ulimit memlock=-1 --shm-size=1g -v "$PWD:/work" sppo train CONFIG.yaml --run-dir RUN
#
# The wheels bring CUDA and cuDNN; the host needs NVIDIA's driver and container toolkit.
FROM python:3.12-slim

ARG EXTRA=cuda
ENV PYTHONUNBUFFERED=1
WORKDIR /opt/sppo_jax
COPY . .
RUN pip install --no-cache-dir -c constraints-py312.txt ".[${EXTRA},all]"

WORKDIR /work
ENTRYPOINT ["sppo"]
