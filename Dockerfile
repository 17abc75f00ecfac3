# An image for CUDA machines: the repository with the versions of environment/constraints-cuda.txt, which are for CUDA 13
# as the base is. VLLM=vllm chooses them where an image is built, since no driver is there.
#
#   docker build -t rlrepro .
#   docker run --gpus all --ipc=host --shm-size=16g -v ~/data:/root/data -v "$PWD/outputs:/rlrepro/outputs" -it rlrepro \
#       bash recipes/grpo/run_qwen2.5_0.5b_gsm8k.sh
#
# --ipc=host: NCCL and Ray pass tensors through shared memory. Nobody has built this image yet (README).
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04

# Ubuntu 24.04 has Python 3.12; vLLM compiles kernels at start-up, for which it needs the headers and a compiler.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential ca-certificates curl git make python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /rlrepro
# Set-up before the code: an edit of the code does not install everything again.
COPY pyproject.toml README.md LICENSE Makefile ./
COPY environment environment
RUN mkdir core recipes reward_scores data_preprocess results \
    && VLLM=vllm make setup
COPY . .
# Set-up is complete: the copied files must not look newer than it.
RUN touch .venv/.base .venv/.installed
ENV PATH=/rlrepro/.venv/bin:$PATH
CMD ["bash"]
