//! The times of a connection, named once for both sides, each with the reason for its value.
//!
//! Three things notice a connection that is dead, each where the others cannot: the client's pings a path that carries
//! nothing, the daemon's pings a client that is gone without a word, and heartbeats a stream that stands still behind
//! something that answers pings by itself. Neither side limits how often the other may ping.

use std::time::Duration;

/// Longest silence on a stream from the daemon. A quarter of the minute after which common proxies and load balancers cut a
/// stream that is idle, so that a heartbeat may be late or lost without harm.
pub const HEARTBEAT: Duration = Duration::from_secs(15);

/// A stream that brings nothing for so long is lost: three heartbeats, since one may be late and one lost.
pub const LONGEST_SILENCE: Duration = HEARTBEAT.saturating_mul(3);

/// The client pings a connection on which it has read nothing for so long, also when no call is under way: a dead
/// connection is then found before the next call needs it.
pub const CLIENT_PING_INTERVAL: Duration = Duration::from_secs(10);

/// The client ends a connection whose ping is not answered for so long. With the interval, a half-open connection is
/// noticed within 20 s; connecting again ([`CONNECT_LIMIT`]) still falls into [`RESUME_WINDOW`].
pub const CLIENT_PING_TIMEOUT: Duration = Duration::from_secs(10);

/// The daemon pings a connection on which it has read nothing for so long. The client pings sooner, so these are sent only
/// to clients that do not, and to those that are gone.
pub const DAEMON_PING_INTERVAL: Duration = Duration::from_secs(20);

/// The daemon ends a connection whose ping is not answered for so long.
pub const DAEMON_PING_TIMEOUT: Duration = Duration::from_secs(20);

/// A connection is closed that has not begun by then: with TLS the handshake, then the HTTP/2 preface. Many times what both take
/// over a slow line, and a stranger's half-open connection holds its place no longer.
pub const BEGIN_LIMIT: Duration = Duration::from_secs(10);

/// A connection that has begun is closed when so long no call was made on it that the daemon admits. After the first one it
/// stays as long as the client wants. A check of health counts for as long again, since who makes it says not who it is. A client of
/// ours connects for a call that is waiting; others that connect ahead connect again.
pub const FIRST_CALL_LIMIT: Duration = Duration::from_secs(60);

/// Longest wait for a connection: several times the longest round trip, and two retransmissions of TCP's first packet.
pub const CONNECT_LIMIT: Duration = Duration::from_secs(5);

/// Longest wait for the answer to a call that is no stream. Commands are started, read and ended within a fraction of it also
/// on a busy host.
pub const CALL_LIMIT: Duration = Duration::from_secs(30);

/// How long a run is kept whose client has vanished, so that the client can attach to it again.
pub const RESUME_WINDOW: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_half_open_connection_is_replaced_before_its_runs_are_given_up() {
        // The daemon may see the end of a connection at once which the client sees only by its pings.
        assert!(CLIENT_PING_INTERVAL + CLIENT_PING_TIMEOUT + CONNECT_LIMIT < RESUME_WINDOW);
    }

    #[test]
    fn a_client_of_ours_has_begun_or_given_up_before_the_daemon_cuts_it_off() {
        assert!(CONNECT_LIMIT < BEGIN_LIMIT && BEGIN_LIMIT < FIRST_CALL_LIMIT);
    }

    #[test]
    fn each_end_is_noticed_sooner_by_who_can_do_something_about_it() {
        assert!(CLIENT_PING_INTERVAL < DAEMON_PING_INTERVAL, "the daemon need not ping a client of ours");
        assert!(
            CLIENT_PING_INTERVAL + CLIENT_PING_TIMEOUT < LONGEST_SILENCE,
            "a dead path is found before a dead stream"
        );
    }
}
