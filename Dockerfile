# The daemon and the client in one image. Two ways to get the binaries in:
#   docker build .                                 compiles them in the `build` stage
#   docker build --build-arg BINARIES=prebuilt .   takes what `cargo build --release` left in target/release
# BuildKit builds only the stage that is named, so the second way needs neither the Rust image nor a registry.
ARG BINARIES=build

FROM rust:1-bookworm AS build
WORKDIR /src
COPY . .
RUN cargo build --release --locked -p executor-daemon -p tool-client \
    && install -D -t /out target/release/executor-daemon target/release/tool-client

FROM scratch AS prebuilt
COPY target/release/executor-daemon target/release/tool-client /out/

FROM ${BINARIES} AS binaries

FROM debian:bookworm-slim
# What your agents' commands need besides bash and coreutils, for example "git python3 ca-certificates".
ARG PACKAGES=""
# The ids are fixed, so that a volume keeps its owners when the image is built anew.
RUN if [ -n "${PACKAGES}" ]; then \
        apt-get update && apt-get install -y --no-install-recommends ${PACKAGES} && rm -rf /var/lib/apt/lists/*; \
    fi \
    && groupadd --gid 10001 executor \
    && groupadd --gid 10002 executor-server \
    && useradd --uid 10001 --gid 10001 --no-log-init --create-home --shell /bin/bash executor \
    && useradd --uid 10002 --gid 10002 --no-log-init --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin executor-server \
    && install -d -m 0755 -o executor -g executor /workspace \
    && install -d -m 0755 /var/lib/executor-daemon
COPY --from=binaries /out/ /usr/local/bin/

LABEL org.opencontainers.image.title="executor-daemon" \
      org.opencontainers.image.description="Runs the shell commands of AI agents and serves them over gRPC" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="MIT OR Apache-2.0"

# Where commands start when a call names no directory.
WORKDIR /workspace
# State, output files and the socket: all that the daemon writes, so the root file system can be read-only.
VOLUME ["/var/lib/executor-daemon"]
# The daemon is root, so that it can run commands as `executor`, who can then neither signal it nor read its keys, its
# memory or its state. Only its keeper stays root: what faces the network is `executor-server`. As PID 1 it needs no init: it reaps what is orphaned in the container.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=5s --start-period=10s --retries=3 \
    CMD ["executor-daemon", "health", "--endpoint", "unix:/var/lib/executor-daemon/executor.sock"]
ENTRYPOINT ["executor-daemon"]
CMD ["serve", "--listen", "unix:/var/lib/executor-daemon/executor.sock"]
