//! Attacks that are a few lines for the shell.

use crate::{
    report::{Outcome, Report},
    rig::{Mode, Rig},
};

/// How it is shown that there is something to be had.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Control {
    /// The same lines get it when the daemon's own user runs them outside.
    Same,
    /// These lines, run by the same command beforehand, print `works`.
    Inside(&'static str),
    /// These lines, run by the daemon's own user outside, print `works`.
    Outside(&'static str),
    /// These lines, run by whoever tests, print `works`. The attempt is made only where that is root, who may look at all.
    Root(&'static str),
    /// The attempt is made only where these lines, run outside by a user without privileges, print `works`: a host may have
    /// closed this way itself.
    Where(&'static str),
}

/// A row. Its lines print `TAKEN` when they have got what they are after. Variables say where everything is, see
/// [`Rig::inside`].
#[derive(Debug)]
pub(crate) struct Script {
    pub(crate) name: &'static str,
    pub(crate) tried: &'static str,
    pub(crate) lines: &'static str,
    pub(crate) control: Control,
}

/// For tables.
pub(crate) const fn script(name: &'static str, tried: &'static str, lines: &'static str, control: Control) -> Script {
    Script { name, tried, lines, control }
}

const TAKEN: &str = "TAKEN";
const WORKS: &str = "works";

impl Script {
    /// What it shows whether there is something to be had; `None`: the host does not have this way.
    async fn control(&self, rig: &Rig, neighbour: Option<u32>) -> Option<bool> {
        let outside = |uid, lines| rig.outside(uid, lines);
        Some(match self.control {
            Control::Same => outside(rig.mode.daemon(), self.lines).contains(TAKEN),
            Control::Outside(lines) => outside(rig.mode.daemon(), lines).contains(WORKS),
            Control::Inside(lines) => match neighbour {
                Some(_) => outside(neighbour, lines).contains(WORKS),
                None => rig.inside(lines).await.contains(WORKS),
            },
            Control::Root(_) if !nix::unistd::Uid::effective().is_root() => return None,
            Control::Root(lines) => outside(None, lines).contains(WORKS),
            Control::Where(lines) => {
                let works = outside(rig.mode.neighbour(), lines).contains(WORKS);
                return works.then_some(true);
            }
        })
    }
}

/// Runs each as a command of tenant `a`.
pub(crate) async fn from_inside(rig: &Rig, report: &mut Report, group: &str, table: &[Script]) {
    for row in table {
        let outcome = match row.control(rig, None).await {
            _ if stated(rig, row.name) => {
                Outcome::NotTried("a stated limit where commands share the daemon's uid".to_owned())
            }
            Some(works) => judge(works, &rig.inside(&format!("{}\necho tried", row.lines)).await),
            None => not_here(),
        };
        report.add(format_args!("{group}/{}", row.name), row.tried, outcome);
    }
}

/// Runs each as a neighbour.
pub(crate) async fn by_a_neighbour(rig: &Rig, report: &mut Report, group: &str, table: &[Script]) {
    let Some(neighbour) = rig.mode.neighbour() else {
        return report.add(
            group,
            "what another user of the host can do",
            Outcome::NotTried("only root can be one".to_owned()),
        );
    };
    for row in table {
        let outcome = match row.control(rig, Some(neighbour)).await {
            // The configuration is anybody's to read there.
            _ if stated(rig, row.name) && row.name == "configuration" => stated_limit(),
            Some(works) => judge(works, &rig.outside(Some(neighbour), &format!("{}\necho tried", row.lines))),
            None => not_here(),
        };
        report.add(format_args!("{group}/{}", row.name), row.tried, outcome);
    }
}

/// Runs each as the daemon's own user, for what needs no place: the network is the same from everywhere.
pub(crate) async fn from_outside(rig: &Rig, report: &mut Report, group: &str, table: &[Script]) {
    for row in table {
        let outcome = match row.control(rig, None).await {
            Some(works) => judge(works, &rig.outside(rig.mode.daemon(), &format!("{}\necho tried", row.lines))),
            None => not_here(),
        };
        report.add(format_args!("{group}/{}", row.name), row.tried, outcome);
    }
}

/// What stays open where commands share the daemon's uid, as `SECURITY.md` says: Landlock hides what is in files, not that they
/// are there, and does not know of modes. And what is no secret there.
const STATED: [&str; 14] = [
    "configuration",
    "spill-of-another",
    "state-list",
    "streams-list",
    "spills-list",
    "watch-state",
    "own-spill-mode",
    "spill-directory-mode",
    "state-mode",
    "socket-mode",
    "workdir-of-state",
    "workdir-of-tls",
    "workdir-of-tls-by-a-way-round",
    "workdir-of-tls-by-a-link",
];

/// Whether this is no attack on a daemon of this kind.
pub(crate) fn stated(rig: &Rig, name: &str) -> bool {
    rig.mode != Mode::Root && STATED.contains(&name)
}

/// The reason why an attempt is not made.
pub(crate) fn stated_limit() -> Outcome {
    Outcome::NotTried("a stated limit where commands share the daemon's uid".to_owned())
}

fn not_here() -> Outcome {
    Outcome::NotTried(
        "this host does not have this way, or only root can show that there is something to be had".to_owned(),
    )
}

fn judge(works: bool, said: &str) -> Outcome {
    let whole = said.ends_with("tried\n");
    Outcome::of(works && whole, !said.contains(TAKEN), format_args!("control {works}, it said {said:?}"))
}
