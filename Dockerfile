# The gateway, the endpoint picker and the emulated engines, with their loops compiled:
#   docker build -t headway .
#   docker run --read-only --rm -p 8080:8080 -v "$PWD/fleet.yaml:/etc/headway/fleet.yaml:ro" headway \
#       serve /etc/headway/fleet.yaml --host 0.0.0.0
ARG PYTHON=3.11
FROM python:${PYTHON}-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY . /src
RUN python3 -m venv --without-pip /opt/headway \
    && pip --python /opt/headway/bin/python install --no-cache-dir --no-compile -c /src/constraints.txt \
        "/src[epp,gateway,kubernetes,otel,postgres,tokenizers]" \
    && PYTHONDONTWRITEBYTECODE=1 /opt/headway/bin/headway --version | grep -F '(compiled)'
# What no command loads: a second client of Kubernetes, Arrow's RPC, headers, tests, symbols. 174 of 507 MB. Libraries that
# wheels have patched (*.libs) do not survive strip. Only Headway's own bytecode is kept.
RUN cd /opt/headway/lib/python*/site-packages \
    && rm -rf kubernetes/aio plotly/labextension pyarrow/include pyarrow/_flight* pyarrow/libarrow_flight* \
    && find . -name tests -type d -prune -exec rm -rf {} + \
    && find . \( -name '*.pyx' -o -name '*.pxd' -o -name '*.pyi' -o -name '*.c' -o -name '*.h' \) -delete \
    && find . -name '*.so*' -type f -not -path './*.libs/*' -exec strip --strip-unneeded {} + \
    && /opt/headway/bin/python -m compileall -q headway

FROM python:${PYTHON}-slim
COPY --from=build /opt/headway /opt/headway
# Python writes no bytecode, and nothing else writes but where the user asks for it: the root file system may be read-only.
ENV PATH=/opt/headway/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 65532:65532
WORKDIR /tmp
EXPOSE 8080
ENTRYPOINT ["headway"]
CMD ["--help"]
