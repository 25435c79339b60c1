# Sluice with CUDA: `python -m build && docker build -t sluice .`
#
#   docker run --gpus all -v "$PWD:/home/sluice/work" sluice finetune quickstart
#
# torch brings its CUDA libraries; Triton compiles its launchers with gcc and Python's headers.
FROM nvidia/cuda:13.0.0-base-ubuntu24.04

RUN apt-get update \
    && apt-get install --no-install-recommends -y gcc libc6-dev python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 10001 sluice

COPY dist/*.whl /opt/dist/
RUN python3 -m venv /opt/sluice
RUN /opt/sluice/bin/python -m pip install --no-cache-dir \
    "$(echo /opt/dist/*.whl)[images,studio,tensorboard]"

ENV PATH=/opt/sluice/bin:/usr/local/bin:/usr/bin:/bin
USER sluice
WORKDIR /home/sluice/work
ENTRYPOINT ["sluice"]
CMD ["--help"]
