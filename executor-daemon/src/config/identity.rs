//! Who commands run as.

use std::{
    ffi::CString,
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use nix::unistd::{self, Gid, Uid, User};
use rustix::thread::CapabilitySet;

use crate::keeper::{ServerUser, protocol::Identity};

/// The user that root runs commands as when nothing else is said.
const DEFAULT_USER: &str = "executor";

/// The user that the server runs as when nothing else is said.
const DEFAULT_SERVER_USER: &str = "executor-server";

/// The uid and gid of the server where there is no such user. Nobody hands out 65520 to 65533: Debian reserves them, systemd's
/// dynamic users end below, and they are small enough to be there in containers that have 65,536 ids.
const FALLBACK_SERVER_ID: u32 = 65_521;

/// Decides who commands run as. `asked` is the configuration's, `uid` the daemon's effective user. The error ends the
/// sentence that the user begins.
pub(super) fn resolve(asked: Option<&str>, uid: Uid) -> Result<Identity, String> {
    let user = match asked {
        Some(asked) => Some(find(asked)?),
        None if uid.is_root() => match named(DEFAULT_USER)? {
            Some(user) => Some(user),
            None => {
                return Err(format!(
                    "must be given when the daemon is root and there is no user `{DEFAULT_USER}`: name an unprivileged \
                     user, or root itself to leave the daemon unprotected from its commands"
                ));
            }
        },
        None => None,
    };
    match user {
        Some(user) if user.uid == uid => own(uid, Some(user)),
        Some(user) if uid.is_root() => other(user),
        Some(user) => Err(format!("the daemon runs as uid {uid} and cannot become {}; only root can", user.name)),
        None => own(uid, None),
    }
}

/// Most users of a range: more owners than that are not told apart by a host.
const MAX_RANGE: u32 = 65_536;

/// A range of uids, `FIRST-LAST`, that need no accounts. They share the group that has the number of the first, and have no home
/// yet. `uid` is the daemon's effective user. The error ends the sentence that the range begins.
pub(super) fn range(asked: &str, uid: Uid) -> Result<Identity, String> {
    let ends = asked.split_once('-').and_then(|(first, last)| Some((first.parse().ok()?, last.parse().ok()?)));
    let (first, last): (u32, u32) = ends.ok_or("must be two uids with a dash between them, such as 70000-70063")?;
    if first == 0 || last <= first || last == u32::MAX || last - first >= MAX_RANGE {
        return Err(format!("must go up, leave out root, and have 2 to {MAX_RANGE} uids"));
    }
    if !uid.is_root() {
        return Err(format!("the daemon runs as uid {uid} and cannot become others; only root can"));
    }
    for (map, id) in [("/proc/self/uid_map", first), ("/proc/self/uid_map", last), ("/proc/self/gid_map", first)] {
        exists_here(map, id)?;
    }
    Ok(Identity {
        name: asked.to_owned(),
        uid: first,
        uids: last - first + 1,
        gid: first,
        groups: Vec::new(),
        home: "/".into(),
        change: true,
        capabilities: Some(0),
        allow_setuid: false,
    })
}

fn exists_here(map: &str, id: u32) -> Result<(), String> {
    if fs::read_to_string(map).is_ok_and(|map| !has_id(&map, id)) {
        return Err(format!("id {id} does not exist in this user namespace ({map}); name a user that does"));
    }
    Ok(())
}

/// The bit of a capability, by its name. The error ends the sentence that the name begins.
pub(super) fn capability(name: &str, uid: Uid) -> Result<u64, String> {
    let known = name.strip_prefix("CAP_").and_then(CapabilitySet::from_name);
    let bit = known.ok_or("is no capability; they are called like CAP_NET_BIND_SERVICE")?.bits();
    if !uid.is_root() {
        return Err("cannot be given to commands; only a daemon that is root can".to_owned());
    }
    match rustix::thread::capabilities(None) {
        Ok(own) if own.permitted.bits() & bit == 0 => {
            Err("is not the daemon's own, so commands cannot have it".to_owned())
        }
        Ok(_) | Err(_) => Ok(bit),
    }
}

/// Decides who the server runs as, the process that faces the network. `None`: as the daemon itself. `asked` is the
/// configuration's, `uid` the daemon's effective user, `commands` all whom commands run as. The error ends the sentence that the user
/// begins.
///
/// Where all commands run as root, nothing would be gained: a server can always have a command started.
pub(super) fn resolve_server(
    asked: Option<&str>,
    uid: Uid,
    commands: &[Identity],
) -> Result<Option<ServerUser>, String> {
    let user = match asked {
        Some(asked) => asked_server(asked)?,
        None if !uid.is_root() || commands.iter().all(|commands| !commands.change) => return Ok(None),
        None => default_server()?,
    };
    if user.uid == uid.as_raw() {
        return Ok(None);
    }
    if !uid.is_root() {
        return Err(format!("the daemon runs as uid {uid} and cannot become {}; only root can", user.uid));
    }
    if commands.iter().any(|commands| commands.has_uid(user.uid)) {
        return Err(format!(
            "must not be the user that commands run as (uid {}), who could end the server and read its memory",
            user.uid
        ));
    }
    for (map, id) in [("/proc/self/uid_map", user.uid), ("/proc/self/gid_map", user.gid)] {
        exists_here(map, id)?;
    }
    Ok(Some(user))
}

fn asked_server(asked: &str) -> Result<ServerUser, String> {
    match asked.parse::<u32>() {
        Ok(u32::MAX) => Err("is no user".to_owned()),
        Ok(id) => {
            let user = User::from_uid(Uid::from_raw(id)).map_err(|error| format!("cannot be looked up: {error}"))?;
            // It needs no account, nor a group of one.
            Ok(user.map_or(ServerUser { uid: id, gid: id }, ServerUser::from))
        }
        Err(_not_a_number) => find(asked).map(ServerUser::from),
    }
}

fn default_server() -> Result<ServerUser, String> {
    if let Some(user) = named(DEFAULT_SERVER_USER)? {
        return Ok(user.into());
    }
    let taken = User::from_uid(Uid::from_raw(FALLBACK_SERVER_ID));
    match taken.map_err(|error| format!("cannot be looked up: {error}"))? {
        None => Ok(ServerUser { uid: FALLBACK_SERVER_ID, gid: FALLBACK_SERVER_ID }),
        Some(other) => Err(format!(
            "must be given where there is no user `{DEFAULT_SERVER_USER}` and uid {FALLBACK_SERVER_ID} is somebody's ({})",
            other.name
        )),
    }
}

/// Whether a user namespace's map (lines of: first id inside, first outside, count) has an id.
fn has_id(map: &str, id: u32) -> bool {
    map.lines().any(|line| {
        let mut numbers = line.split_ascii_whitespace().map(|number| number.parse::<u64>().unwrap_or(0));
        let (first, _outside, count) = (numbers.next(), numbers.next(), numbers.next());
        first.zip(count).is_some_and(|(first, count)| (first..first + count).contains(&u64::from(id)))
    })
}

/// A user by name or number.
fn find(asked: &str) -> Result<User, String> {
    let user = match asked.parse::<u32>() {
        Ok(uid) => User::from_uid(Uid::from_raw(uid)).map_err(|error| format!("cannot be looked up: {error}"))?,
        Err(_not_a_number) => named(asked)?,
    };
    user.ok_or_else(|| "there is no such user on this host".to_owned())
}

fn named(name: &str) -> Result<Option<User>, String> {
    User::from_name(name).map_err(|error| format!("cannot be looked up: {error}"))
}

/// The daemon's own user. Containers run as numbers that have no name; those are called by their number.
fn own(uid: Uid, user: Option<User>) -> Result<Identity, String> {
    let user = match user {
        Some(user) => Some(user),
        None => User::from_uid(uid).map_err(|error| format!("uid {uid} cannot be looked up: {error}"))?,
    };
    let groups = unistd::getgroups().map_err(|error| format!("the daemon's groups cannot be read: {error}"))?;
    let home = std::env::var_os("HOME").map(PathBuf::from).filter(|home| home.is_absolute());
    Ok(Identity {
        name: user.as_ref().map_or_else(|| uid.to_string(), |user| user.name.clone()),
        uid: uid.as_raw(),
        uids: 1,
        gid: unistd::getegid().as_raw(),
        groups: groups.into_iter().map(Gid::as_raw).collect(),
        home: home.or_else(|| user.map(|user| user.dir)).unwrap_or_else(|| "/".into()),
        change: false,
        capabilities: None,
        allow_setuid: true,
    })
}

impl From<User> for ServerUser {
    fn from(user: User) -> Self {
        Self { uid: user.uid.as_raw(), gid: user.gid.as_raw() }
    }
}

fn other(user: User) -> Result<Identity, String> {
    let name = CString::new(user.name.as_str()).map_err(|nul| nul.to_string())?;
    let groups = unistd::getgrouplist(&name, user.gid)
        .map_err(|error| format!("the groups of {} cannot be read: {error}", user.name))?;
    Ok(Identity {
        name: user.name,
        uid: user.uid.as_raw(),
        uids: 1,
        gid: user.gid.as_raw(),
        groups: groups.into_iter().map(Gid::as_raw).collect(),
        home: user.dir,
        change: true,
        capabilities: Some(0),
        allow_setuid: false,
    })
}

/// Whether an identity may enter a directory, as far as modes tell: access lists can only be known by trying, and the daemon
/// does not become somebody else to try.
pub(super) fn can_enter(identity: &Identity, directory: &Path) -> bool {
    can_search(identity.uid, identity.gid, &identity.groups, directory)
}

/// As [`can_enter`], for the server, which has no further groups.
pub(super) fn server_can_enter(server: ServerUser, directory: &Path) -> bool {
    can_search(server.uid, server.gid, &[], directory)
}

fn can_search(uid: u32, gid: u32, groups: &[u32], directory: &Path) -> bool {
    let Ok(real) = directory.canonicalize() else { return false };
    real.is_dir() && real.ancestors().all(|part| may_search(uid, gid, groups, part))
}

fn may_search(uid: u32, gid: u32, groups: &[u32], directory: &Path) -> bool {
    let Ok(metadata) = fs::metadata(directory) else { return false };
    if uid == 0 {
        return true;
    }
    let shift = if metadata.uid() == uid {
        6
    } else if metadata.gid() == gid || groups.contains(&metadata.gid()) {
        3
    } else {
        0
    };
    metadata.mode() >> shift & 1 == 1
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn someone() -> Identity {
        Identity {
            name: "x".into(),
            uid: 12_345,
            uids: 1,
            gid: 12_345,
            groups: vec![7],
            home: "/home/x".into(),
            change: true,
            capabilities: Some(0),
            allow_setuid: false,
        }
    }

    #[test]
    fn only_root_can_run_commands_as_somebody_else() {
        let me = unistd::geteuid();
        let root = resolve(Some("root"), me);
        if me.is_root() {
            assert!(!root.expect("root may name itself").change);
            assert!(resolve(Some("nobody"), me).expect("root may name anybody").change);
        } else {
            assert!(root.expect_err("refused").contains("only root can"));
            assert!(!resolve(None, me).expect("oneself").change);
        }
        // A uid that is not root's, whoever runs this test.
        let refused = resolve(Some("root"), Uid::from_raw(12_345)).expect_err("refused");
        assert_eq!(refused, "the daemon runs as uid 12345 and cannot become root; only root can");
        assert_eq!(resolve(Some("no-such-user"), me), Err("there is no such user on this host".to_owned()));
    }

    #[test]
    fn the_server_has_a_user_of_its_own_where_commands_have() {
        let (root, nobody) = (Uid::from_raw(0), Uid::from_raw(12_346));
        let own = Identity { change: false, uid: 0, ..someone() };
        assert_eq!(resolve_server(None, nobody, &[someone()]), Ok(None));
        assert_eq!(resolve_server(None, root, std::slice::from_ref(&own)), Ok(None), "commands are root anyway");
        assert_eq!(resolve_server(Some("0"), root, &[someone()]), Ok(None), "root was named");
        // What nobody has in a namespace of few ids cannot be had.
        let there = fs::read_to_string("/proc/self/uid_map").is_ok_and(|map| has_id(&map, 54_321));
        let given = resolve_server(Some("54321"), root, &[own]);
        let server = ServerUser { uid: 54_321, gid: 54_321 };
        assert_eq!(given.clone().ok(), there.then_some(Some(server)), "{given:?}");
        if let (true, Ok(server)) = (there, resolve_server(None, root, &[someone()])) {
            let uid = server.expect("of its own").uid;
            assert!(uid != 0 && uid != someone().uid, "{uid}");
        }
        let refused = |asked, uid| resolve_server(Some(asked), uid, &[someone()]).expect_err("refused");
        assert!(refused("12345", root).starts_with("must not be the user that commands run as"));
        assert!(refused("54321", nobody).ends_with("only root can"));
        assert_eq!(refused("no-such-user", root), "there is no such user on this host");
        assert_eq!(refused("4294967295", root), "is no user");
    }

    #[test]
    fn a_namespace_has_the_ids_of_its_map() {
        let map = "         0       1000          1\n         1     100000      65536\n";
        for (id, there) in [(0, true), (65_521, true), (65_536, true), (65_537, false), (u32::MAX, false)] {
            assert_eq!(has_id(map, id), there, "{id}");
        }
        assert!(!has_id("0 0 1", FALLBACK_SERVER_ID) && has_id("0 0 4294967295", FALLBACK_SERVER_ID));
    }

    #[test]
    fn a_nameless_user_is_called_by_its_number() {
        let identity = resolve(None, Uid::from_raw(3_999_999)).expect("a uid without a name");
        assert_eq!((identity.name.as_str(), identity.uid, identity.change), ("3999999", 3_999_999, false));
    }

    #[test]
    fn a_directory_is_entered_by_its_owner_its_group_or_anybody() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let inner = dir.path().join("inner");
        fs::create_dir(&inner).expect("a directory");
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).expect("a mode");
        for (mode, enters) in [(0o755, true), (0o711, true), (0o750, false), (0o700, false)] {
            fs::set_permissions(&inner, fs::Permissions::from_mode(mode)).expect("a mode");
            assert_eq!(can_enter(&someone(), &inner), enters, "{mode:o}");
        }
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o700)).expect("a mode");
        fs::set_permissions(&inner, fs::Permissions::from_mode(0o755)).expect("a mode");
        assert!(!can_enter(&someone(), &inner), "what is above counts too");
        assert!(!can_enter(&someone(), &dir.path().join("none")));
    }
}
