# For CPUs: docker build -t triptych . && docker run triptych           runs the small demo and the tests
# For GPUs: docker build --build-arg BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04 -t triptych . && docker run --gpus all triptych
ARG BASE=ubuntu:24.04
FROM ${BASE}
RUN apt-get update && apt-get install -y --no-install-recommends python3-venv python3-dev g++ git
RUN python3 -m venv /opt/venv
ENV VIRTUAL_ENV=/opt/venv PATH=/opt/venv/bin:$PATH
WORKDIR /triptych
COPY requirements*.txt constraints.txt ./
COPY training_scripts/setup_env.sh training_scripts/
RUN ["bash", "-ec", "for file in requirements-demo requirements-dev; do source training_scripts/setup_env.sh $file.txt; done"]
RUN if command -v nvcc; then python -m pip install wheel ninja; python -m pip install --no-build-isolation -r requirements-gpu.txt; fi
COPY . .
CMD ["bash", "-c", "bash training_scripts/demo/run_demo.sh && bash tests/run.sh"]
