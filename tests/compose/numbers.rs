//! What a command costs between containers. Printed, and never decided upon: who knows the machine does that.

use std::time::{Duration, Instant};

use crate::{
    deployment::Deployment,
    engine::{docker, must},
};

over_containers!(what_a_command_costs_is_printed);
fn what_a_command_costs_is_printed() {
    let deployment = Deployment::with(Some("tests/compose/overrides/bench.yml"), Vec::new());
    let (daemon, client) = (deployment.daemon(), deployment.client());
    // A bare spawn and a call over mutual TLS, by turns, both in the daemon's container.
    let bench = "bench --pairs 300 --endpoint https://daemon:7700 --ca /etc/executor-daemon/client/ca.crt \
                 --cert /etc/executor-daemon/client/client.crt --key /etc/executor-daemon/client/client.key";
    println!("between containers: {}", deployment.inside(bench));

    // What people would do instead, and the whole of a client: its start, the handshake, the call.
    let (mut bare, mut whole) = (Vec::new(), Vec::new());
    for _ in 0..20 {
        bare.push(timed(&["exec", &daemon, "bash", "-c", "true"]));
        whole.push(timed(&["exec", &client.container, "tool-client", "bash", "true"]));
    }
    println!(
        "docker exec of `bash -c true` in the daemon's container: {:?}; of `tool-client bash true` in a client's: {:?} (medians of \
         20, by turns)",
        median(bare),
        median(whole)
    );
}

fn timed(arguments: &[&str]) -> Duration {
    let begun = Instant::now();
    must(&mut docker(arguments), "");
    begun.elapsed()
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}
