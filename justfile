# What CI runs, by name. `just` alone lists them.
set shell := ["bash", "-euo", "pipefail", "-c"]

export RUSTDOCFLAGS := "-D warnings"

_list:
    @just --list --unsorted

# Everything that a change must pass, except the containers.
check: fmt lint doc links deny test

# The behaviour tests; no Docker needed.
test:
    cargo test --workspace

fmt:
    cargo fmt --all --check

lint:
    cargo clippy --workspace --all-targets -- -D warnings

doc:
    cargo doc --workspace --no-deps

# Every relative link in the Markdown files resolves.
links:
    python3 .ci/check-links.py

# Licences, duplicate and wildcard dependencies, sources. The advisory database is not asked.
deny:
    cargo deny --log-level error check licenses bans sources

# E2E_ONLY=NAME plays the scenarios whose names hold NAME. EXECUTOR_TEST_CONTAINERS=off is how to do without, which each test then says.
# The containers: needs Docker with Compose and Swarm, and fails without.
e2e:
    cargo test -p executor-tests --test compose -- --test-threads=1 --nocapture

# The manifests for Kubernetes against its schemas, and the unit for systemd; a broken manifest must be refused.
deploy:
    deploy/check/check.sh

# What CI does for seconds, for an hour. 1,000 tasks that count lines through 20 kills of the server: every line once, one notice
# each; takes two processes for each task and a hard limit on open files (`ulimit -Hn`) that lets keeper and server hold the pipes of
# all. Then random schedules of faults over the rules, of losses and kills over reads, and the behaviour tests over slow connections.
soak:
    TAKEOVER_TASKS=1000 TAKEOVER_KILLS=20 cargo test --release -p executor-tests --test takeover -- --test-threads=1 --nocapture
    SCHEDULES=200000 cargo test --release -p executor-daemon -p tool-client --lib schedules -- --nocapture
    READS_SCHEDULES=100 cargo test --release -p executor-tests --test reads -- --nocapture
    ATTACHES=200 cargo test --release -p executor-tests --test behaviour m11_whoever_attaches -- --nocapture
    NEIGHBOURS=64 NEIGHBOURS_SECONDS=60 cargo test --release -p executor-tests --test neighbours -- --nocapture
    for faults in delays slow-reader; do EXECUTOR_TEST_FAULTS=$faults cargo test --release -p executor-tests --test behaviour unix; done

# Prints what a command costs over a bare spawn, and the daemon's memory after a flood. Decides nothing.
bench:
    cargo run --release -p executor-tests --bin bench

# Packages target/release as an image. A distribution's own client comes first: a newer one may lack the plugin for BuildKit.
image:
    tests/compose/base-image.sh
    cargo build --release --locked -p executor-daemon -p tool-client
    PATH=/usr/bin:$PATH DOCKER_BUILDKIT=1 docker build --build-arg BINARIES=prebuilt --tag executor-daemon .

# Each fuzz target for FUZZ_SECONDS (20), over the seeds that are kept and what earlier runs found. libFuzzer needs flags that
# the stable toolchain has only when told so. FUZZ_ONLY=NAME runs one.
fuzz:
    #!/usr/bin/env bash
    set -euo pipefail
    export RUSTC_BOOTSTRAP=1
    for target in ${FUZZ_ONLY:-arguments journal tail wire}; do
        mkdir -p "fuzz/corpus/$target"
        begun=$(mktemp)
        if ! cargo fuzz run --dev "$target" "fuzz/corpus/$target" "fuzz/seeds/$target" -- \
            -max_total_time="${FUZZ_SECONDS:-20}" -max_len=4096 -timeout=10 -rss_limit_mb=1024 -print_final_stats=1
        then
            # Whoever has only the log can play it again: base64 --decode > input; cargo fuzz run --dev TARGET input.
            find "fuzz/artifacts/$target" -type f -newer "$begun" | while read -r input; do
                printf '%s, in base64:\n%s\n' "$input" "$(base64 --wrap=0 "$input")"
            done
            exit 1
        fi
        rm "$begun"
    done

# Adds to fuzz/seeds what the runs here have found and the seeds do not reach, as few inputs as do that. They are committed by hand.
fuzz-keep:
    #!/usr/bin/env bash
    set -euo pipefail
    export RUSTC_BOOTSTRAP=1
    for target in ${FUZZ_ONLY:-arguments journal tail wire}; do
        mkdir -p "fuzz/corpus/$target"
        cargo fuzz run --dev "$target" "fuzz/seeds/$target" "fuzz/corpus/$target" -- -merge=1 -use_counters=0 -max_len=4096
    done
